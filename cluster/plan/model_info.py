"""What a model needs, read by a child process: the coordinator never holds mlx.

`read` is for planning and launching; `check_tensor` is asked before ranks are started in tensor mode.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cluster.errors import ModelNotUnderstood, SplitRefused
from parallel import wire

COMMAND = (sys.executable, "-m", "parallel.model_info")
DEADLINE_S = 120.0


def read(source: Path, *, command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S) -> wire.ModelInfo:
    """The facts of the model in folder `source`, or of a config.json by itself. Blocks for a few seconds.

    Raises ModelNotUnderstood when mlx-lm cannot build it, or the child gives no answer within `deadline_s` seconds.
    """
    try:
        child = subprocess.run(
            [*command, str(source)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s
        )
    except subprocess.TimeoutExpired as error:
        raise ModelNotUnderstood(
            f"Reading the model in {source} took more than {deadline_s:g} seconds.",
            hint="Is the folder on a slow network disk? Try again, or copy it to a local one.",
        ) from error
    if child.returncode == 0:
        try:
            return msgspec.json.decode(child.stdout, type=wire.ModelInfo)
        except msgspec.MsgspecError as error:
            raise ModelNotUnderstood(f"The sizes of the model in {source} did not decode: {error}.") from error
    words = child.stderr.strip().splitlines() or [f"its reader ended with exit code {child.returncode}"]
    raise ModelNotUnderstood(
        f"{source} is no model that mlx-lm can run: {words[-1]}.",
        hint="Check its config.json; a newer mlx-lm may know the model.",
    )


def alternatives(info: wire.ModelInfo) -> str:
    """How this model can be run on more than one rank, in words for a hint."""
    ways = []
    if sizes := info.tensor_sizes:
        ways.append(f"tensor parallel on {_or(sizes)} ranks")
    if not info.pipeline:
        ways.append(f"a pipeline on 2 to {len(info.layers)} ranks")
    return " or ".join(ways) or "one machine only"


def check_tensor(info: wire.ModelInfo, ranks: int) -> None:
    """Raise SplitRefused, with the alternatives, unless tensor parallel on `ranks` ranks is possible."""
    if problems := info.why_not_tensor(ranks):
        raise SplitRefused(
            f"{info.family} cannot run tensor-parallel on {ranks} ranks: {'; '.join(problems)}.",
            hint=f"Possible: {alternatives(info)}.",
        )


def check_pipeline(info: wire.ModelInfo, ranks: int) -> None:
    """Raise SplitRefused, with the alternatives, unless a pipeline of `ranks` stages is possible."""
    problem = info.pipeline
    if not problem and ranks > len(info.layers):
        problem = f"it has {len(info.layers)} layers, fewer than {ranks} stages"
    if problem:
        raise SplitRefused(
            f"{info.family} cannot run as a pipeline of {ranks} stages: {problem}.",
            hint=f"Possible: {alternatives(info)}.",
        )


def _or(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
