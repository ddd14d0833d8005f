"""Which Macs are joined by which cables, whether RDMA works over each, and what that allows.

Pure functions over facts. Two ports hold the same cable when each names the other's domain UUID; names of interfaces
are never compared between Macs. Doctor, backend and planner ask; nobody here knows about models or hostfiles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from cluster.macs.hosts import Host, Peer, Port, RdmaDevice

RDMA_SPEED = 80  # Gb/s: a Thunderbolt 5 link; RDMA does not come up over 40
RDMA_MACOS = (26, 2)
MESH_HOSTS = 8  # JACCL's MESH_MAX_PEERS
RING_CABLES = 4  # JACCL's RING_MAX_CONNS
TB5_CHIPS = {"M3 Ultra", "M4 Pro", "M4 Max", "M5 Pro", "M5 Max"}
TB4_CHIPS = {
    *("M1", "M1 Pro", "M1 Max", "M1 Ultra", "M2", "M2 Pro", "M2 Max", "M2 Ultra"),
    *("M3", "M3 Pro", "M3 Max", "M4", "M5"),
}


@dataclass(frozen=True, slots=True)
class End:
    """One end of a cable: which host (its index in the topology), in which port, and the port's RDMA device if any."""

    host: int
    port: Port
    device: RdmaDevice | None


@dataclass(frozen=True, slots=True)
class Cable:
    """A cable between two hosts, `a` the one that comes first. `speed` in Gb/s, 0 unknown.

    `why_not` is "" when RDMA works over it now. `seen_by_both` is False for a cable that only one end knows of.
    """

    a: End
    b: End
    speed: int
    why_not: str
    seen_by_both: bool = True
    behind: str = ""

    @property
    def rdma(self) -> bool:
        return not self.why_not

    @property
    def slow(self) -> bool:
        return 0 < self.speed < RDMA_SPEED

    def end_at(self, host: int) -> End:
        return self.a if self.a.host == host else self.b


@dataclass(frozen=True, slots=True)
class Stranger:
    """A Mac that a port sees and that is not among the hosts (or is the same host, when `own`)."""

    host: int
    port: Port
    peer: Peer
    own: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """Hosts in the order given, their cables sorted by host and port, and Macs at the other end that were not given."""

    hosts: tuple[Host, ...]
    cables: tuple[Cable, ...]
    strangers: tuple[Stranger, ...] = ()

    def between(self, i: int, j: int) -> tuple[Cable, ...]:
        """The cables between two hosts, in one order that both ends share: by the port of the one that comes first."""
        return tuple(cable for cable in self.cables if {cable.a.host, cable.b.host} == {i, j})

    def rdma_between(self, i: int, j: int) -> tuple[Cable, ...]:
        """Of these, the cables over which RDMA works now."""
        return tuple(cable for cable in self.between(i, j) if cable.rdma)

    def joined(self, cables: Iterable[Cable], at_least: int = 1) -> list[set[int]]:
        """For each host, the hosts that at least so many of the given cables lead to."""
        count: dict[tuple[int, int], int] = {}
        for cable in cables:
            pair = (cable.a.host, cable.b.host)
            count[pair] = count.get(pair, 0) + 1
        neighbours: list[set[int]] = [set() for _ in self.hosts]
        for (i, j), cables_of_pair in count.items():
            if cables_of_pair >= at_least:
                neighbours[i].add(j)
                neighbours[j].add(i)
        return neighbours

    @property
    def rdma_cables(self) -> tuple[Cable, ...]:
        return tuple(cable for cable in self.cables if cable.rdma)

    @property
    def mesh(self) -> bool:
        """Whether RDMA works between every two hosts, and there are no more than a mesh of JACCL takes."""
        n = len(self.hosts)
        return 2 <= n <= MESH_HOSTS and all(self.rdma_between(i, j) for i, j in combinations(range(n), 2))

    def ring(self) -> tuple[tuple[int, ...], int] | None:
        """An order of all hosts in which RDMA works between neighbours, with the most cables per link; and how many.

        One cycle is looked for per number of cables, from the largest that any link has (at most RING_CABLES).
        """
        counts = [len(self.rdma_between(i, j)) for i, j in combinations(range(len(self.hosts)), 2)]
        for cables in range(min(RING_CABLES, max(counts, default=0)), 0, -1):
            if (order := cycle(self.joined(self.rdma_cables, cables))) is not None:
                return order, cables
        return None

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """The groups of hosts that cables join, whether or not RDMA works over them."""
        return components(self.joined(self.cables))

    @property
    def never_rdma(self) -> dict[int, str]:
        """The hosts that can never do RDMA, whatever is set or plugged, with the reason."""
        return {i: reason for i, host in enumerate(self.hosts) if (reason := why_never_rdma(host))}

    def jaccl_subset(self) -> tuple[int, ...]:
        """The part of the hosts, with the most memory, that can run JACCL now; () if none, or if all can.

        In the order of their memory, the largest first.
        """
        everyone = tuple(range(len(self.hosts)))
        if self.mesh or self.ring():
            return ()
        neighbours = self.joined(self.rdma_cables)
        candidates: list[tuple[int, ...]] = []
        for group in components(neighbours):
            place = {host: k for k, host in enumerate(group)}
            if cycle([{place[peer] for peer in neighbours[host]} for host in group]) is not None:
                candidates.append(group)
            else:
                candidates += cliques(neighbours, group)
        able = [group for group in candidates if 2 <= len(group) < len(everyone)]
        best = max(able, key=lambda group: (sum(self.hosts[i].memory_bytes for i in group), len(group)), default=())
        return tuple(sorted(best, key=lambda i: -self.hosts[i].memory_bytes))


