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

from cluster.config import load_config
from cluster.errors import BadSetting
from cluster.hosts import Host, Unreachable

CONFIG_FILE = Path("cluster.yaml")

Hosts = Annotated[str | None, typer.Option("--hosts", help="The Macs, as ssh knows them, with commas between.")]
HostfileFlag = Annotated[Path | None, typer.Option("--hostfile", help="Take the Macs from a hostfile of mlx.launch.")]
Recorded = Annotated[
    Path | None, typer.Option("--recorded", help="Look at a folder that `cluster probe --save` wrote instead.")
]
Config = Annotated[
    Path | None, typer.Option("--config", help=f"The YAML file whose `hosts` count ({CONFIG_FILE}, if there is one).")
]
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
    from cluster import discover, probe

    if recorded is not None:
        if hosts or hostfile:
            raise BadSetting("--recorded names the Macs itself; leave out --hosts and --hostfile.")
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
        from cluster.hostfile import read

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
        typer.echo(f"{host.name}: {host.reason}", err=True)
        if host.hint:
            typer.echo(f"  {host.hint}", err=True)


def discover_command(
    hosts: Hosts = None, hostfile: HostfileFlag = None, config: Config = None, as_json_: AsJson = False
) -> None:
    """Who is there: Macs with Remote Login on this network, and those that flags or cluster.yaml name."""
    from cluster import discover

    found = discover.discover(configured_hosts(hosts, hostfile, config))
    if as_json_:
        typer.echo(as_json({"hosts": found}))
    else:
        from cluster.host_tables import found_table
        from cluster.view import show

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
        from cluster.host_tables import hosts_table
        from cluster.view import show

        show(hosts_table(seen))
        tell_unreachable(unreachable)
    if save is not None:
        typer.echo(f"Recorded in {save}; replay it with --recorded {save}.", err=True)
    raise typer.Exit(bool(unreachable))


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `cluster` command line."""
    app.command("discover")(discover_command)
    app.command("probe")(probe_command)
