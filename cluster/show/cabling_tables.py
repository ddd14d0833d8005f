"""Cables and findings for the terminal. Like host_tables.py a user of rich; `cli_macs.py` prints what this makes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cluster.cabling.topology import End, Topology, port_name
from cluster.doctor.doctor import Finding
from cluster.doctor.repair import Repair


def topology_table(found: Topology) -> RenderableType:
    """A row per cable, then what they allow."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("from", "to", "speed", "RDMA"):
        table.add_column(Text(title), overflow="fold")
    for cable in found.cables:
        speed = f"{cable.speed} Gb/s" if cable.speed else "?"
        table.add_row(*map(Text, (_end(found, cable.a), _end(found, cable.b), speed, cable.why_not or "works")))
    for stranger in found.strangers:
        where = f"{found.hosts[stranger.host].name} {port_name(stranger.port)}"
        to = "itself" if stranger.own else f"{stranger.peer.name}, not named here"
        table.add_row(*map(Text, (where, to, f"{stranger.port.speed} Gb/s" if stranger.port.speed else "?", "")))
    return Group(*([table] if found.cables or found.strangers else []), *map(Text, summary(found)))


def _end(found: Topology, end: End) -> str:
    return f"{found.hosts[end.host].name} {port_name(end.port)}"


def summary(found: Topology) -> list[str]:
    """What the cables allow, a sentence each."""
    names = [host.name for host in found.hosts]
    lines = [f"{host.name} is a virtual machine, without Thunderbolt RDMA." for host in found.hosts if host.virtual]
    if len(names) < 2:
        return [f"One Mac: {names[0]}." if names else "No Macs.", *lines]
    if found.mesh:
        lines.append("RDMA joins every two of them: a mesh (jaccl).")
    elif ring := found.ring():
        order = ", ".join(names[i] for i in ring[0])
        lines.append(f"RDMA joins them in a ring (jaccl-ring), {ring[1]} cable{'s'[: ring[1] > 1]} a link: {order}.")
    elif group := found.jaccl_subset():
        lines.append(f"RDMA joins only some of them: {', '.join(names[i] for i in group)}.")
    elif found.cables:
        lines.append("RDMA joins no part of them yet; `cluster doctor` says why.")
    islands = found.islands
    if not found.cables:
        lines.append("No Thunderbolt cable joins any two of them.")
    elif len(islands) > 1:
        lines.append("Cables leave them apart: " + "; ".join(", ".join(names[i] for i in group) for group in islands))
    return lines


def findings_view(findings: Sequence[Finding]) -> RenderableType:
    """Each finding with what was seen, why it matters and what to do, numbered in the order in which to fix them."""
    if not findings:
        return Text("Nothing to fix.")
    parts: list[RenderableType] = []
    for number, finding in enumerate(findings, 1):
        mark = Text("blocks", style="bold red") if finding.blocks else Text("note", style="yellow")
        where = f" {finding.host} {finding.port}".rstrip()
        parts.append(Text.assemble(f"{number}. ", mark, f"  {finding.code}", (where, "dim") if finding.port else ""))
        for title, text in (("seen", finding.seen), ("why", finding.why), ("do", finding.do)):
            if text:
                parts.append(Padding(Text(f"{title}: {text}"), (0, 0, 0, 3), expand=False))
    blocking = sum(finding.blocks for finding in findings)
    parts.append(Text(f"{len(findings)} finding{'s'[: len(findings) > 1]}, {blocking} in the way."))
    return Group(*parts)


def repairs_text(repairs: Sequence[Repair]) -> str:
    """Per host, commands to paste into a shell there, and below them those that undo them."""
    if not repairs:
        return "# Nothing here can be repaired over ssh.\n"
    lines = ["# Nothing has been changed. No Mac has run these commands yet: read them before you paste them."]
    for host in dict.fromkeys(repair.host for repair in repairs):
        own = [repair for repair in repairs if repair.host == host]
        lines += ["", f"# ---- on {host}"]
        for repair in own:
            lines += [f"# {repair.what}", *repair.commands]
        lines.append("# to undo:")
        lines += [f"#   {command}" for repair in reversed(own) for command in repair.undo]
    return "\n".join(lines) + "\n"