def topology(hosts: Sequence[Host]) -> Topology:
    """Pair the ports of the hosts into cables. Of two hosts with one UUID (a Mac given twice) the first counts."""
    owner: dict[str, tuple[int, Port]] = {}
    for i, host in enumerate(hosts):
        for port in host.ports:
            if port.domain_uuid:
                owner.setdefault(port.domain_uuid.upper(), (i, port))
    cables: dict[tuple[tuple[int, int], tuple[int, int]], Cable] = {}
    strangers = []
    for i, host in enumerate(hosts):
        for port in host.ports:
            if owner.get(port.domain_uuid.upper(), (i, port))[0] != i:
                continue
            for peer in port.peers:
                j, other = owner.get(peer.domain_uuid.upper(), (-1, port))
                if j in (-1, i):
                    strangers.append(Stranger(i, port, peer, own=j == i))
                    continue
                (low, low_port), (high, high_port) = sorted([(i, port), (j, other)], key=lambda end: end[0])
                cables[(low, low_port.number), (high, high_port.number)] = _cable(hosts, low, low_port, high, high_port)
    return Topology(tuple(hosts), tuple(cable for _, cable in sorted(cables.items())), tuple(strangers))


def _cable(hosts: Sequence[Host], low: int, low_port: Port, high: int, high_port: Port) -> Cable:
    there = [peer for peer in low_port.peers if peer.domain_uuid.upper() == high_port.domain_uuid.upper()]
    back = [peer for peer in high_port.peers if peer.domain_uuid.upper() == low_port.domain_uuid.upper()]
    a, b = End(low, low_port, device_of(hosts[low], low_port)), End(high, high_port, device_of(hosts[high], high_port))
    speed = min((port.speed for port in (low_port, high_port) if port.speed), default=0)
    behind = next((peer.behind for peer in (*there, *back) if peer.behind), "")
    seen_by_both = bool(there and back)
    return Cable(a, b, speed, _why_not(hosts, a, b, speed, behind, seen_by_both), seen_by_both, behind)


