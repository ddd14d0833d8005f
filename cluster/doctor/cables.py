"""Doctor's rules about RDMA, cables, bridges and the addresses of ports. Pure; doctor.py calls them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import combinations

from cluster.cabling.addresses import clashes, ipv4_gid_index, network_of, port_addresses, same_subnet
from cluster.cabling.topology import (
    MESH_HOSTS,
    RDMA_MACOS,
    RDMA_SPEED,
    Cable,
    End,
    components,
    cycle,
    macos_version,
    port_name,
    why_never_rdma,
    why_not_yet,
)
from cluster.doctor.findings import Finding, Group, on_group, on_host
from cluster.macs.hosts import Host, Port

BESIDE_ETHERNET = 1  # the Thunderbolt receptacle of a Mac Studio that often does no RDMA
STUDIOS = ("Mac13,1", "Mac13,2", "Mac14,13", "Mac14,14", "Mac15,14", "Mac16,9")
ENOUGH_QUEUE_PAIRS = 4
ENABLE = (
    "shut it down, hold the power button until the start-up options appear, Options > Utilities > Terminal, type "
    "`rdma_ctl enable`, restart."
)


# ---------------------------------------------------------------- RDMA on a whole host


def switches(group: Group) -> Iterator[Finding]:
    """RDMA off: told by the Mac itself, or by its neighbours, who do not see its RDMA service."""
    for i, host in enumerate(group.hosts):
        version = macos_version(host)
        concerned = group.cabled(i) or group.wants_rdma
        if why_never_rdma(host) or not concerned or (version and version < RDMA_MACOS):
            continue
        if (finding := _switch(group, i, host)) is not None:
            yield finding
        for device in host.rdma_devices:
            if 0 < device.max_qp < ENOUGH_QUEUE_PAIRS:
                yield on_host(
                    f"rdma-worn:{host.name}:{device.name}",
                    host,
                    False,
                    f"{device.name} offers {device.max_qp} queue pairs (usually 11) and {device.max_pd} protection "
                    "domains.",
                    "Ranks that crashed may hold the rest; a rank that finds none fails to start.",
                    f"`cluster down`, and if it stays, restart {host.name}.",
                )
    yield from _strangers(group)


def _switch(group: Group, i: int, host: Host) -> Finding | None:
    watchers = sorted(
        {
            group.hosts[other.host].name
            for cable in group.topology.cables
            if i in (cable.a.host, cable.b.host) and not cable.slow and not cable.rdma
            for mine, other in [(cable.a, cable.b) if cable.a.host == i else (cable.b, cable.a)]
            if _sees_no_service(other, mine)
        }
    )
    seen_by = f" Seen from {', '.join(watchers)}, it offers no RDMA service." if watchers else ""
    reason = why_not_yet(host)
    active = any(device.active for device in host.rdma_devices)
    if (host.rdma_enabled is False and reason) or (watchers and host.rdma_enabled is None and not active):
        said = "`rdma_ctl status` says disabled." if host.rdma_enabled is False else "What it says itself is unknown."
        why = "RDMA is off as delivered; it cannot be switched on from macOS, nor over ssh."
        return on_host(
            f"rdma-disabled:{host.name}", host, group.wants_rdma, said + seen_by, why, f"At {host.name}: {ENABLE}"
        )
    if reason or (watchers and not active):
        listed = "but `ibv_devices` lists nothing." if reason else "but none of its devices comes up."
        said = "`rdma_ctl status` says enabled, " if host.rdma_enabled else "The chip and macOS can do it, "
        return on_host(
            f"no-rdma-devices:{host.name}",
            host,
            group.wants_rdma,
            said + listed + seen_by,
            "A rank that starts without a device crashes (exit 139).",
            f"Restart {host.name}: a change of the switch counts from then on. If that does not help, at {host.name}: "
            + ENABLE,
        )
    return None


def _sees_no_service(watcher: End, watched: End) -> bool:
    uuid = watched.port.domain_uuid.upper()
    return any(not peer.rdma_service for peer in watcher.port.peers if peer.domain_uuid.upper() == uuid)


def _strangers(group: Group) -> Iterator[Finding]:
    """Macs at the other end of a cable that were not named: what one end can tell about the other."""
    told_self = set()
    for stranger in group.topology.strangers:
        host, port, peer = group.hosts[stranger.host], stranger.port, stranger.peer
        device = next((end.device for end in group.cabled(stranger.host) if end.port == port), None)
        name = f"{peer.name} ({peer.model})" if peer.model and peer.model != peer.name else peer.name or "A Mac"
        if stranger.own:
            if stranger.host not in told_self:
                told_self.add(stranger.host)
                yield on_host(
                    f"self-cable:{host.name}",
                    host,
                    False,
                    "A cable leads from one of its ports to another of its own.",
                    "It joins nothing, and with Thunderbolt Bridge on it is a loop.",
                    "Unplug it.",
                    port,
                )
        elif why_never_rdma(host):
            continue
        elif peer.behind:
            yield _dock(f"dock:{host.name}:{port.device}", group, host, port, peer.behind)
        elif 0 < port.speed < RDMA_SPEED:
            yield on_host(
                f"slow-link:{host.name}:{port.device}",
                host,
                False,
                f"The link to {name} runs at {port.speed} Gb/s.",
                f"RDMA comes up at {RDMA_SPEED} Gb/s only: with a Thunderbolt 5 cable, and Thunderbolt 5 at both ends.",
                "Take a Thunderbolt 5 cable (80 Gb/s), if the other Mac has Thunderbolt 5.",
                port,
            )
        elif not peer.rdma_service and (device is None or not device.active):
            yield on_host(
                f"peer-rdma-disabled:{host.name}:{port.device}",
                host,
                group.link_blocks,
                f"{name} is plugged in and shows no RDMA service.",
                "A Mac that has RDMA disabled, or macOS before 26.2, shows only its IP service to the other end.",
                f"At the other Mac: {ENABLE} Name it to this command as well.",
                port,
            )
        elif not why_not_yet(host):
            yield from _down(group, End(stranger.host, port, device), f"to {name}")


def _dock(code: str, group: Group, host: Host, port: Port, behind: str) -> Finding:
    return on_host(
        code,
        host,
        group.link_blocks,
        f"{behind} is between it and the other Mac.",
        "RDMA needs a direct cable; docks and hubs carry 40 Gb/s, and some upset macOS.",
        "Plug the cable from Mac to Mac.",
        port,
    )


# ---------------------------------------------------------------- which cables there are


def cabling(group: Group) -> Iterator[Finding]:
    """Cables that are missing for a mesh, or for a ring where a mesh was not begun."""
    able = [i for i in range(len(group.hosts)) if i not in group.topology.never_rdma]
    if len(able) < 2:
        return
    cables = [c for c in group.topology.cables if c.a.host in able and c.b.host in able]
    joined = _among(able, group.topology.joined(cables))
    if not cables:
        names = ", ".join(group.hosts[i].name for i in able)
        yield on_group(
            "no-cables",
            False,
            f"No Thunderbolt cable joins {names}.",
            "Without one they talk over the network: a pipeline works, tensor parallel hardly pays.",
            "Plug a Thunderbolt 5 cable (80 Gb/s) between every two, or at least in a ring.",
        )
        return
    full_speed = _among(able, group.topology.joined(c for c in cables if not c.slow and not c.behind))
    blocks = group.wants_rdma and cycle(full_speed) is None
    free = {host.name: _free_ports(host) for host in group.hosts}
    for i, j in _missing(group, able, joined):
        a, b = group.hosts[able[i]], group.hosts[able[j]]
        yield on_group(
            f"missing-cable:{a.name}:{b.name}",
            blocks,
            f"No cable joins {a.name} and {b.name}.",
            "Tensor parallel wants a mesh, every Mac joined to every other; a ring is the least for RDMA.",
            f"Plug a Thunderbolt 5 cable from {_take_port(free, a)} to {_take_port(free, b)}.",
        )


def _among(able: Sequence[int], joined: Sequence[Set[int]]) -> list[set[int]]:
    place = {host: k for k, host in enumerate(able)}
    return [{place[peer] for peer in joined[host] if peer in place} for host in able]


def _missing(group: Group, able: Sequence[int], joined: Sequence[Set[int]]) -> list[tuple[int, int]]:
    """The pairs to join. A ring with no link besides is a ring on purpose; anything more is a mesh begun."""
    n = len(able)
    lacking = [(i, j) for i, j in combinations(range(n), 2) if j not in joined[i]]
    mesh_possible = n <= MESH_HOSTS and all(len(group.hosts[i].ports) >= n - 1 for i in able)
    if cycle(joined) is not None:
        begun = sum(map(len, joined)) // 2 > n
        return lacking if begun and mesh_possible else []
    ring = _to_a_ring(joined)
    return lacking if mesh_possible and len(lacking) <= len(ring) else ring


def _to_a_ring(joined: Sequence[Set[int]]) -> list[tuple[int, int]]:
    """Pairs that close a ring: links are strung into paths, rarest first, and the paths' ends are joined."""
    n = len(joined)
    taken: list[set[int]] = [set() for _ in range(n)]
    links = sorted(
        ((i, j) for i, j in combinations(range(n), 2) if j in joined[i]),
        key=lambda link: (len(joined[link[0]]) + len(joined[link[1]]), link),
    )
    for i, j in links:
        same_path = any(i in path and j in path for path in components(taken))
        if len(taken[i]) < 2 and len(taken[j]) < 2 and not same_path:
            taken[i].add(j)
            taken[j].add(i)
    ends = []
    for path in components(taken):
        loose = [node for node in path if len(taken[node]) < 2]
        ends.append((loose[0], loose[-1]))
    pairs = [(ends[k][1], ends[(k + 1) % len(ends)][0]) for k in range(len(ends))]
    return [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1] and pair[1] not in joined[pair[0]]]


