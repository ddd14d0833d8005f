"""A real rank in which something goes wrong: `python faulty_rank.py FAULT RANK TRIGGER JSON`.

The fault comes over rank RANK when the file TRIGGER exists; that removes the file, so the next launch is sound.

raise     an exception in the middle of a step
block     its main thread waits in a collective for ever, while its heartbeat lives
memory    loading finds no memory
killed    it is killed while loading, as by a system that is out of memory
init      joining the group hangs in native code, the interpreter's lock held
version   it runs another version of mlx
plan      it was given another plan
secret    it has another secret
mute      it never joins
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from parallel import control, follower, rank, wire


def main(fault: str, victim: str, trigger: Path, text: str) -> int:
    """Run the rank; its exit code."""

    def due() -> bool:
        if os.environ["MLX_RANK"] != victim:
            return False
        try:
            trigger.unlink()
        except FileNotFoundError:
            return False
        return True

    if fault in ("version", "plan", "secret", "mute"):
        if due():
            text = at_join(fault, text)
    elif fault == "init":
        in_init(due)
    elif fault in ("memory", "killed"):
        in_loading(fault, due)
    else:
        in_steps(fault, due)
    return rank.main([text])


def at_join(fault: str, text: str) -> str:
    """What goes wrong before the first message."""
    if fault == "mute":
        signal.pause()
    elif fault == "version":
        true = control.versions
        follower.versions = lambda: true() | {"mlx": "0.0.1"}
    elif fault == "plan":
        text += " "
    else:
        plan = msgspec.json.decode(text, type=wire.RankPlan)
        other = Path(plan.secret_file).with_name("other-secret")
        other.write_text("not this one")
        true_of = wire.RankPlan.of
        wire.RankPlan.of = lambda plan, n: msgspec.structs.replace(true_of(plan, n), secret_file=str(other))  # type: ignore[method-assign]
    return text


def in_init(due: Callable[[], bool]) -> None:
    import mlx.core as mx

    from parallel import group

    true = mx.distributed.init
    group.CONNECT_S = 3

    def init(**options: Any) -> Any:
        if due():
            ctypes.PyDLL(None).sleep(600)  # unlike CDLL, it keeps the interpreter's lock
        return true(**options)

    mx.distributed.init = init


def in_loading(fault: str, due: Callable[[], bool]) -> None:
    from parallel import loading

    true = loading._read

    def read(*arguments: Any) -> None:
        if due():
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("[malloc] Unable to allocate 9000000000 bytes.")
        true(*arguments)

    loading._read = read


def in_steps(fault: str, due: Callable[[], bool]) -> None:
    import mlx.core as mx

    from parallel.engine.executor import Executor

    true = Executor._decode

    def decode(self: Any, *arguments: Any) -> None:
        if due():
            if fault == "raise":
                raise RuntimeError("injected")
            mx.eval(mx.distributed.all_sum(mx.ones(1), group=self.links._group))  # nobody else takes part
        true(self, *arguments)

    Executor._decode = decode  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], Path(sys.argv[3]), sys.argv[4]))  # type: ignore[call-arg]
