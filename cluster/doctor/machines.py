"""Doctor's rules about the machines: are they in reach, what are they, what runs there. Pure; doctor.py calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from cluster.cabling.addresses import lan_addresses, meeting_point
from cluster.cabling.topology import RDMA_MACOS, macos_version, version_numbers, why_never_rdma, why_not_yet
from cluster.doctor.findings import Finding, Group, on_group, on_host
from cluster.macs.hosts import Host, Unreachable

MLX_WANTED = (0, 32, 4)  # several cables in a mesh, right all_gather on a ring
MLX_WITH_JACCL = (0, 30, 1)
MACOS_FAST = (26, 3)  # larger transfer buffers
ESSENTIAL = ("hardware", "thunderbolt", "hardwareports", "ifconfig", "sw_vers")


def away(unreachable: Sequence[Unreachable]) -> Iterator[Finding]:
    """Hosts that could not be looked at."""
    for host in unreachable:
        if _is_local_network(host.reason):
            yield _local_network(host.name, host.reason)
        else:
            why = "Nothing can be said about a Mac that cannot be looked at, and nothing can be started on it."
            yield Finding(f"unreachable:{host.name}", True, host.name, "", host.reason, why, host.hint)


def reach(group: Group) -> Iterator[Finding]:
    """Can mlx.launch's ssh get in, and did the commands that matter answer."""
    for host in group.hosts:
        said = host.batch_ssh or ""  # None: not tried
        if _is_local_network(said):
            yield _local_network(host.name, said)
        elif said:
            yield on_host(
                f"ssh:{host.name}",
                host,
                group.many,
                f"`ssh -o BatchMode=yes {host.ssh} true` says: {said}",
                "mlx.launch starts the ranks with the system's ssh, and that must not have to ask anything.",
                f"Type `ssh-copy-id {host.ssh}`, then `ssh {host.ssh}` once and accept its key.",
            )
        reasons: dict[str, list[str]] = {}
        for unread in host.unread:
            if unread.command in ESSENTIAL and host.virtual is None:
                reasons.setdefault(unread.command, []).append(unread.reason)
        for command, all_said in reasons.items():
            yield on_host(
                f"unread:{host.name}:{command}",
                host,
                False,
                f"{command}: {'; '.join(all_said)}",
                "What this command tells is missing from what follows.",
                f"Look at it by hand: `ssh {host.ssh}`; if it stays odd, `cluster probe --hosts {host.ssh} --save DIR` "
                "records it for a bug report.",
            )


def _is_local_network(reason: str) -> bool:
    return "no route to host" in reason.lower()


def _local_network(name: str, reason: str) -> Finding:
    return Finding(
        f"local-network:{name}",
        True,
        name,
        "",
        reason,
        "macOS 15 and later keep a program out of the local network until it is allowed in, though ping works. "
        "Terminal is exempt; tmux, editors and background jobs are not.",
        "Here: System Settings > Privacy & Security > Local Network, allow the program that you type in and start it "
        f"anew, or type in Terminal. If that changes nothing: is {name} on, and in this network?",
    )


def machines(group: Group) -> Iterator[Finding]:
    """What they are: guests, other systems, Thunderbolt 4, very different memory."""
    for i, host in enumerate(group.hosts):
        if host.virtual is not None:
            yield on_host(
                f"virtual:{host.name}",
                host,
                False,
                f"It is a virtual Mac: {', '.join(host.virtual.evidence)}.",
                " ".join(host.virtual.consequences),
                "Nothing, if that is meant. For RDMA take the Mac that it runs on instead.",
            )
        elif host.system != "Darwin":
            yield on_host(
                f"not-a-mac:{host.name}",
                host,
                False,
                f"It runs {host.system}.",
                "It has no RDMA over Thunderbolt, so the whole group can only use the ring over TCP.",
                f"For RDMA leave {host.name} out.",
            )
        elif (reason := why_never_rdma(host)) and (group.many or group.cabled(i)):
            flag = " `rdma_ctl` says enabled, but devices never appear on such a Mac." if host.rdma_enabled else ""
            yield on_host(
                f"no-tb5:{host.name}",
                host,
                False,
                f"{host.name} {reason}.{flag}",
                "RDMA needs Thunderbolt 5 on every Mac; with this one the whole group talks TCP.",
                f"Use it over the ring, or leave {host.name} out and use RDMA between the others.",
            )
    sizes = {host.name: host.memory_bytes for host in group.hosts if host.memory_bytes}
    if sizes and max(sizes.values()) > 2 * min(sizes.values()):
        yield on_group(
            "uneven-memory",
            False,
            ", ".join(f"{name} {size >> 30} GB" for name, size in sizes.items()),
            "Tensor parallel gives every Mac the same share, so the smallest decides; a pipeline splits by memory.",
            "Nothing; `cluster plan MODEL` shows which split is chosen.",
        )


def systems(group: Group) -> Iterator[Finding]:
    """macOS: new enough, and the same."""
    macs = [host for host in group.hosts if host.system == "Darwin" and host.macos]
    for host in macs:
        version = macos_version(host)
        if why_never_rdma(host) or not group.wants_rdma:
            continue
        if version < RDMA_MACOS:
            yield on_host(
                f"old-macos:{host.name}",
                host,
                bool(why_not_yet(host)),
                f"macOS {host.macos} ({host.build})",
                "RDMA over Thunderbolt exists from macOS 26.2 on.",
                f"Update {host.name} to what the others run: System Settings > General > Software Update.",
            )
        elif version < MACOS_FAST:
            yield on_host(
                f"early-macos:{host.name}",
                host,
                False,
                f"macOS {host.macos} ({host.build})",
                "From 26.3 on RDMA moves larger pieces at a time; before, the link gives a part of its bandwidth.",
                f"Update {host.name}, and the others with it.",
            )
    builds = {host.name: f"{host.macos} ({host.build})" for host in macs}
    if len(set(builds.values())) > 1:
        yield on_group(
            "macos-mismatch",
            group.wants_rdma,
            ", ".join(f"{name} {build}" for name, build in builds.items()),
            "RDMA wants one build everywhere: how large the pieces are depends on it, and both ends must agree.",
            "Update all of them to the newest of these.",
        )


