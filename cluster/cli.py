"""The command line: parse, call into the package, print, exit code. No logic lives here.

Exit codes: 0 done; 1 an expected failure, told in one line with a hint; 2 wrong usage, settings included. A bug keeps
its traceback. Modules that take long to import are imported by the command that needs them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cluster import cli_macs, cli_plan, cli_ship
from cluster.benchmark.bench import bench
from cluster.config import NAMES, ClusterConfig, load_config
from cluster.errors import ClusterError, NothingRuns, NotReady
from cluster.paths import Folders
from cluster.vm.commands import app as vm_app

KEY_VARIABLE = "CLUSTER_API_KEY"
DEFAULT = ClusterConfig()

app = typer.Typer(
    help="Serve a large language model through an OpenAI-compatible API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Client(StrEnum):
    """Programs that `cluster client` writes settings for."""

    opencode = "opencode"


def option(text: str, *names: str) -> typer.models.OptionInfo:
    """A flag of `up`; its default is None, so that a value in the configuration file can be told from none."""
    return typer.Option(*names, help=text, show_default=False)


ApiKey = Annotated[str | None, option(f"The API key; better in the variable {KEY_VARIABLE}.")]


@app.command()
def up(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A folder in MLX format or a Hugging Face name; default: a small demo model.")
    ] = None,
    config: Annotated[Path | None, option("A YAML file in which every flag here is also a key; flags win.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once it is ready, and leave it running.")
    ] = False,
    host: Annotated[str | None, option(f"The address that the API listens at ({DEFAULT.host}).")] = None,
    port: Annotated[int | None, option(f"The port of the API ({DEFAULT.port}).")] = None,
    api_key: ApiKey = None,
    cors_origin: Annotated[list[str] | None, option("Web pages of this origin may call the API; repeatable.")] = None,
    context_tokens: Annotated[
        int | None, option("Most tokens of a prompt and its answer (the model's).", "--context")
    ] = None,
    slots: Annotated[int | None, option(f"Requests that run at once ({DEFAULT.slots}).")] = None,
    kv_memory: Annotated[str | None, option("Limit of the KV cache, like 8GB (from the machine's memory).")] = None,
    prefix_memory: Annotated[str | None, option("Of it, for prefixes to reuse; 0 for none (a share of it).")] = None,
    prefill_step_size: Annotated[
        int | None, option(f"Tokens of a prefill chunk ({DEFAULT.prefill_step_size}).")
    ] = None,
    wired_limit: Annotated[str | None, option("auto keeps weights wired in memory; or off (auto).")] = None,
    queue: Annotated[int | None, option(f"Requests that may wait; more get status 429 ({DEFAULT.queue}).")] = None,
    max_body: Annotated[str | None, option(f"Largest request body ({DEFAULT.max_body // 10**6}MB).")] = None,
    stall_timeout: Annotated[float | None, option(f"Seconds a step may take ({DEFAULT.stall_timeout:g}).")] = None,
    log_prompts: Annotated[bool | None, option("Write prompts and answers to the log (no).")] = None,
    local: Annotated[int | None, option("Split the model over this many ranks on this machine (1).")] = None,
    hostfile: Annotated[str | None, option("Split it over the hosts of this file, in mlx.launch's format.")] = None,
    hosts: Annotated[
        str | None, option("Split it over these hosts, as ssh knows them, with commas between; auto asks Bonjour.")
    ] = None,
    backend: Annotated[str | None, option("auto, ring, jaccl or jaccl-ring (auto: as the cables allow).")] = None,
    models: Annotated[
        list[str] | None, option("Where a host keeps models, like studio-b=/Volumes/models; repeatable.")
    ] = None,
    force: Annotated[bool | None, option("Go on past what doctor finds and past the memory plan (no).")] = None,
    python: Annotated[str | None, option("The interpreter on the hosts (the one that `cluster install` made).")] = None,
    parallel: Annotated[str | None, option(f"auto, tensor or pipeline ({DEFAULT.parallel}).")] = None,
    split: Annotated[str | None, option("Layers of rank 0, 1, ... of a pipeline, like 20,10 (by size).")] = None,
    fast_synch: Annotated[
        str | None, option(f"MLX_METAL_FAST_SYNCH in the ranks: auto, on or off ({DEFAULT.fast_synch}).")
    ] = None,
    self_check: Annotated[
        bool | None, option("Compare a long prompt, whole and in chunks, before several ranks are ready (yes).")
    ] = None,
) -> None:
    """Start the model and its API; Ctrl-C stops everything."""
    given = context.params | {"context": context_tokens}
    settings = load_config(
        {name: given[name] for name in NAMES}, file=config, environment_key=os.environ.get(KEY_VARIABLE)
    )
    _start(settings, detach)


def _start(settings: ClusterConfig, detach: bool) -> None:
    from cluster import coordinator, running
    from cluster.show.view import StartView
    from cluster.state import ClusterState
    from cluster.supervision import launch

    folders, url = _folders(), coordinator.url_of(settings)
    if not coordinator.is_loopback(settings.host) and settings.api_key is None:
        _tell(f"warning: everyone who reaches {settings.host} may use the API; --api-key asks them for a key.")
    held = coordinator.claim(settings, folders)
    if isinstance(held, ClusterState):
        if back := running.returned(held):
            typer.echo(f"Taking in {', '.join(back)}.")
            with StartView(url, _shown_key(settings)) as view:
                running.take_in(held, view.update)
        else:
            typer.echo(f"Already running at {held.url}/v1 (pid {held.coordinator.pid}, {held.phase}).")
        return
    code = 0
    with StartView(url, _shown_key(settings)) as view:
        if detach:
            held.release()  # the detached process claims for itself
            job = coordinator.Launch(settings, folders, launch.RANK_COMMAND, detached=True)
            child = launch.start_detached(job.encode(), folders.coordinator_log)
            running.wait_ready(child, folders, view.update)
        else:
            code = coordinator.run(coordinator.Launch(settings, folders, launch.RANK_COMMAND), held, view.update)
    coordinator.exit_process(code)


@app.command()
def down() -> None:
    """Stop the running cluster, and what a crashed one left."""
    from cluster import running

    typer.echo(running.end(_folders()) or "Nothing is running.")


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What runs, in which phase. Exit code 1 when nothing runs or it has failed."""
    from cluster import running

    try:
        state = running.find(_folders())
        health = running.ask(state)
    except ClusterError as error:
        if as_json:
            typer.echo(json.dumps({"running": not isinstance(error, NothingRuns), "reason": error.message}))
            raise typer.Exit(1) from error
        raise
    if as_json:
        typer.echo(json.dumps({"running": True, "url": state.url, **health}, indent=2))
    else:
        from cluster.show.view import show, status_table

        show(status_table(state, health))
    raise typer.Exit(health["status"] == "failed")


