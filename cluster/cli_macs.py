"""The commands that look at Macs: discover and probe, and the pieces that every command over several Macs shares.

`cli.py` calls `register(app)`. Which Macs: `--hosts a,b,c`, else `--hostfile F`, else the `hosts` of cluster.yaml, else
whoever Bonjour finds; or `--recorded DIR` instead of live machines. `look` turns that into what was seen of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cabling.hostfile import Hostfile
from cluster.config import load_config
from cluster.errors import BadSetting
from cluster.macs.hosts import Host, Unreachable

CONFIG_FILE = Path("cluster.yaml")

Hosts = Annotated[str | None, typer.Option("--hosts", help="The Macs, as ssh knows them, with commas between.")]
HostfileFlag = Annotated[Path | None, typer.Option("--hostfile", help="Take the Macs from a hostfile of mlx.launch.")]
Recorded = Annotated[
    Path | None, typer.Option("--recorded", help="Look at a folder that `cluster probe --save` wrote instead.")
]
Config = Annotated[
    Path | None, typer.Option("--config", help=f"The YAML file whose `hosts` count ({CONFIG_FILE}, if there is one).")
]
Only = Annotated[str | None, typer.Option("--only", help="Of the Macs seen, only these, with commas between.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def look(
    hosts: str | None = None,
    hostfile: Path | None = None,
    recorded: Path | None = None,
    config: Path | None = None,
    *,
    save: Path | None = None,
) -> tuple[list[Host], list[Unreachable]]:
    """What is to be seen of the Macs that the four flags mean, in the order given (Bonjour's: by name).

    Looks at all of them at once; a Mac that cannot be looked at does not hide the others. Raises BadSetting,
    ConfigUnreadable, HostfileInvalid or RecordingUnreadable for flags that cannot be used, NoHosts if there is none.
    """
    from cluster.macs import discover, probe

    if recorded is not None:
        if hosts or hostfile:
            raise BadSetting("--recorded names the Macs itself; leave out --hosts and --hostfile.")
        if save is not None:
            raise BadSetting("--save is for Macs that answer now; what --recorded replays is recorded already.")
        return probe.probe_recorded(recorded), []
    names = configured_hosts(hosts, hostfile, config) or discover.host_names()
    return probe.probe_hosts(names, save=save)


def configured_hosts(hosts: str | None, hostfile: Path | None, config: Path | None) -> list[str]:
    """The names by which ssh reaches the Macs that flags or cluster.yaml name; empty if they name none."""
    if hosts is not None:
        names = [name.strip() for name in hosts.split(",") if name.strip()]
        if not names:
            raise BadSetting("--hosts names no host.", hint="For example: --hosts studio-a,studio-b")
        return list(dict.fromkeys(names))
    if hostfile is not None:
        from cluster.cabling.hostfile import read

        return list(dict.fromkeys(host.ssh for host in read(hostfile).hosts))
    file = config or (CONFIG_FILE if CONFIG_FILE.is_file() else None)
    return list(getattr(load_config({}, file=file), "hosts", ()) or ()) if file else []


def as_json(value: Any) -> str:
    """Facts as JSON: frozen dataclasses become objects, with the names of their fields."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{value!r} has no JSON form")


def tell_unreachable(unreachable: Sequence[Unreachable]) -> None:
    """One line on stderr per Mac that could not be looked at, with what to type."""
    for host in unreachable:
        typer.echo(host.reason if host.name in host.reason else f"{host.name}: {host.reason}", err=True)
        if host.hint:
            typer.echo(f"  {host.hint}", err=True)


def discover_command(
    hosts: Hosts = None, hostfile: HostfileFlag = None, config: Config = None, as_json_: AsJson = False
) -> None:
    """Who is there: Macs with Remote Login on this network, and those that flags or cluster.yaml name."""
    from cluster.macs import discover

    found = discover.discover(configured_hosts(hosts, hostfile, config))
    if as_json_:
        typer.echo(as_json({"hosts": found}))
    else:
        from cluster.show.host_tables import found_table
        from cluster.show.view import show

        show(found_table(found))