def _free_ports(host: Host) -> list[Port]:
    return [port for port in host.ports if not port.connected and not (_is_studio(host) and _beside(port))]


def _take_port(free: dict[str, list[Port]], host: Host) -> str:
    """The next free port of a host, named; every call names another."""
    ports = free[host.name]
    return f"{host.name} {port_name(ports.pop(0))}" if ports else f"{host.name} (its good ports are in use: free one)"


# ---------------------------------------------------------------- whether they carry RDMA


def links(group: Group) -> Iterator[Finding]:
    """Cables that are slow, go through a dock, or are seen from one end only."""
    slow: dict[tuple[int, int], list[Cable]] = {}
    for cable in group.topology.cables:
        a, b = group.pair(cable)
        if cable.slow:
            slow.setdefault((cable.a.host, cable.b.host), []).append(cable)
        elif cable.behind:
            yield _dock(f"dock:{a.name}:{b.name}", group, a, cable.a.port, cable.behind)
        elif not cable.seen_by_both:
            yield on_group(
                f"one-sided:{a.name}:{b.name}",
                group.link_blocks,
                f"{group.both_ends(cable)}: one end sees the other, but not the other way round.",
                "The link is stale: one Mac has just been restarted, slept, or lost the cable.",
                "Look again in a minute; then unplug the cable and plug it in again.",
            )
    for cables in slow.values():
        a, b = sorted(group.pair(cables[0]), key=lambda host: bool(why_never_rdma(host)))  # the one to blame is last
        old = b.name if why_never_rdma(b) else ""
        do = "Change the cable for a Thunderbolt 5 one (80 Gb/s); a Thunderbolt 4 cable gives 40."
        yield on_group(
            f"slow-link:{a.name}:{b.name}",
            group.link_blocks and not old,
            "; ".join(f"{group.both_ends(cable)} runs at {cable.speed} Gb/s" for cable in cables),
            f"RDMA comes up at {RDMA_SPEED} Gb/s only; over less there is TCP.",
            f"Nothing: {old} is not faster." if old else do,
        )


