"""What a finding is, and what doctor's rules share about a group of hosts. Pure; only doctor and its rules use it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cluster.cabling.topology import Cable, End, Topology, device_of, port_name, why_never_rdma, why_not_yet
from cluster.macs.hosts import Host, Port


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` is a kind and where, like "sleep:st-1". `host` and `port` are empty where it is about several.

    `blocks` is whether the cluster that these Macs and cables are meant for cannot run until it is fixed.
    """

    code: str
    blocks: bool
    host: str
    port: str
    seen: str
    why: str
    do: str

    @property
    def kind(self) -> str:
        return self.code.partition(":")[0]


class Group:
    """The hosts that are judged together."""

    def __init__(self, found: Topology) -> None:
        self.topology = found
        self.hosts = found.hosts

    @cached_property
    def many(self) -> bool:
        return len(self.hosts) > 1

    @cached_property
    def wants_rdma(self) -> bool:
        """Whether these Macs are meant for RDMA: all could do it, and cables lead from them to Macs."""
        return not self.topology.never_rdma and bool(self.topology.cables or self.topology.strangers)

    @cached_property
    def link_blocks(self) -> bool:
        """Whether one bad cable or port stands in the way: not if a mesh or ring works without it."""
        return self.wants_rdma and not self.topology.mesh and self.topology.ring() is None

    def cabled(self, i: int) -> list[End]:
        """The ports of a host in which a cable to another Mac is."""
        host = self.hosts[i]
        return [End(i, port, device_of(host, port)) for port in host.ports if port.peers]

    def explained(self, cable: Cable) -> bool:
        """Whether what is told elsewhere keeps RDMA off a cable: hardware, macOS, the switch, its speed, a dock."""
        hosts = (self.hosts[cable.a.host], self.hosts[cable.b.host])
        whole_host = any(why_never_rdma(host) or why_not_yet(host) for host in hosts)
        return cable.slow or bool(cable.behind) or not cable.seen_by_both or whole_host

    def pair(self, cable: Cable) -> tuple[Host, Host]:
        return self.hosts[cable.a.host], self.hosts[cable.b.host]

    def both_ends(self, cable: Cable) -> str:
        """ "st-1 Thunderbolt 2 (en3) - st-4 Thunderbolt 2 (en3)" """
        a, b = self.pair(cable)
        return f"{a.name} {port_name(cable.a.port)} - {b.name} {port_name(cable.b.port)}"


def on_host(code: str, host: Host, blocks: bool, seen: str, why: str, do: str, port: Port | None = None) -> Finding:
    """A finding about one host, or one port of it."""
    return Finding(code, blocks, host.name, port_name(port) if port else "", seen, why, do)


def on_group(code: str, blocks: bool, seen: str, why: str, do: str) -> Finding:
    """A finding about several hosts."""
    return Finding(code, blocks, "", "", seen, why, do)
