"""Run one program with the layer, or compare it with and without: what `cluster vm run` does once all gates are passed.

The layer is named in the environment of the program itself, never through a shell or env, which would lose it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from cluster.errors import ComparisonFailed, ProgramRefused, WrongAnswer

PRELOAD = "DYLD_INSERT_LIBRARIES"
Profile = tuple[int, int]  # the answers to raise: the highest Apple GPU family, and the threadgroup memory in bytes
PROFILES: dict[str, Profile] = {"llama": (1007, 32768), "apple9": (1009, 32768), "original": (1009, 65536)}
GREEDY = ["--temp", "0", "--seed", "1"]
# As llama.cpp logs it at its end, and as llama-bench's table has it.
SPEED = re.compile(r"(prompt eval|eval|pp\d+|tg\d+)(?: time = .*| *\|) +([0-9.]+) (?:tokens per second|±)")
WHY_STOCK = {  # by the last event that the layer reported; "stays stock" brings its reason along
    "installed": "",
    "": "dyld ignored the layer (hardened runtime or System Integrity Protection)",
    "armed": "this process never asked for a Metal device (if a child of it did: only one process is raised)",
}


class Run(NamedTuple):
    """How a run went: exit status as a shell gives it, seconds, what it printed if kept, why it stayed stock or ""."""

    status: int
    seconds: float
    output: str
    log: str
    stock: str


def run(argv: list[str], layer: Path | None, profile: Profile, *, keep: bool = False, preload: str = PRELOAD) -> Run:
    """Run `argv` to its end, with the layer unless that is None; `keep` its output instead of showing it.

    The layer says on stderr what it did. Raises ProgramRefused: it does not start, or `preload` is in use already.
    """
    if preload in os.environ:
        raise ProgramRefused(f"{preload} is already set to {os.environ[preload]}.", hint=f"unset {preload}")
    with tempfile.NamedTemporaryFile(prefix="cluster-vm-") as report:
        raised = {"CLUSTER_VM_FAMILY": str(profile[0]), "CLUSTER_VM_THREADGROUP_MEMORY": str(profile[1])}
        raised |= {"CLUSTER_VM_REPORT": report.name, preload: str(layer)}
        environment = {**os.environ, **(raised if layer else {})}
        stdin, out = (subprocess.DEVNULL, subprocess.PIPE) if keep else (None, None)
        started = time.monotonic()
        try:
            process = subprocess.Popen(argv, env=environment, stdin=stdin, stdout=out, stderr=out, errors="replace")
        except OSError as error:
            raise ProgramRefused(f"{argv[0]} could not be started: {error.strerror}.") from error
        # It gets the terminal's Ctrl-C itself and decides what that means; whoever ends us by SIGTERM ends it.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        terminate = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        output, log = process.communicate()
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)
        last = json.loads((report.read().splitlines() or [b'{"event": "", "reason": ""}'])[-1])
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    seconds, stock = time.monotonic() - started, WHY_STOCK.get(last["event"], last["reason"])
    return Run(status, seconds, output or "", log or "", stock)


def compare(argv: list[str], run: Callable[[list[str], bool], Run]) -> dict[str, tuple[float, float]]:
    """Run a short command with stock and with raised answers; `run` takes the command and whether to raise.

    Returns figure -> (stock, raised): seconds, and llama.cpp's own tokens per second. If it generates, it must write
    the same greedy text both times: a faster wrong answer is an error. Raises ComparisonFailed, WrongAnswer.
    """
    argv = argv + GREEDY * generates(argv)
    stock, raised = run(argv, False), run(argv, True)
    if status := stock.status or raised.status:
        raise ComparisonFailed(f"{' '.join(argv)} ended with exit code {status}.")
    if raised.stock:
        raise ComparisonFailed(f"{argv[0]} stayed stock, so there is nothing to compare: {raised.stock}.")
    if generates(argv) and not stock.output.strip():
        raise ComparisonFailed("It wrote no text.", hint="Compare llama-completion with -m, -p, -n and -no-cnv.")
    if generates(argv) and stock.output != raised.output:
        same = [a == b for a, b in zip_longest(stock.output, raised.output)].index(False)
        texts = [done.output[same : same + 60] for done in (stock, raised)]
        hint = "Do not use this profile here. A late difference of two sensible texts may be rounding: read both."
        said = f"After {same} equal characters stock goes on with {texts[0]!r}, raised with {texts[1]!r}."
        raise WrongAnswer(said, hint=hint)
    before, after = (
        {"seconds": done.seconds, **{name: float(speed) for name, speed in SPEED.findall(done.output + done.log)}}
        for done in (stock, raised)
    )
    return {name: (before[name], after[name]) for name in before if name in after}


def generates(argv: list[str]) -> bool:
    """Whether it is a program of llama.cpp that writes the text it generates; llama-bench does not."""
    name = Path(argv[0]).name
    return name.startswith("llama-") and name != "llama-bench"
