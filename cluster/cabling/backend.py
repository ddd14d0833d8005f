"""From the cables to a hostfile: which backend, in which order, over which devices, met at which address. Pure.

jaccl where RDMA joins every two Macs, jaccl-ring where it joins them in a ring, the TCP ring where one of them can
never do RDMA. Where RDMA could work and does not yet, nothing is chosen quietly: NoHostfile says what to fix. Also
compares a given hostfile with the facts. `cluster hostfile`, `check`, `plan` and `up` call it; it knows no models, so
the order of the ranks is the plan's if one is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from cluster.cabling.addresses import (
    VPN,
    ipv4_of,
    is_link_local,
    lan_addresses,
    meeting_point,
    network_of,
    port_addresses,
)
from cluster.cabling.hostfile import HostEntry, Hostfile, check
from cluster.cabling.topology import MESH_HOSTS, RING_CABLES, Cable, Topology, cycle
from cluster.errors import NoHostfile
from cluster.macs.hosts import Host

Row = tuple[tuple[str, ...] | None, ...]  # a host's devices that lead to each rank


@dataclass(frozen=True, slots=True)
class Joined:
    """A hostfile, the hosts it is made of in the order of the ranks, and what is worth knowing about it."""

    hostfile: Hostfile
    order: tuple[int, ...]
    notes: tuple[str, ...] = ()
    subset: tuple[str, ...] = ()  # the hosts that could use RDMA without the others


def best_backend(found: Topology) -> str | None:
    """What these Macs can run now: jaccl, jaccl-ring or ring; None for one Mac, or when RDMA is to be mended first."""
    if len(found.hosts) < 2:
        return None
    if found.mesh:
        return "jaccl"
    if found.ring() is not None:
        return "jaccl-ring"
    return "ring" if found.never_rdma or not found.cables else None


def join(found: Topology, *, backend: str | None = None, order: Sequence[int] | None = None) -> Joined:
    """The hostfile for all hosts of a topology. `order`: ranks as indices of hosts; else the given or the ring's order.

    `backend` overrides the choice. Raises NoHostfile where it cannot be had, saying what stands in the way.
    """
    hosts = found.hosts
    if len(hosts) < 2:
        raise NoHostfile(
            f"{hosts[0].name if hosts else 'No host'}: a hostfile joins at least 2 Macs.",
            hint="`cluster up MODEL` runs on one Mac without one.",
        )
    chosen = backend or best_backend(found)
    if chosen is None:
        raise NoHostfile(
            "RDMA does not join these Macs yet:\n  " + "\n  ".join(_obstacles(found)),
            hint="`cluster doctor` says what to fix, in order. `--backend ring` goes over TCP meanwhile.",
        )
    if chosen == "jaccl":
        joined = _mesh(found, tuple(order or range(len(hosts))))
    elif chosen == "jaccl-ring":
        joined = _jaccl_ring(found, order)
    else:
        joined = _tcp_ring(found, order)
    if faults := check(joined.hostfile):
        raise NoHostfile("No hostfile can be made of these Macs:\n  " + "\n  ".join(faults))
    return joined


def _obstacles(found: Topology) -> list[str]:
    said = [f"{_pair(found, cable)}: {cable.why_not}" for cable in found.cables if cable.why_not]
    pairs = combinations(range(len(found.hosts)), 2)
    uncabled = [f"{found.hosts[i].name} - {found.hosts[j].name}" for i, j in pairs if not found.between(i, j)]
    return said + ([f"no cable: {', '.join(uncabled)}"] if uncabled else [])


def _pair(found: Topology, cable: Cable) -> str:
    return f"{found.hosts[cable.a.host].name} - {found.hosts[cable.b.host].name}"


# ---------------------------------------------------------------- the three backends


def _mesh(found: Topology, order: tuple[int, ...]) -> Joined:
    """Every cable of every pair, aligned. JACCL uses as many on each link as the poorest link has; we say so."""
    hosts = found.hosts
    missing = [pair for pair in combinations(range(len(hosts)), 2) if not found.rdma_between(*pair)]
    if missing or len(hosts) > MESH_HOSTS:
        names = ", ".join(f"{hosts[i].name} - {hosts[j].name}" for i, j in missing)
        raise NoHostfile(
            f"jaccl needs RDMA between every two of at most {MESH_HOSTS} Macs; it is missing for {names}."
            if missing
            else f"A jaccl mesh takes at most {MESH_HOSTS} Macs ({len(hosts)} given).",
            hint="`--backend jaccl-ring` needs it between neighbours only." if found.ring() else "",
        )
    counts = {pair: len(found.rdma_between(*pair)) for pair in combinations(range(len(hosts)), 2)}
    notes = []
    if len(set(counts.values())) > 1:
        least, ring = min(counts.values()), found.ring()
        few = ", ".join(f"{hosts[i].name}-{hosts[j].name}" for (i, j), count in counts.items() if count == least)
        notes.append(f"Some links have more cables than others; a mesh uses {least} on each (all that {few} has).")
        if ring and ring[1] > least:
            ring_names = ", ".join(hosts[i].name for i in ring[0])
            notes.append(
                f"`--backend jaccl-ring` would use {ring[1]} on each, in the order {ring_names}: more bandwidth for "
                "long prompts and pipelines, but a longer way for tensor parallel."
            )
    least = min(counts.values())
    rows = _rows(found, order, lambda i, j: found.rdma_between(i, j)[:least])
    return _over_rdma(found, "jaccl", order, rows, notes)


def _jaccl_ring(found: Topology, order: Sequence[int] | None) -> Joined:
    """Neighbours only, the same number of cables everywhere. The plan's order counts if RDMA follows it."""
    n = len(found.hosts)
    best = found.ring()
    if best is None:
        raise NoHostfile(
            "jaccl-ring needs an order in which RDMA joins every Mac to the next, and there is none:\n  "
            + "\n  ".join(_obstacles(found)),
            hint="`cluster doctor` says what to fix.",
        )
    notes = []
    ranks, cables = best
    if order is not None:
        given = tuple(order)
        least = min(len(found.rdma_between(given[k], given[(k + 1) % n])) for k in range(n))
        if least:
            ranks, cables = given, min(least, RING_CABLES)
        else:
            ranks = _turned(ranks, given[0])
            names = ", ".join(found.hosts[i].name for i in ranks)
            notes.append(f"RDMA does not follow the order asked for; the ring goes {names}.")
    neighbours = {frozenset((ranks[k], ranks[(k + 1) % n])) for k in range(n)}
    rows = _rows(
        found, ranks, lambda i, j: found.rdma_between(i, j)[:cables] if frozenset((i, j)) in neighbours else ()
    )
    return _over_rdma(found, "jaccl-ring", ranks, rows, notes)