def probe_command(
    hosts: Hosts = None,
    hostfile: HostfileFlag = None,
    recorded: Recorded = None,
    config: Config = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Also record what the commands printed, with names replaced.")
    ] = None,
    as_json_: AsJson = False,
) -> None:
    """Look at every Mac at once: chip, memory, macOS, ports, RDMA, addresses, versions. Exit code 1 if one is away."""
    seen, unreachable = look(hosts, hostfile, recorded, config, save=save)
    if as_json_:
        typer.echo(as_json({"hosts": seen, "unreachable": unreachable}))
    else:
        from cluster.show.host_tables import hosts_table
        from cluster.show.view import show

        show(hosts_table(seen))
        tell_unreachable(unreachable)
    if save is not None:
        typer.echo(f"Recorded in {save}; replay it with --recorded {save}.", err=True)
    raise typer.Exit(bool(unreachable))


def topology_command(
    hosts: Hosts = None,
    hostfile: HostfileFlag = None,
    recorded: Recorded = None,
    config: Config = None,
    only: Only = None,
    dot: Annotated[bool, typer.Option("--dot", help="Print it for Graphviz: `... --dot | dot -Tsvg`.")] = False,
    as_json_: AsJson = False,
) -> None:
    """Which cables join the Macs, how fast, and whether RDMA works over each. Exit code 1 if a Mac is away."""
    from cluster.cabling import topology

    seen, unreachable = look(hosts, hostfile, recorded, config)
    found = topology.topology(chosen(seen, only))
    if dot:
        typer.echo(topology.dot(found), nl=False)
    elif as_json_:
        typer.echo(as_json(topology.as_plain(found) | {"unreachable": unreachable}))
    else:
        from cluster.show.cabling_tables import topology_table
        from cluster.show.view import show

        show(topology_table(found))
    tell_unreachable(unreachable)
    raise typer.Exit(bool(unreachable))


def doctor_command(
    hosts: Hosts = None,
    hostfile: HostfileFlag = None,
    recorded: Recorded = None,
    config: Config = None,
    only: Only = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Print the commands that repair what ssh can, and those that undo them.")
    ] = False,
    as_json_: AsJson = False,
) -> None:
    """What keeps the Macs from working as one, in the order in which to fix it. Exit code 1 if anything is in the way.

    Changes nothing; neither does --fix.
    """
    from cluster.cabling import topology
    from cluster.doctor import doctor, repair

    seen, unreachable = look(hosts, hostfile, recorded, config)
    seen = chosen(seen, only)
    findings = doctor.examine(seen, unreachable)
    repairs = repair.repairs(topology.topology(seen), findings) if fix else []
    if as_json_:
        typer.echo(as_json({"findings": findings} | ({"repairs": repairs} if fix else {})))
    elif fix:
        from cluster.show.cabling_tables import repairs_text

        typer.echo(repairs_text(repairs), nl=False)
    else:
        from cluster.show.cabling_tables import findings_view
        from cluster.show.view import show

        show(findings_view(findings))
    raise typer.Exit(any(finding.blocks for finding in findings))


