"""Run one program with the layer, or compare it with and without: what `cluster vm run` does once all gates are passed.

The layer is named in the environment of the program itself, never through a shell or env, which would lose it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path

from cluster.errors import BadSetting, ComparisonFailed, ProgramRefused, WrongAnswer

PRELOAD = "DYLD_INSERT_LIBRARIES"
GREEDY = ["--temp", "0", "--seed", "1"]
SPEED = re.compile(r"((?:prompt )?eval) time = .* ([0-9.]+) tokens per second")  # as llama.cpp logs it at its end


@dataclass(frozen=True, slots=True)
class Profile:
    """The two answers to raise: the highest Apple GPU family (1001 to 1999) and the threadgroup memory in bytes."""

    family: int
    memory_bytes: int

    def __post_init__(self) -> None:
        if not 1001 <= self.family <= 1999 or not 0 <= self.memory_bytes <= 1 << 20:
            raise BadSetting(
                f"{self} is no profile: an Apple GPU family (1001 to 1999) and bytes (up to 1048576).",
                hint="Metal3 (5001) is never raised: programs then use what the virtual GPU cannot do, and MLX fails.",
            )

    def __str__(self) -> str:
        return f"{self.family}/{self.memory_bytes}"


PROFILES = {"llama": Profile(1007, 32768), "apple9": Profile(1009, 32768), "original": Profile(1009, 65536)}


@dataclass(slots=True)
class Run:
    """How a run went: exit status as a shell gives it, seconds, what it printed if kept, the layer's events."""

    status: int
    seconds: float
    output: str
    log: str
    events: list[dict[str, str]] = field(default_factory=list)

    @property
    def stock(self) -> str:
        """Why the program stayed stock, or "" when the layer was installed."""
        last = self.events[-1] if self.events else {"event": "", "reason": ""}
        without = {
            "": "dyld ignored the layer (hardened runtime or System Integrity Protection)",
            "armed": "this process never asked for a Metal device (if a child of it did: only one process is raised)",
            "installed": "",
        }
        return without.get(last["event"], last["reason"])


def run(argv: list[str], layer: Path | None, profile: Profile, *, keep: bool = False, preload: str = PRELOAD) -> Run:
    """Run `argv` to its end, with the layer unless that is None; `keep` its output instead of showing it.

    The layer says on stderr what it did. Raises ProgramRefused: it does not start, or `preload` is in use already.
    """
    if preload in os.environ:
        raise ProgramRefused(f"{preload} is already set to {os.environ[preload]}.", hint=f"unset {preload}")
    with tempfile.NamedTemporaryFile(prefix="cluster-vm-") as report:
        raised = {"CLUSTER_VM_FAMILY": str(profile.family), "CLUSTER_VM_THREADGROUP_MEMORY": str(profile.memory_bytes)}
        raised |= {"CLUSTER_VM_REPORT": report.name, preload: str(layer)}
        environment = {**os.environ, **(raised if layer else {})}
        stdin, out = (subprocess.DEVNULL, subprocess.PIPE) if keep else (None, None)
        started = time.monotonic()
        try:
            process = subprocess.Popen(argv, env=environment, stdin=stdin, stdout=out, stderr=out, text=True)
        except OSError as error:
            raise ProgramRefused(f"{argv[0]} could not be started: {error.strerror}.") from error
        while True:
            try:
                output, log = process.communicate()
                break
            except KeyboardInterrupt:  # the program got the same Ctrl-C from the terminal and decides what it means
                continue
        events = [json.loads(line) for line in report.read().splitlines()]
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Run(status, time.monotonic() - started, output or "", log or "", events)


def compare(argv: list[str], run: Callable[[list[str], bool], Run]) -> dict[str, tuple[float, float]]:
    """Run a short command with stock and with raised answers; `run` takes the command and whether to raise.

    Returns figure -> (stock, raised): seconds, and llama.cpp's own tokens per second. llama.cpp must also write the
    same greedy text both times: a faster wrong answer is an error. Raises ComparisonFailed, WrongAnswer.
    """
    llama = Path(argv[0]).name.startswith("llama-")
    argv = argv + GREEDY * llama
    stock, raised = run(argv, False), run(argv, True)
    for done in (stock, raised):
        if done.status:
            raise ComparisonFailed(f"{' '.join(argv)} ended with exit code {done.status}.")
    if raised.stock:
        raise ComparisonFailed(f"{argv[0]} stayed stock, so there is nothing to compare: {raised.stock}.")
    before, after = stock.output, raised.output
    if llama and not before.strip():
        raise ComparisonFailed(
            f"{argv[0]} wrote no text.", hint="Compare llama-completion with -m, -p, -n and -no-cnv."
        )
    if llama and before != after:
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))
        texts = f"stock goes on with {before[same : same + 60]!r}, raised with {after[same : same + 60]!r}"
        raise WrongAnswer(
            f"After {same} equal characters {texts}.",
            hint="Do not use this profile here. A late difference of two sensible texts may be rounding: read both.",
        )
    figures = [
        {"seconds": done.seconds, **{k: float(v) for k, v in SPEED.findall(done.log)}} for done in (stock, raised)
    ]
    return {name: (figures[0][name], figures[1][name]) for name in figures[0] if name in figures[1]}


def without_mmap(argv: list[str]) -> bool:
    """Whether llama.cpp is told to read the model instead of mapping it (llama-bench spells it -mmp 0)."""
    return "--no-mmap" in argv or any(pair in (("-mmp", "0"), ("--mmap", "0")) for pair in pairwise(argv))
