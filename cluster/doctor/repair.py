"""What can be put right over ssh: the commands, and those that undo them. Prints nothing, changes nothing. Pure.

No Mac has seen these commands yet, so a person types them. What a restart or an unplugged cable undoes is said so.
`cluster doctor --fix` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from cluster.cabling.addresses import clashes, free_subnets, ipv4_gid_index, port_addresses, same_subnet
from cluster.cabling.topology import Cable, End, Topology, port_name, why_never_rdma, why_not_yet
from cluster.doctor.findings import Finding
from cluster.macs.hosts import Host

MASK = "255.255.255.252"


@dataclass(frozen=True, slots=True)
class Repair:
    """On `host`, for the reason `what`: type `commands` in this order; `undo` takes them back, in this order."""

    host: str
    what: str
    commands: tuple[str, ...]
    undo: tuple[str, ...]


def repairs(found: Topology, findings: Sequence[Finding]) -> list[Repair]:
    """For what the findings name and ssh can mend, sorted by host: bridges, addresses, sleep, the wired limit."""
    kinds = {finding.kind for finding in findings}
    codes = {finding.code for finding in findings}
    parts = chain(
        _bridges(found, kinds),
        _addresses(found, kinds),
        _power(found.hosts, codes),
        _wired(found.hosts, codes),
    )
    place = {host.name: i for i, host in enumerate(found.hosts)}
    return sorted(parts, key=lambda repair: place[repair.host])


def _bridges(found: Topology, kinds: set[str]) -> Iterator[Repair]:
    if not kinds & {"bridge-active", "bridge-member", "bridge-loop"}:
        return
    for i, host in enumerate(found.hosts):
        cabled = [port.device for port in host.ports if port.peers and port.device in host.bridge_members]
        if not cabled or not host.bridge_up:
            continue
        if ("bridge-active" in kinds and _whole(host)) or ("bridge-loop" in kinds and why_never_rdma(host)):
            named = (name for name, device in host.interfaces.items() if device == "bridge0")
            service = next(named, "Thunderbolt Bridge")
            yield Repair(
                host.name,
                "Thunderbolt Bridge holds its ports. The first command lasts; the second acts at once.",
                (f'sudo networksetup -setnetworkserviceenabled "{service}" off', "sudo ifconfig bridge0 down"),
                (f'sudo networksetup -setnetworkserviceenabled "{service}" on', "sudo ifconfig bridge0 up"),
            )
        elif i not in found.never_rdma:
            yield Repair(
                host.name,
                "Ports with cables are members of bridge0. A restart brings it back.",
                tuple(f"sudo ifconfig bridge0 deletem {device}" for device in cabled),
                tuple(f"sudo ifconfig bridge0 addm {device}" for device in reversed(cabled)),
            )


def _whole(host: Host) -> bool:
    return all(port.device in host.bridge_members for port in host.ports if port.device)


def _addresses(found: Topology, kinds: set[str]) -> Iterator[Repair]:
    """Both ends of a cable get new addresses as soon as one end lacks a good one; other cables keep theirs."""
    needing = [cable for cable in found.cables if _needs_addresses(found, cable)]
    for cable, subnet in zip(needing, free_subnets(found.hosts), strict=False):
        for end, ip in zip((cable.a, cable.b), subnet.hosts(), strict=True):
            host, device = found.hosts[end.host], end.port.device
            old = [address for address in port_addresses(host, end.port) if not address.ip.startswith("169.254.")]
            other = found.hosts[cable.b.host if end is cable.a else cable.a.host]
            yield Repair(
                host.name,
                f"{port_name(end.port)}, the cable to {other.name}. Lasts until a restart or until it is unplugged.",
                (
                    *(f"sudo ifconfig {device} inet {address.ip} -alias" for address in old),
                    f"sudo ifconfig {device} inet {ip} netmask {MASK}",
                ),
                (
                    f"sudo ifconfig {device} inet {ip} -alias",
                    *(f"sudo ifconfig {device} inet {address.ip}/{address.prefix} alias" for address in old),
                    *([] if old else [f"sudo ipconfig set {device} DHCP"]),
                ),
            )


def _needs_addresses(found: Topology, cable: Cable) -> bool:
    a, b = found.hosts[cable.a.host], found.hosts[cable.b.host]
    if not cable.a.port.device or not cable.b.port.device or cable.behind or not cable.seen_by_both:
        return False
    if found.never_rdma:  # the group talks TCP, best over its cables
        return same_subnet(a, cable.a.port, b, cable.b.port) is not True or _link_local(found, cable)
    if cable.slow or why_not_yet(a) or why_not_yet(b):
        return False
    clashing = {(i, port.number) for i, port, _, _ in clashes(found)}
    return (
        any(_lacks_gid(found, end) for end in (cable.a, cable.b))
        or same_subnet(a, cable.a.port, b, cable.b.port) is False
        or any((end.host, end.port.number) in clashing for end in (cable.a, cable.b))
    )


def _link_local(found: Topology, cable: Cable) -> bool:
    return any(
        address.ip.startswith("169.254.")
        for end in (cable.a, cable.b)
        for address in port_addresses(found.hosts[end.host], end.port)
    )


def _lacks_gid(found: Topology, end: End) -> bool:
    if end.port.device in found.hosts[end.host].bridge_members:
        return True
    return end.device is not None and end.device.active and bool(end.device.gids) and ipv4_gid_index(end.device) is None


def _power(hosts: Sequence[Host], codes: set[str]) -> Iterator[Repair]:
    for host in hosts:
        if host.power is None or f"sleep:{host.name}" not in codes:
            continue
        before = f"sudo pmset -a sleep {host.power.sleep_min} disksleep {host.power.disksleep_min}"
        after = "sudo pmset -a sleep 0 disksleep 0"
        if host.power.autorestart is not None:
            before += f" autorestart {int(host.power.autorestart)}"
            after += " autorestart 1"
        yield Repair(host.name, f"It sleeps after {host.power.sleep_min} minutes. Lasts.", (after,), (before,))


def _wired(hosts: Sequence[Host], codes: set[str]) -> Iterator[Repair]:
    for host in hosts:
        if f"wired-limit:{host.name}" in codes:
            yield Repair(
                host.name,
                "The limit of wired memory is odd; 0 is macOS's own. Lasts until a restart, as the odd one did.",
                ("sudo sysctl iogpu.wired_limit_mb=0",),
                (f"sudo sysctl iogpu.wired_limit_mb={host.wired_limit_mb}",),
            )
