"""What one step costs rank 0 in control alone: `python tests/control_time.py [FOLLOWERS] [ROWS]`. Prints microseconds.

Real followers in processes of their own, over TCP on loopback. Timed are sending a decode step to all of them, and what
the scheduler does for a step: deciding it and taking its result (with an executor that computes nothing).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from fake_executor import FakeExecutor
from test_follower import Star, line

from parallel import wire
from parallel.engine.loop import Engine
from parallel.engine.scheduler import Limits, Scheduler
from parallel.engine.sequence import CacheShape

STEPS = 2000
SHAPE = CacheShape(fixed_bytes=0, layers=((1, 0),))


def sending(followers: int, rows: int) -> float:
    """Median seconds of one `send_step`, one every 2 ms, as in decoding."""
    with tempfile.TemporaryDirectory() as folder:
        star = Star(Path(folder), followers + 1)
        try:
            ranks = [star.follow("steps", rank) for rank in range(1, followers + 1)]
            assert [line(rank) for rank in ranks] == ["joined"] * followers
            took = []
            for id in range(1, STEPS + 1):
                step = wire.Step(id, bucket=1, rows=[wire.Row(row, 100 + row, id) for row in range(rows)])
                begun = time.perf_counter()
                star.control.send_step(step)
                took.append(time.perf_counter() - begun)
                for rank in ranks:
                    assert line(rank) == f"step {id}"
        finally:
            star.close()
    return statistics.median(took)


def deciding(rows: int) -> float:
    """Seconds that the scheduler takes per decode step of `rows` rows, the pretended executor's own time left out."""
    executor = FakeExecutor(SHAPE)
    spent = 0.0

    def timed(name: str) -> None:
        whole = getattr(executor, name)

        def call(step: wire.Step) -> object:
            nonlocal spent
            begun = time.perf_counter()
            try:
                return whole(step)
            finally:
                spent += time.perf_counter() - begun

        setattr(executor, name, call)

    for name in ("prepare", "begin", "finish"):
        timed(name)
    limits = Limits(1 << 20, rows, 1 << 40, 0, SHAPE, 1 << 30)
    engine = Engine(Scheduler(limits), executor)
    for id in range(1, rows + 1):
        engine.add(wire.Submit(id, [id, id + 1], STEPS))
    begun = time.perf_counter()
    while not engine.idle:
        engine.step()
    return (time.perf_counter() - begun - spent) / STEPS


if __name__ == "__main__":
    followers, rows = int((sys.argv[1:] or ["3"])[0]), int((sys.argv[2:] or ["32"])[0])
    print(f"a step of {rows} rows to {followers} followers: {1e6 * sending(followers, rows):.0f} us")
    print(f"deciding it and taking its result: {1e6 * deciding(rows):.0f} us")