def ports(group: Group) -> Iterator[Finding]:
    """Ports that are down though nothing else explains it; and the one beside Ethernet, which often is."""
    beside_and_down = set()
    for cable in group.topology.cables:
        if cable.rdma or group.explained(cable):
            continue
        for end, other in ((cable.a, cable.b), (cable.b, cable.a)):
            for finding in _down(group, end, f"to {group.hosts[other.host].name}"):
                beside_and_down |= {end.host} if finding.kind == "studio-en2" else set()
                yield finding
    beside = [
        f"{host.name} {port_name(end.port)}"
        for i, host in enumerate(group.hosts)
        if i not in beside_and_down and _is_studio(host) and not why_never_rdma(host)
        for end in group.cabled(i)
        if _beside(end.port) and end.device is not None and end.device.active
    ]
    if beside:
        yield on_group(
            "studio-en2",
            False,
            f"In use: {', '.join(beside)}.",
            "On a Mac Studio the port beside Ethernet often does no RDMA. It is active now, so it is believed.",
            "If it goes down, move the cable to another port.",
        )


def _down(group: Group, end: End, where: str) -> Iterator[Finding]:
    host, port = group.hosts[end.host], end.port
    if end.device is not None and end.device.active:
        return
    if not port.device:
        yield on_host(
            f"port-unknown:{host.name}:{port.number}",
            host,
            group.link_blocks,
            f"The cable {where} is in Thunderbolt {port.number}, which has no network interface of that name.",
            "Without the interface's name nobody knows the RDMA device.",
            "System Settings > Network: add the port as a service, or use another port.",
            port,
        )
    elif _is_studio(host) and _beside(port):
        free = _free_ports(host)
        yield on_host(
            f"studio-en2:{host.name}",
            host,
            group.link_blocks,
            f"{port.rdma} is down though the cable {where} is in.",
            "On a Mac Studio the port beside Ethernet often does no RDMA, though it is listed.",
            f"Move the cable to {port_name(free[-1]) if free else 'another port; free one'}.",
            port,
        )
    else:
        state = "is down" if end.device is not None else "is not listed by `ibv_devices`"
        yield on_host(
            f"port-down:{host.name}:{port.rdma}",
            host,
            group.link_blocks,
            f"{port.rdma} {state} though the cable {where} is in and both Macs have RDMA on.",
            "A rank that opens a port that is down fails to allocate its protection domain.",
            "First mend what is said about the other end. Then unplug the cable and plug it in; if it stays down, "
            "restart both Macs.",
            port,
        )