def _turned(ring: tuple[int, ...], first: int) -> tuple[int, ...]:
    at = ring.index(first)
    return ring[at:] + ring[:at]


def _rows(found: Topology, order: Sequence[int], cables_between: Callable[[int, int], tuple[Cable, ...]]) -> list[Row]:
    """The matrix of devices in the order of the ranks. The k-th name at both ends is the same cable."""
    return [
        tuple(
            tuple(cable.end_at(i).port.rdma for cable in cables_between(i, j)) or None if i != j else None
            for j in order
        )
        for i in order
    ]


def _over_rdma(
    found: Topology,
    backend: str,
    order: tuple[int, ...],
    rows: Sequence[Row],
    notes: Sequence[str],
) -> Joined:
    hosts = [found.hosts[i] for i in order]
    ips, more = _meeting(hosts)
    entries = tuple(HostEntry(host.ssh, (ip,), row) for host, ip, row in zip(hosts, ips, rows, strict=True))
    return Joined(Hostfile(entries, backend), order, (*notes, *more))


def _tcp_ring(found: Topology, order: Sequence[int] | None) -> Joined:
    """Over the cables where both ends of each link have an address of their own subnet, else over the LAN."""
    n = len(found.hosts)
    by_cable = cycle(found.joined(found.cables))
    ranks = tuple(order) if order is not None else by_cable or tuple(range(n))
    hosts = [found.hosts[i] for i in ranks]
    lan, notes = _meeting(hosts)
    cabled = [_listens(found, ranks[k - 1], ranks[k]) for k in range(n)]
    if all(cabled):
        ips: Sequence[str] = cabled
    else:
        ips = lan
        if by_cable:
            notes.append(
                "The ring goes over the network, not the cables: their ports have no addresses of their own subnets. "
                "`cluster doctor --fix` prints some."
            )
    entries = tuple(HostEntry(host.ssh, (ip,)) for host, ip in zip(hosts, ips, strict=True))
    return Joined(Hostfile(entries, "ring"), ranks, tuple(notes) + _left_out(found), _subset_names(found))


def _listens(found: Topology, before: int, here: int) -> str:
    """The address at which a rank hears the one before it over a cable of theirs; "" if there is none that is sure."""
    for cable in found.between(before, here):
        mine, other = cable.end_at(here), cable.end_at(before)
        theirs = [network_of(address) for address in port_addresses(found.hosts[before], other.port)]
        for address in port_addresses(found.hosts[here], mine.port):
            if not is_link_local(address) and network_of(address) in theirs:
                return address.ip
    return ""


def _subset_names(found: Topology) -> tuple[str, ...]:
    return tuple(found.hosts[i].name for i in found.jaccl_subset())


def _left_out(found: Topology) -> tuple[str, ...]:
    names = _subset_names(found)
    if not names:
        return ()
    rest = [f"{host.name} ({host.memory_bytes >> 30} GB)" for host in found.hosts if host.name not in names]
    return (
        f"{' and '.join(names)} can use RDMA (jaccl) without the others: `--only {','.join(names)}`; "
        f"left out: {', '.join(rest)}.",
    )


