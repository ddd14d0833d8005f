"""`cluster plan MODEL`: where each layer would live and why, before anything is downloaded or started.

`cli.py` calls `register(app)`. It looks at the Macs, reads the model's sizes, asks the planner and prints.
"""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli_macs import AsJson, Config, HostfileFlag, Hosts, Recorded, as_json, look, tell_unreachable
from cluster.errors import BadSetting, NoPlan
from cluster.plan.placement import Option


def plan_command(
    model: Annotated[str, typer.Argument(help="A folder in MLX format, a config.json, or a Hugging Face name.")],
    hosts: Hosts = None,
    hostfile: HostfileFlag = None,
    recorded: Recorded = None,
    config: Config = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its answer (the model's, at most 32768).")
    ] = None,
    slots: Annotated[int | None, typer.Option(help="Sequences of that length at once (4).")] = None,
    parallel: Annotated[str, typer.Option(help="auto, single, tensor or pipeline.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, jaccl, jaccl-ring or ring.")] = "auto",
    split: Annotated[
        str | None, typer.Option(help="Layers per rank, like 30,31; rank 0, the first, has the last layers.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Plan also what does not fit in memory.")] = False,
    as_json_: AsJson = False,
) -> None:
    """Where each layer would live and why; what is missing where it does not fit."""
    from cluster.cabling.topology import topology
    from cluster.plan import model_info, planner
    from cluster.ship import weights

    for flag, value in (("--context", context), ("--slots", slots)):
        if value is not None and value < 1:
            raise BadSetting(f"{flag} must be at least 1, not {value}.")
    wanted = numbers(split)
    source = weights.config_only(model)
    seen, unreachable = look(hosts, hostfile, recorded, config)
    tell_unreachable(unreachable)
    info = model_info.read(source)
    wishes = planner.wishes_for(
        info,
        context=context or 0,
        slots=slots or 0,
        parallel=parallel,
        backend=backend,
        split=wanted,
        force=force,
    )
    try:
        found = planner.plan(topology(seen), info, wishes)
    except NoPlan as refused:
        if as_json_:
            options = [planner.option_values(option) for option in refused.options if isinstance(option, Option)]
            typer.echo(as_json({"chosen": None, "others": options, "reason": refused.message, "advice": refused.hint}))
        raise
    if as_json_:
        typer.echo(as_json(planner.as_values(found)))
    else:
        from cluster.show.plan_tables import show_plan

        show_plan(model, found)


def numbers(split: str | None) -> tuple[int, ...]:
    """(30, 31) of "30,31"."""
    if split is None:
        return ()
    try:
        return tuple(int(part) for part in split.split(","))
    except ValueError as error:
        raise BadSetting(f"--split must be numbers like 30,31, not {split}.") from error


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `cluster` command line."""
    app.command("plan")(plan_command)
