"""`cluster vm profile | run | compat`: parse, call, print. Registered by cli.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.errors import NotAMacGuest, ProfileUnreadable, ProgramRefused
from cluster.paths import Folders
from cluster.vm import build, compat, facts, macho, profile
from cluster.vm.run import PROFILES, Profile, compare
from cluster.vm.run import run as run_program

app = typer.Typer(no_args_is_help=True, help="Virtual Macs: their Metal profile, and programs at full speed in them.")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--")


@app.command("profile")
def show_profile(host: Annotated[str, typer.Option(help="Ask this host by ssh.")] = "", as_json: Json = False) -> None:
    """Show what this machine's Metal says it can do; changes nothing."""
    argv = [*SSH, host, "python3", "-"] if host else [sys.executable, "-"]
    try:
        with Path(profile.__file__).open() as source:
            done = subprocess.run(argv, stdin=source, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
        hint = f"Try: ssh {host} python3 --version" if host else "Run it on a Mac, or give --host."
        where = host or "this machine"
        raise ProfileUnreadable(
            f"{where} shows no Metal profile: {(said or str(error)).splitlines()[-1]}", hint=hint
        ) from error
    seen: dict[str, Any] = json.loads(done.stdout)
    guest = facts.virtual_machine(seen["hv_vmm"], seen["model"], seen.get("device", ""), seen["chip"])
    seen["virtual_machine"] = guest is not None
    lines = [f"{name.replace('_', ' '):24} {value}" for name, value in seen.items()]
    typer.echo(json.dumps(seen) if as_json else "\n".join([*lines, *(guest.consequences if guest else ())]))


@app.command("compat")
def show_compat() -> None:
    """Show which combinations of host, guest, runtime and profile are known."""
    for row in compat.load(compat.SHIPPED, _recorded()):
        parts = ", ".join(f"{part.replace('_', ' ')} {row[part]}" for part in compat.KEY if part in row)
        typer.echo(
            "\n          ".join(filter(None, [f"{row['state']:9} {parts}", row.get("gain"), f"({row['evidence']})"]))
        )


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- PROGRAM [ARGS]...", show_default=False)],
    name: Annotated[str, typer.Option("--profile", help="llama, apple9 or original.")] = "llama",
    family: Annotated[int, typer.Option(help="Highest Apple GPU family, 1001 to 1999, instead of a profile.")] = 0,
    memory: Annotated[int, typer.Option("--threadgroup-memory", help="Bytes; with --family.")] = 32768,
    comparing: Annotated[bool, typer.Option("--compare", help="Run it stock and raised; compare both.")] = False,
    recording: Annotated[bool, typer.Option("--record", help="With --compare: keep the result as tested.")] = False,
    untested: Annotated[bool, typer.Option("--untested", help="Run a combination that nobody has reported.")] = False,
    host_build: Annotated[str, typer.Option(help="macOS build of the Mac underneath; a guest cannot see it.")] = "",
) -> None:
    """Run one program of this macOS guest with a raised Metal profile; nothing else is changed."""
    if not family and name not in PROFILES:
        raise typer.BadParameter(f"{name} is none of {', '.join(PROFILES)}", param_hint="--profile")
    wanted, seen = Profile(family, memory) if family else PROFILES[name], _guest()
    program, architecture = _program(command[0])
    argv = [program, *command[1:]]
    vm = facts.virtual_machine(seen["hv_vmm"], seen["model"], cpu_brand=seen["chip"])
    known = (vm.host_chip if vm else "", host_build, seen["macos"], seen["build"], *compat.runtime(argv), str(wanted))
    key = dict(zip(compat.KEY, known, strict=True))
    if recording and not (comparing and key["runtime"] == "llama.cpp"):
        raise typer.BadParameter(
            "goes with --compare, and with llama.cpp, whose text is compared", param_hint="--record"
        )
    row = compat.look_up(compat.load(compat.SHIPPED, _recorded()), key, argv, untested=untested or comparing)
    typer.echo(f"cluster vm: {row['state']}. {row.get('gain', '')}", err=True)
    layer = build.build(Folders.from_environment(os.environ).cache, architecture)
    if comparing:
        figures = compare(argv, lambda argv, raise_: run_program(argv, layer if raise_ else None, wanted, keep=True))
        gains = [f"{name} {stock:.2f} -> {raised:.2f}" for name, (stock, raised) in figures.items()]
        typer.echo("\n".join([*gains, f"text {'the same' if key['runtime'] == 'llama.cpp' else 'not compared'}"]))
        if recording:
            evidence = f"cluster vm run --compare --record, {time.strftime('%Y-%m-%d')}"
            compat.record(_recorded(), {"state": "tested", **key, "gain": ", ".join(gains), "evidence": evidence})
        return
    done = run_program(argv, layer, wanted)
    if done.stock:
        typer.echo(f"cluster vm: it ran with the stock profile: {done.stock}", err=True)
    raise typer.Exit(done.status)


def _guest() -> dict[str, str]:
    if sys.platform != "darwin":
        raise NotAMacGuest(f"cluster vm run works only inside a macOS guest; this is {sys.platform.capitalize()}.")
    seen = profile.machine()
    if seen["hv_vmm"] != "1":
        raise NotAMacGuest(f"cluster vm run works only inside a macOS guest; this {seen['model']} is bare metal.")
    return seen


def _program(name: str) -> tuple[str, str]:
    """The file that would run, and its architecture. Raises ProgramRefused."""
    path = shutil.which(name)
    if path is None:
        raise ProgramRefused(f"{name}: there is no such program.", hint="Give its full path.")
    try:
        return path, macho.architecture(Path(path))
    except (macho.Refusal, OSError) as reason:
        hint = "docs/virtual-machines.md says which programs can be given the layer."
        raise ProgramRefused(f"{path} would stay stock: {reason}.", hint=hint) from reason


def _recorded() -> Path:
    return Folders.from_environment(os.environ).state / "vm-compat.yaml"