def software(group: Group) -> Iterator[Finding]:
    """mlx and what runs on it: there, new enough, the same."""
    for host in group.hosts:
        if host.versions.python and not host.versions.mlx:
            yield on_host(
                f"no-mlx:{host.name}",
                host,
                True,
                f"Python {host.versions.python} there cannot import mlx.",
                "A rank cannot start without it.",
                "`cluster install` puts the same environment on every host.",
            )
    usual, odd = _odd_ones({host.name: host.versions.mlx for host in group.hosts})
    if usual and version_numbers(usual) < MLX_WANTED:
        without = version_numbers(usual) < MLX_WITH_JACCL
        why = "It knows no RDMA over Thunderbolt." if without else "It uses one cable of several, and its ring may err."
        wanted = ".".join(map(str, MLX_WANTED))
        yield on_group(
            "old-mlx", without and group.wants_rdma, f"mlx {usual}", why, f"`cluster install` brings mlx {wanted}."
        )
    for name, version in odd.items():
        yield _odd_version(group, name, "mlx", version, usual)
    usual, odd = _odd_ones({host.name: host.versions.mlx_lm for host in group.hosts})
    for name, version in odd.items():
        yield _odd_version(group, name, "mlx-lm", version, usual)
    usual, odd = _odd_ones(
        {host.name: ".".join(host.versions.python.split(".")[:2]) for host in group.hosts if host.versions.python}
    )
    if odd:
        seen = ", ".join(f"{name} {version}" for name, version in odd.items())
        yield on_group(
            "python-mismatch",
            False,
            f"Python is {usual} elsewhere, but: {seen}",
            "Ranks with different Pythons may have different packages; most run together all the same.",
            "`cluster install` puts the same environment on every host.",
        )


def _odd_ones(versions: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The version that most have (the newest of those), and the hosts that have another; unknown ones do not count."""
    known = {name: version for name, version in versions.items() if version}
    if not known:
        return "", {}
    count = Counter(known.values())
    usual = max(count, key=lambda version: (count[version], version_numbers(version), version))
    return usual, {name: version for name, version in known.items() if version != usual}


def _odd_version(group: Group, name: str, package: str, version: str, usual: str) -> Finding:
    host = next(host for host in group.hosts if host.name == name)
    return on_host(
        f"{package}-mismatch:{name}",
        host,
        True,
        f"{package} is {version}; the others have {usual}",
        "Ranks with different versions disagree about what they send each other, and hang or compute nonsense.",
        "`cluster install` puts the same environment on every host.",
    )


def settings(group: Group) -> Iterator[Finding]:
    """Sleep, the limit of wired memory, the firewall, and an address at which the others find rank 0."""
    for host in group.hosts:
        if host.power is not None and host.power.sleep_min > 0:
            restart = "" if host.power.autorestart is not False else "; it stays off after a power failure"
            yield on_host(
                f"sleep:{host.name}",
                host,
                False,
                f"It sleeps after {host.power.sleep_min} minutes{restart}.",
                "Thunderbolt cannot wake a Mac, and ports that slept may stay dead: the cluster loses it.",
                "`sudo pmset -a sleep 0 disksleep 0 womp 1 autorestart 1` there, or `cluster doctor --fix`.",
            )
        if limit := _odd_wired_limit(host):
            yield on_host(
                f"wired-limit:{host.name}",
                host,
                False,
                f"iogpu.wired_limit_mb is {host.wired_limit_mb}, of {host.memory_bytes >> 20} MB: {limit}.",
                "It is the most that the GPU may hold: the model's weights, its KV cache and what it computes with.",
                "`sudo sysctl iogpu.wired_limit_mb=0` there restores macOS's own limit.",
            )
        if host.firewall:
            yield on_host(
                f"firewall:{host.name}",
                host,
                False,
                "The application firewall is on.",
                "It asks on that Mac's screen whether Python may be reached, and until somebody answers it may not.",
                "Allow the Python of the ranks in System Settings > Network > Firewall, or turn it off.",
            )
    yield from _lan(group)


def _odd_wired_limit(host: Host) -> str:
    megabytes = host.memory_bytes >> 20
    if not host.wired_limit_mb or not megabytes:
        return ""
    if host.wired_limit_mb > megabytes - min(8192, megabytes // 8):
        return "too little is left for the system, which may panic"
    return "less than macOS would allow" if host.wired_limit_mb < megabytes * 0.6 else ""


def _lan(group: Group) -> Iterator[Finding]:
    if not group.many:
        return
    known = [host for host in group.hosts if host.addresses]
    for host in known:
        if not lan_addresses(host):
            yield on_host(
                f"no-lan:{host.name}",
                host,
                True,
                "It has no IPv4 address on Ethernet or Wi-Fi.",
                "The ranks meet at an IPv4 address of the first one, which is never a cable's or a VPN's.",
                "Plug in Ethernet or join the Wi-Fi that the others are in.",
            )
    meeting = meeting_point(known)
    if len(known) > 1 and meeting is not None and not meeting[1]:
        yield on_group(
            "no-shared-lan",
            False,
            ", ".join(f"{host.name} {lan_addresses(host)[0].ip}" for host in known),
            "The ranks meet at an address of the first one; it may be out of reach for those in another network.",
            "Put all of them in one network, if the ranks do not find each other.",
        )