def _why_not(hosts: Sequence[Host], a: End, b: End, speed: int, behind: str, seen_by_both: bool) -> str:
    """Why RDMA does not work over a cable, or "": what lies deepest is told, since the rest follows from it."""
    ends = (a, b)
    for end in ends:
        if reason := why_never_rdma(hosts[end.host]):
            return f"{hosts[end.host].name} {reason}"
    if 0 < speed < RDMA_SPEED:
        return f"the link runs at {speed} Gb/s; RDMA needs {RDMA_SPEED}"
    if behind:
        return f"{behind} is between them; RDMA needs a direct cable"
    if not seen_by_both:
        return "only one end sees the cable"
    for end in ends:
        if reason := why_not_yet(hosts[end.host]):
            return f"{hosts[end.host].name} {reason}"
    for end in ends:
        if end.device is None:
            return f"{hosts[end.host].name} has no RDMA device for {port_name(end.port)}"
    down = [f"{end.device.name} of {hosts[end.host].name}" for end in ends if end.device and not end.device.active]
    return f"{' and '.join(down)} {'are' if len(down) > 1 else 'is'} down" if down else ""


# ---------------------------------------------------------------- facts about one host


def chip_of(host: Host) -> str:
    """ "M3 Ultra" of "Apple M3 Ultra"; "" when it is no Apple chip."""
    match = re.search(r"\bM\d+(?: (?:Pro|Max|Ultra))?\b", host.chip)
    return match.group() if match else ""


def why_never_rdma(host: Host) -> str:
    """Why no setting or cable gives this host RDMA over Thunderbolt, or "". By chip, else by what its ports can do."""
    if host.virtual is not None:
        return "is a virtual machine: a guest has no Thunderbolt RDMA"
    if host.system != "Darwin":
        return f"runs {host.system}, not macOS"
    chip = chip_of(host)
    speeds = [max(port.speed, port.max_speed) for port in host.ports]
    known_slow = bool(speeds) and all(0 < speed < RDMA_SPEED for speed in speeds)
    if chip in TB4_CHIPS or (chip not in TB5_CHIPS and known_slow):
        return f"has Thunderbolt 4 at most ({host.chip or 'its chip'}); RDMA needs Thunderbolt 5"
    return ""


def why_not_yet(host: Host) -> str:
    """What keeps RDMA off on a whole host that could do it, or "". Devices that are active count more than any flag."""
    if any(device.active for device in host.rdma_devices):
        return ""
    if (version := macos_version(host)) and version < RDMA_MACOS:
        return f"runs macOS {host.macos}; RDMA needs {RDMA_MACOS[0]}.{RDMA_MACOS[1]}"
    if host.rdma_enabled is False:
        return "has RDMA disabled"
    return "" if host.rdma_devices else "has no RDMA devices"


def macos_version(host: Host) -> tuple[int, ...]:
    """(26, 5, 1) of "26.5.1"; () if unknown."""
    return version_numbers(host.macos)


def version_numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match.group().split("."))) if match else ()


def device_of(host: Host, port: Port) -> RdmaDevice | None:
    """The RDMA device that belongs to a port, if the host lists it."""
    return next((device for device in host.rdma_devices if port.rdma and device.name == port.rdma), None)


def port_name(port: Port) -> str:
    """How a person finds a port: its Thunderbolt number, and its interface."""
    return f"Thunderbolt {port.number}" + (f" ({port.device})" if port.device else "")


# ---------------------------------------------------------------- graphs


def components(neighbours: Sequence[Set[int]]) -> tuple[tuple[int, ...], ...]:
    """The connected groups, each sorted, in the order of their first member."""
    left, groups = set(range(len(neighbours))), []
    while left:
        frontier = [min(left)]
        group = set(frontier)
        while frontier:
            fresh = neighbours[frontier.pop()] - group
            group |= fresh
            frontier += fresh
        left -= group
        groups.append(tuple(sorted(group)))
    return tuple(groups)


def cliques(neighbours: Sequence[Set[int]], among: Sequence[int]) -> list[tuple[int, ...]]:
    """Every largest set of nodes in which all are joined (Bron and Kerbosch), cut to what a mesh of JACCL takes."""
    found = []

    def grow(chosen: tuple[int, ...], may: set[int], done: set[int]) -> None:
        if not may and not done:
            found.append(tuple(sorted(chosen))[:MESH_HOSTS])
            return
        pivot = max(may | done, key=lambda node: len(neighbours[node] & may))
        for node in sorted(may - neighbours[pivot]):
            grow((*chosen, node), may & neighbours[node], done & neighbours[node])
            may, done = may - {node}, done | {node}

    grow((), set(among), set())
    return found


