"""The recorded Macs of tests/macs as facts, with the truth about them; and the same Macs under other names."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cluster.macs.hosts import Host
from cluster.macs.probe import probe_recorded

MACS = Path(__file__).parent / "macs"
CLUSTERS = ("broken", "mesh2", "mesh4-double", "mixed", "ring5", "single", "vm1")


@cache
def truth(cluster: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MACS / cluster / "cluster.json").read_text())
    return found


@cache
def recorded(cluster: str) -> tuple[Host, ...]:
    """The hosts of a recorded cluster, in the order of its cluster.json."""
    order = [host["name"] for host in truth(cluster)["hosts"]]
    return tuple(sorted(probe_recorded(MACS / cluster), key=lambda host: order.index(host.name)))


@dataclass(frozen=True)
class Renamed:
    """Hosts under other names, UUIDs and interfaces, in another order of hosts and ports; and the way back."""

    hosts: tuple[Host, ...]
    old_host: dict[str, str]
    old_device: dict[str, dict[str, str]]  # by the old name of the host

    def old_code(self, code: str) -> tuple[str, ...]:
        """A finding's code in the old names; the two ends of a cable in alphabetical order."""
        kind, *parts = code.split(":")
        if not parts:
            return (kind,)
        first = self.old_host[parts[0]]
        if len(parts) == 2 and parts[1] in self.old_host:
            return (kind, *sorted((first, self.old_host[parts[1]])))
        devices = self.old_device[first]
        rest = [
            f"rdma_{devices[part[5:]]}" if part.startswith("rdma_") else devices.get(part, part) for part in parts[1:]
        ]
        return (kind, first, *rest)


def unchanged(code: str) -> tuple[str, ...]:
    """A code of cluster.json in the form of `Renamed.old_code`."""
    kind, *parts = code.split(":")
    return (kind, *(sorted(parts) if kind in ("missing-cable", "slow-link") else parts))


def renamed(hosts: tuple[Host, ...], seed: int) -> Renamed:
    chance = random.Random(seed)
    uuids: dict[str, str] = {}

    def uuid(old: str) -> str:
        return uuids.setdefault(old, f"{chance.getrandbits(128):032X}") if old else ""

    names = [f"mac{chance.randrange(10**6)}x{i}" for i in range(len(hosts))]
    chance.shuffle(names)
    new_hosts, old_device = [], {}
    for host, name in zip(hosts, names, strict=True):
        device = _other_devices(host, chance)
        old_device[host.name] = {new: old for old, new in device.items()}
        ports = [
            replace(
                port,
                device=device.get(port.device, ""),
                domain_uuid=uuid(port.domain_uuid),
                peers=tuple(replace(peer, domain_uuid=uuid(peer.domain_uuid)) for peer in port.peers),
            )
            for port in host.ports
        ]
        rdma = [replace(found, name=f"rdma_{device[found.name[5:]]}") for found in host.rdma_devices]
        addresses = [replace(found, interface=device.get(found.interface, found.interface)) for found in host.addresses]
        members = [device[found] for found in host.bridge_members]
        for shuffled in (ports, rdma, addresses, members):
            chance.shuffle(shuffled)
        new_hosts.append(
            replace(
                host,
                name=name,
                ssh=name,
                uuid=uuid(host.uuid),
                ports=tuple(ports),
                rdma_devices=tuple(rdma),
                addresses=tuple(addresses),
                bridge_members=tuple(members),
                interfaces={title: device.get(found, found) for title, found in host.interfaces.items()},
            )
        )
    chance.shuffle(new_hosts)
    return Renamed(tuple(new_hosts), dict(zip(names, (host.name for host in hosts), strict=True)), old_device)


def _other_devices(host: Host, chance: random.Random) -> dict[str, str]:
    """enN -> another enN, a permutation of all that the host has."""
    seen = {
        *(port.device for port in host.ports),
        *(device.name[5:] for device in host.rdma_devices),
        *(address.interface for address in host.addresses if address.interface.startswith("en")),
        *(device for device in host.interfaces.values() if device.startswith("en")),
        *host.bridge_members,
    } - {""}
    old = sorted(seen)
    new = old[:]
    chance.shuffle(new)
    return dict(zip(old, new, strict=True))
