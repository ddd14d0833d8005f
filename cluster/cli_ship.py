"""`cluster install` and `cluster pull`: the environment and the weights to every host, before anything is started.

`cli.py` calls `register(app)`. Which hosts: as in `cli_macs.py`, or named one by one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from cluster.cli_macs import Config, HostfileFlag, Hosts, configured_hosts, look, tell_unreachable
from cluster.errors import BadSetting
from cluster.macs.hosts import Host
from cluster.paths import Folders
from cluster.ship.stage_files import Layers


def install_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[HOSTS]...", help="Hosts, as ssh knows them.")] = None,
    hosts: Hosts = None,
    hostfile: HostfileFlag = None,
    config: Config = None,
) -> None:
    """Give every host this machine's environment: the same Python packages, and this very version of cluster.

    Says first what each host needs. Hosts need ssh and the same Python as here, no package index, and no root.
    """
    from cluster.macs import discover
    from cluster.ship import install
    from cluster.show.ship_view import ShipView

    chosen = list(dict.fromkeys(names or [])) or configured_hosts(hosts, hostfile, config) or discover.host_names()
    with ShipView() as view, _stopping() as stop:
        found = install.install(chosen, cache=_cache(), progress=view.update, note=view.say, stop=stop)
    for one in found:
        typer.echo(f"{one.host}: Python {one.python}, mlx {one.mlx}, mlx-lm {one.mlx_lm}, cluster {one.ours}")


def pull_command(
    model: Annotated[str, typer.Argument(help="A folder in MLX format or a Hugging Face name.")],
    hosts: Hosts = None,
    hostfile: HostfileFlag = None,
    config: Config = None,
    parallel: Annotated[str, typer.Option(help="What it will run as: auto, single, tensor or pipeline.")] = "auto",
    split: Annotated[str | None, typer.Option(help="Layers per rank of a pipeline, like 30,31.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Everything to every host, without a plan.")] = False,
    models: Annotated[
        list[str] | None, typer.Option(metavar="HOST=FOLDER", help="Where a host keeps models; repeatable.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all that is there again and compare it.")] = False,
) -> None:
    """Bring a model to every host: fetched once, copied from host to host, only what each one's layers need."""
    from cluster.cabling.topology import topology
    from cluster.ship import pull, weights
    from cluster.show.ship_view import ShipView

    folders = dict(_pair(text) for text in models or [])
    seen, unreachable = look(hosts, hostfile, None, config)
    tell_unreachable(unreachable)
    if unreachable:
        raise typer.Exit(1)
    with ShipView() as view, _stopping() as stop:
        resolved = weights.resolve(
            model, cache=_cache(), progress=lambda label, done, total: view.update("this machine", label, done, total)
        )
        needs: dict[str, Layers] = {host.ssh: None for host in seen}
        if not whole:
            needs = _needs(resolved.folder, seen, parallel, split)
        read = pull.read_model(
            resolved.name, resolved.folder, cache=_cache(), again=verify, progress=view.update, stop=stop
        )
        placed = pull.ensure(
            read,
            needs,
            models=folders,
            routes=pull.routes(topology(seen)),
            again=verify,
            progress=view.update,
            note=view.say,
            stop=stop,
        )
    for host, folder in placed.items():
        typer.echo(f"{host}: {_layers(needs[host])} of {read.name} ({read.sum}) in {folder}")


def _needs(folder: Path, seen: Sequence[Host], parallel: str, split: str | None) -> dict[str, Layers]:
    """The layers that the plan gives to each host; hosts without a rank get nothing."""
    from cluster.cabling.topology import topology
    from cluster.cli_plan import numbers
    from cluster.plan import model_info, planner

    info = model_info.read(folder)
    wishes = planner.wishes_for(info, parallel=parallel, split=numbers(split))
    chosen = planner.plan(topology(seen), info, wishes).chosen
    return {
        seen[rank.host].ssh: (rank.start, rank.stop) if chosen.strategy == "pipeline" else None for rank in chosen.ranks
    }


def _layers(layers: Layers) -> str:
    return "all layers" if layers is None else f"layers {layers[0]} to {layers[1] - 1}"


def _pair(text: str) -> tuple[str, str]:
    host, equals, folder = text.partition("=")
    if not (host and equals and folder):
        raise BadSetting(f"--models {text} is not HOST=FOLDER.", hint="For example: --models studio-a=/Volumes/Models")
    return host, folder


def _cache() -> Path:
    folders = Folders.from_environment(os.environ)
    folders.make()
    return folders.cache


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """The first Ctrl-C stops in order, here and on the hosts; a second one at once."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `cluster` command line."""
    app.command("install")(install_command)
    app.command("pull")(pull_command)