def cycle(neighbours: Sequence[Set[int]]) -> tuple[int, ...] | None:
    """One order in which every node follows a neighbour and the last meets the first again, or None.

    `neighbours[i]` are the nodes that i is joined to. Starts at 0. Two nodes make a ring over one link, a single node
    makes none. Depth first, to the neighbour with the fewest ways on; a (where, unvisited) that failed once is not
    tried again, and a branch ends where an unvisited node lost its second way in or cannot be reached. So a full mesh
    takes no backtracking at all, and graphs without an answer stay cheap at the degrees that Macs have (6 ports).
    """
    n = len(neighbours)
    if n < 2:
        return None
    failed: set[tuple[int, frozenset[int]]] = set()

    def reachable(here: int, left: frozenset[int]) -> bool:
        seen: set[int] = set()
        frontier = [here]
        while frontier:
            fresh = (neighbours[frontier.pop()] & left) - seen
            seen |= fresh
            frontier += fresh
        return len(seen) == len(left)

    def extend(here: int, left: frozenset[int]) -> tuple[int, ...] | None:
        if not left:
            return (here,) if 0 in neighbours[here] else None
        if (here, left) in failed:
            return None
        alive = left | {here, 0}
        if all(len(neighbours[node] & alive) >= min(2, n - 1) for node in left) and reachable(here, left):
            for node in sorted(neighbours[here] & left, key=lambda node: (len(neighbours[node] & left), node)):
                if (rest := extend(node, left - {node})) is not None:
                    return (here, *rest)
        failed.add((here, left))
        return None

    return extend(0, frozenset(range(1, n)))


# ---------------------------------------------------------------- a drawing


def dot(found: Topology) -> str:
    """The topology in Graphviz's language: solid lines where RDMA works, dashed where not, the reason as tooltip."""
    lines = ["graph cluster {", "  node [shape=box];"]
    for i, host in enumerate(found.hosts):
        kind = "virtual machine" if host.virtual else ""
        about = ", ".join(word for word in (chip_of(host), _gigabytes(host.memory_bytes), kind) if word)
        label = _quoted(host.name) if not about else f'"{_escaped(host.name)}\\n{_escaped(about)}"'
        lines.append(f"  h{i} [label={label}];")
    for cable in found.cables:
        speed = f"{cable.speed} Gb/s" if cable.speed else ""
        attributes = [
            f"label={_quoted(speed)}",
            f"taillabel={_quoted(cable.a.port.device or str(cable.a.port.number))}",
            f"headlabel={_quoted(cable.b.port.device or str(cable.b.port.number))}",
        ]
        if cable.why_not:
            attributes += ["style=dashed", f"tooltip={_quoted(cable.why_not)}"]
        lines.append(f"  h{cable.a.host} -- h{cable.b.host} [{', '.join(attributes)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.0f} GB" if size else ""


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def as_plain(found: Topology) -> dict[str, Any]:
    """The topology for JSON, with names in place of indices."""
    names = [host.name for host in found.hosts]
    ring = found.ring()
    return {
        "hosts": names,
        "cables": [
            {
                "a": names[cable.a.host],
                "a_port": cable.a.port.number,
                "a_device": cable.a.port.rdma,
                "b": names[cable.b.host],
                "b_port": cable.b.port.number,
                "b_device": cable.b.port.rdma,
                "gbps": cable.speed,
                "rdma": cable.rdma,
                "why_not": cable.why_not,
            }
            for cable in found.cables
        ],
        "strangers": [
            {"host": names[stranger.host], "port": stranger.port.number, "peer": stranger.peer.name}
            for stranger in found.strangers
        ],
        "mesh": found.mesh,
        "ring": [names[i] for i in ring[0]] if ring else None,
        "ring_cables": ring[1] if ring else 0,
        "islands": [[names[i] for i in group] for group in found.islands],
        "jaccl_subset": [names[i] for i in found.jaccl_subset()],
    }