@app.command()
def logs(
    which: Annotated[str | None, typer.Argument(help="A rank's number, its host, or coordinator (all).")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the cluster ends or Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log.")] = 20,
) -> None:
    """The logs of the coordinator and its ranks; of the last run, when nothing runs."""
    from cluster import running

    folders = _folders()
    try:
        state = running.find(folders)
    except NothingRuns as error:
        _tell(error.message)
        state = None
    goes_on = (lambda: state.runs) if follow and state is not None else None
    try:
        for line in running.log_lines(folders, count=lines, goes_on=goes_on, which=which, state=state):
            typer.echo(line)
    except KeyboardInterrupt:
        raise typer.Exit from None


@app.command()
def chat(
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 always takes the likeliest token.")] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to the running model in the terminal; lines from a pipe are turns."""
    from cluster import running, terminal_chat

    state = running.find(_folders())
    health = running.ask(state)
    if health["status"] != "ready":
        raise NotReady(f"The cluster is not ready: {health['status']}.", hint="`cluster status` shows when it is.")
    key = api_key or os.environ.get(KEY_VARIABLE)
    terminal_chat.chat(terminal_chat.Conversation(state.url, key, system, temperature), health["model"])


@app.command()
def client(name: Annotated[Client, typer.Argument(help="The program.")]) -> None:
    """Print settings with which another program uses the running cluster."""
    from cluster import client_config, running

    state = running.find(_folders())
    health = running.ask(state)
    if not health["context"]:
        raise NotReady(f"The cluster is not ready: {health['status']}.", hint="`cluster status` shows when it is.")
    model, context, takes = health["model"], health["context"], health["takes"]
    typer.echo(client_config.opencode(state.url, model, context, takes, needs_key=state.needs_key))


cli_macs.register(app)
cli_plan.register(app)
cli_ship.register(app)
app.command()(bench)
app.add_typer(vm_app, name="vm")


def _folders() -> Folders:
    return Folders.from_environment(os.environ)


def _shown_key(settings: ClusterConfig) -> str | None:
    """The key inside the double quotes of the curl line: the variable where that works or the key would be recorded."""
    if settings.api_key is None:
        return None
    if settings.api_key == os.environ.get(KEY_VARIABLE) or not sys.stdout.isatty():
        return f"${KEY_VARIABLE}"
    return re.sub(r'(["\\$`])', r"\\\1", settings.api_key)


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def main() -> None:
    """The `cluster` script."""
    try:
        app()
    except ClusterError as error:
        _tell(f"error: {error.message}")
        if error.hint:
            _tell(f"hint: {error.hint}")
        sys.exit(error.exit_code)