def _meeting(hosts: Sequence[Host]) -> tuple[list[str], list[str]]:
    """A LAN address of each host, and notes. The first is where the ranks meet. Raises NoHostfile if one has none."""
    meeting = meeting_point(hosts)
    if meeting is None:
        names = ", ".join(host.name for host in hosts if not lan_addresses(host))
        raise NoHostfile(
            f"{names}: no IPv4 address on Ethernet or Wi-Fi.",
            hint="The ranks meet at an address of the LAN, never a cable's or a VPN's: use Ethernet or Wi-Fi.",
        )
    addresses, shared = meeting
    notes = []
    if not shared:
        notes.append(
            f"Not all are in {network_of(addresses[0])} like {hosts[0].name}; see that they reach {addresses[0].ip}."
        )
    if is_link_local(addresses[0]):
        notes.append(f"{hosts[0].name} has only the link-local address {addresses[0].ip}, which may change.")
    return [address.ip for address in addresses], notes


# ---------------------------------------------------------------- a given hostfile against the facts


def compare(hostfile: Hostfile, found: Topology) -> list[str]:
    """What a hostfile says that is not so, as probed; empty if it fits. Hosts are known by their ssh names."""
    by_ssh = {host.ssh: i for i, host in enumerate(found.hosts)}
    faults = [f"{entry.ssh}: not looked at" for entry in hostfile.hosts if entry.ssh not in by_ssh]
    ranks = [by_ssh.get(entry.ssh) for entry in hostfile.hosts]
    faults += _compare_addresses(hostfile, found, ranks)
    if not hostfile.backend.startswith("jaccl"):
        return faults
    for i, j in combinations(range(len(ranks)), 2):
        here, there = ranks[i], ranks[j]
        if here is None or there is None:
            continue
        names, back = hostfile.hosts[i].rdma[j] or (), hostfile.hosts[j].rdma[i] or ()
        faults += [fault for rank, own in ((here, names), (there, back)) for fault in _devices(found.hosts[rank], own)]
        for name, other in zip(names, back, strict=False):
            faults += _compare_cable(found, here, name, there, other)
    return list(dict.fromkeys(faults))


def _devices(host: Host, names: Sequence[str]) -> Iterator[str]:
    active = [device.name for device in host.rdma_devices if device.active]
    known = {device.name: device for device in host.rdma_devices}
    for name in names:
        if name not in known:
            yield f"{host.name}: there is no {name}; {_are_active(active)}"
        elif not known[name].active:
            yield f"{host.name}: {name} is down; {_are_active(active)}"


def _are_active(active: Sequence[str]) -> str:
    return f"active: {', '.join(active)}" if active else "none is active"


def _compare_cable(found: Topology, here: int, name: str, there: int, other: str) -> Iterator[str]:
    a, b = found.hosts[here], found.hosts[there]
    leads = [cable for cable in found.cables if name == _rdma_at(cable, here)]
    if not leads:
        if any(device.name == name for device in a.rdma_devices):
            yield f"{a.name}: no cable of {name} leads to any of these hosts"
        return
    cable = leads[0]
    end = cable.b if cable.a.host == here else cable.a
    if (end.host, end.port.rdma) != (there, other):
        yield f"{a.name} {name} leads to {found.hosts[end.host].name} {end.port.rdma}, not to {b.name} {other}"
    elif cable.why_not:
        yield f"{a.name} {name} - {b.name} {other}: {cable.why_not}"


def _rdma_at(cable: Cable, host: int) -> str:
    return cable.end_at(host).port.rdma if host in (cable.a.host, cable.b.host) else ""


def _compare_addresses(hostfile: Hostfile, found: Topology, ranks: Sequence[int | None]) -> Iterator[str]:
    for rank, (entry, i) in enumerate(zip(hostfile.hosts, ranks, strict=True)):
        host = found.hosts[i] if i is not None else None
        if host is None or not host.addresses or hostfile.local:
            continue
        label = f"{host.name} (rank {rank})" if rank == 0 else host.name
        for ip in entry.ips:
            interface = next((address.interface for address in host.addresses if address.ip == ip), "")
            port = next((port for port in host.ports if port.device and port.device == interface), None)
            if not interface:
                own = ", ".join(address.ip for address in lan_addresses(host)) or "none on a LAN"
                yield f"{label}: {ip} is not an address of it (it has {own})"
            elif rank == 0 and hostfile.backend.startswith("jaccl"):
                address = ipv4_of(ip)
                if port is not None:
                    yield f"{label}: {ip} is on Thunderbolt {port.number} ({interface}); the others meet on the LAN"
                elif interface.startswith(("utun", "tun", "tailscale", "wg", "ppp")) or (address and address in VPN):
                    yield f"{label}: {ip} is a VPN's ({interface}); use {_lan_of(host)}"


def _lan_of(host: Host) -> str:
    found = lan_addresses(host)
    return found[0].ip if found else "an address of the LAN"