def hostfile_command(
    hosts: Hosts = None,
    hostfile: HostfileFlag = None,
    recorded: Recorded = None,
    config: Config = None,
    only: Only = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it there (default: print it).")] = None,
    backend: Annotated[str | None, typer.Option("--backend", help="jaccl, jaccl-ring or ring (what fits).")] = None,
    order: Annotated[
        str | None, typer.Option("--order", help="The Macs in the order of the ranks, with commas between.")
    ] = None,
    as_json_: AsJson = False,
) -> None:
    """Write a hostfile for mlx.launch and `cluster up --hostfile` from the cables that are plugged."""
    from cluster.cabling import backend as backends
    from cluster.cabling import hostfile as hostfiles
    from cluster.cabling.topology import topology
    from cluster.doctor import doctor

    if backend is not None and backend not in ("jaccl", "jaccl-ring", "ring"):
        raise BadSetting(f'--backend {backend}: it is "jaccl", "jaccl-ring" or "ring".')
    seen, unreachable = look(hosts, hostfile, recorded, config)
    if unreachable:
        tell_unreachable(unreachable)
        raise typer.Exit(1)
    seen = chosen(seen, order or only)
    found = topology(seen)
    joined = backends.join(found, backend=backend, order=range(len(seen)) if order else None)
    blocking = [finding.code for finding in doctor.examine(seen) if finding.blocks]
    if output is not None:
        hostfiles.write(joined.hostfile, output)
    if as_json_:
        shown = {"hostfile": joined.hostfile, "notes": joined.notes, "subset": joined.subset, "blocking": blocking}
        typer.echo(as_json(shown | {"file": str(output) if output else None}))
        return
    if output is None:
        typer.echo(hostfiles.dump(joined.hostfile), nl=False)
    else:
        names = ", ".join(entry.ssh for entry in joined.hostfile.hosts)
        typer.echo(f"{output}: {joined.hostfile.backend} over {names}")
    for note in joined.notes:
        typer.echo(f"note: {note}", err=True)
    if blocking:
        typer.echo(f"note: fix first, see `cluster doctor`: {', '.join(blocking)}", err=True)


def check_command(
    file: Annotated[Path, typer.Argument(help="A hostfile of mlx.launch.")],
    live: Annotated[bool, typer.Option("--live", help="Also look at its hosts: devices, ports, addresses.")] = False,
    recorded: Recorded = None,
    as_json_: AsJson = False,
) -> None:
    """Whether a hostfile is right, all faults at once. Exit code 1 if not."""
    from cluster.cabling import hostfile as hostfiles
    from cluster.errors import HostfileInvalid

    faults: list[str] = []
    notes: list[str] = []
    try:
        read = hostfiles.read(file)
        notes = hostfiles.notes(read)
        if live or recorded is not None:
            faults = _against_facts(read, recorded)
        if faults and not as_json_:
            raise HostfileInvalid(str(file), faults)
    except HostfileInvalid as error:
        if not as_json_:
            raise
        faults = list(error.faults)
    if as_json_:
        typer.echo(as_json({"file": str(file), "valid": not faults, "faults": faults, "notes": notes}))
        raise typer.Exit(bool(faults))
    typer.echo(f"{file}: {read.backend or 'no backend named'}, {len(read.hosts)} ranks, no faults.")
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _against_facts(read: Hostfile, recorded: Path | None) -> list[str]:
    """What a hostfile says that is not so: of its hosts as they are now, or as recorded."""
    from cluster.cabling.backend import compare
    from cluster.cabling.topology import topology

    names = ",".join(dict.fromkeys(entry.ssh for entry in read.hosts))
    seen, unreachable = look(None if recorded else names, None, recorded)
    away = {host.name: host.reason for host in unreachable}
    compared = compare(read, topology(seen))
    return [f"{name}: {reason}" for name, reason in away.items()] + [
        fault for fault in compared if fault.partition(":")[0] not in away
    ]


def chosen(seen: list[Host], only: str | None) -> list[Host]:
    """The hosts named in `only`, in its order; all if it names none. Raises BadSetting for a name that was not seen."""
    if only is None:
        return seen
    by_name = {host.name: host for host in seen}
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in by_name]:
        raise BadSetting(f"{', '.join(unknown)}: not among the Macs seen ({', '.join(by_name)}).")
    return [by_name[name] for name in dict.fromkeys(names)]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `cluster` command line."""
    app.command("topology")(topology_command)
    app.command("doctor")(doctor_command)
    app.command("hostfile")(hostfile_command)
    app.command("check")(check_command)
    app.command("discover")(discover_command)
    app.command("probe")(probe_command)