def _is_studio(host: Host) -> bool:
    return host.model_name == "Mac Studio" or host.model in STUDIOS


def _beside(port: Port) -> bool:
    return port.number == BESIDE_ETHERNET


# ---------------------------------------------------------------- bridges and addresses


def bridges(group: Group) -> Iterator[Finding]:
    """Thunderbolt Bridge: it takes the ports' addresses away, and where cables close a ring it is a loop."""
    whole, loops = [], [c for c in group.topology.cables if all(_bridged(group, end) for end in (c.a, c.b))]
    for i, host in enumerate(group.hosts):
        bridged = [end for end in group.cabled(i) if _bridged(group, end)]
        if not bridged or why_never_rdma(host):
            continue
        if all(port.device in host.bridge_members for port in host.ports if port.device):
            whole.append(host)
            continue
        for end in bridged:
            yield on_host(
                f"bridge-member:{host.name}:{end.port.device}",
                host,
                group.wants_rdma,
                f"{end.port.device} is still a member of bridge0.",
                "A bridged port has no IPv4 address of its own, and RDMA needs one.",
                f"`sudo ifconfig bridge0 deletem {end.port.device}` there, or `cluster doctor --fix`.",
                end.port,
            )
    if whole:
        yield on_group(
            "bridge-active",
            group.wants_rdma,
            f"Thunderbolt Bridge holds every port of {', '.join(host.name for host in whole)}, as delivered.",
            "Bridged ports have no IPv4 address of their own, and RDMA needs one on each.",
            "`cluster doctor --fix` prints what to type on each Mac.",
        )
    joined = group.topology.joined(loops)
    trees = len(group.hosts) - len(components(joined))
    if len(loops) > trees:
        names = ", ".join(group.hosts[i].name for i in range(len(group.hosts)) if joined[i])
        yield on_group(
            "bridge-loop",
            True,
            f"The bridges of {names} are joined in a loop by {len(loops)} cables.",
            "Packets circle in it for ever: the Macs grow slow and the network fails.",
            "Take the bridges down first: `cluster doctor --fix`. Until then unplug one cable of the loop.",
        )


def _bridged(group: Group, end: End) -> bool:
    host = group.hosts[end.host]
    return host.bridge_up and bool(end.port.device) and end.port.device in host.bridge_members


def addresses(group: Group) -> Iterator[Finding]:
    """An IPv4 address per port, at the right place of its GID table, in a subnet that belongs to this cable alone."""
    without = []
    for i, host in enumerate(group.hosts):
        for end in [] if why_never_rdma(host) else group.cabled(i):
            if end.device is None or not end.device.active or not end.device.gids:
                continue
            index = ipv4_gid_index(end.device)
            if index is None:
                without.append(f"{host.name} {end.port.device}")
            elif index != 1:
                yield on_host(
                    f"gid-index:{host.name}:{end.device.name}",
                    host,
                    group.wants_rdma,
                    f"The IPv4 GID of {end.device.name} is number {index} of its table.",
                    "JACCL always sends with number 1; with another there the queue pair fails with errno 22.",
                    "Remove other addresses of this port, or unplug the cable and plug it in, so that it comes first.",
                    end.port,
                )
    if without:
        yield on_group(
            "no-ipv4-gid",
            group.wants_rdma,
            f"No IPv4 address on: {', '.join(without)}.",
            "RDMA finds the other end by it (errno 22 without), though no IP traffic flows there.",
            "`cluster doctor --fix` prints an address for each port, from a range that no host uses.",
        )
    for cable in group.topology.rdma_cables:
        a, b = group.pair(cable)
        if same_subnet(a, cable.a.port, b, cable.b.port) is False:
            shown = " and ".join(
                f"{host.name} {address.ip}/{address.prefix}"
                for host, end in ((a, cable.a), (b, cable.b))
                for address in port_addresses(host, end.port)
            )
            yield on_group(
                f"other-subnet:{a.name}:{b.name}",
                group.wants_rdma,
                f"{group.both_ends(cable)}: {shown} are not in one subnet.",
                "The queue pair does not find its other end (errno 60).",
                "Give both ends addresses of one subnet; `cluster doctor --fix` prints some.",
            )
    for i, port, address, whose in clashes(group.topology):
        yield on_host(
            f"address-overlap:{group.hosts[i].name}:{port.device}",
            group.hosts[i],
            group.wants_rdma,
            f"{address.ip} on {port.device} is in {network_of(address)}, which is also {whose}.",
            "Packets for one take the way of the other: that network, or this cable, is cut off.",
            "Take another range; `cluster doctor --fix` prints one that no host uses.",
            port,
        )
