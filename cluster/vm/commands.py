"""`cluster vm profile | run | compat`: parse, call, print. Registered by cli.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cluster.errors import NotAMacGuest, ProfileUnreadable, ProgramRefused
from cluster.paths import Folders
from cluster.vm import build, compat, facts, macho, profile
from cluster.vm.run import PROFILES, compare, generates, run

app = typer.Typer(no_args_is_help=True, help="Virtual Macs: their Metal profile, and programs at full speed in them.")
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--")


@app.command("profile")
def show_profile(
    host: Annotated[str, typer.Option(help="Ask this host by ssh.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this machine's Metal says it can do; changes nothing."""
    argv = [*SSH, host, "python3", "-"] if host else [sys.executable, "-"]
    try:
        with Path(profile.__file__).open() as source:
            done = subprocess.run(argv, stdin=source, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        hint = f"Try: ssh {host} python3 --version" if host else "Run it on a Mac, or give --host."
        raise ProfileUnreadable(f"{host or 'This machine'} shows no Metal profile: {said}.", hint=hint) from error
    seen: dict[str, Any] = json.loads(done.stdout)
    guest = facts.virtual_machine(seen["hv_vmm"], seen["model"], seen.get("device", ""), seen["chip"])
    seen["virtual_machine"] = guest is not None
    lines = [f"{name.replace('_', ' '):24} {value}" for name, value in seen.items()]
    typer.echo(json.dumps(seen) if as_json else "\n".join([*lines, *(guest.consequences if guest else ())]))


@app.command("compat")
def show_compat() -> None:
    """Show which combinations of host, guest, runtime and profile are known."""
    for row in compat.load(compat.SHIPPED, _recorded()):
        typer.echo("\n  ".join(f"{name.replace('_', ' ')}: {value}" for name, value in row.items()))


@app.command("run", context_settings={"allow_interspersed_args": False})
def run_raised(
    command: Annotated[list[str], typer.Argument(metavar="-- PROGRAM [ARGS]...", show_default=False)],
    name: Annotated[Literal["llama", "apple9", "original"], typer.Option("--profile")] = "llama",
    family: Annotated[int, typer.Option(help="Highest Apple GPU family; 0: the profile's.")] = 0,
    memory: Annotated[int, typer.Option("--threadgroup-memory", help="Bytes; 0: the profile's.")] = 0,
    comparing: Annotated[bool, typer.Option("--compare", help="Run it stock and raised; compare both.")] = False,
    recording: Annotated[bool, typer.Option("--record", help="With --compare: keep the result as tested.")] = False,
    untested: Annotated[bool, typer.Option("--untested", help="Run a combination that nobody has reported.")] = False,
    host_build: Annotated[str, typer.Option(help="macOS build of the Mac underneath; a guest cannot see it.")] = "",
) -> None:
    """Run one program of this macOS guest with a raised Metal profile; nothing else is changed."""
    key, argv, folders = _guest(), [_program(command[0]), *command[1:]], Folders.from_environment(os.environ)
    if recording and not (comparing and generates(argv)):
        raise typer.BadParameter("--record goes with --compare, and with a llama.cpp program that writes text")
    wanted = family or PROFILES[name][0], memory or PROFILES[name][1]
    kind, version = compat.runtime(argv)
    key |= {"host_build": host_build, "runtime": kind, "version": version, "profile": f"{wanted[0]}/{wanted[1]}"}
    row = compat.look_up(compat.load(compat.SHIPPED, _recorded()), key, argv, untested=untested or comparing)
    typer.echo(f"cluster vm: {row['state']}. {row.get('gain', '')}", err=True)
    folders.make()
    layer = build.build(folders.cache)
    if not comparing:
        done = run(argv, layer, wanted)
        if done.stock:
            typer.echo(f"cluster vm: it ran with the stock profile: {done.stock}", err=True)
        raise typer.Exit(done.status)
    figures = compare(argv, lambda argv, raising: run(argv, layer if raising else None, wanted, keep=True))
    gains = [f"{name} {stock:.2f} -> {raised:.2f}" for name, (stock, raised) in figures.items()]
    typer.echo("\n".join([*gains, f"text {'the same' if generates(argv) else 'not compared'}"]))
    if recording:
        evidence = f"cluster vm run --compare --record, {time.strftime('%Y-%m-%d')}"
        compat.record(_recorded(), {"state": "tested", **key, "gain": ", ".join(gains), "evidence": evidence})


def _guest() -> compat.Row:
    """What the map asks of this guest. Raises NotAMacGuest."""
    seen = profile.machine() if sys.platform == "darwin" else {}
    guest = facts.virtual_machine(seen["hv_vmm"], seen["model"], cpu_brand=seen["chip"]) if seen else None
    if not guest:
        here = f"{seen['model']}, which is bare metal" if seen else sys.platform.capitalize()
        raise NotAMacGuest(f"cluster vm run works only inside a macOS guest; this is {here}.")
    return {"host_chip": guest.host_chip, "guest_macos": seen["macos"], "guest_build": seen["build"]}


def _program(name: str) -> str:
    """The file that would run. Raises ProgramRefused."""
    path = shutil.which(name)
    if path is None:
        raise ProgramRefused(f"{name}: there is no such program.", hint="Give its full path.")
    if why := macho.why_stock(Path(path)):
        hint = "docs/virtual-machines.md says which programs can be given the layer."
        raise ProgramRefused(f"{path} would stay stock: {why}.", hint=hint)
    return path


def _recorded() -> Path:
    return Folders.from_environment(os.environ).state / "vm-compat.yaml"
