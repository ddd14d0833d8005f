"""A rank that follows, without a model: `python follower_rank.py DOES RANK DIGEST PLAN`. It prints what befalls it.

steps    prints every step's id, and that it was told to leave
stuck    joins, and its main thread never does anything again
meet     comes to a point, and says that it was released from it
lies     as steps, but it claims to have executed other ones
session  as steps, and it watches its ssh session
"""

from __future__ import annotations

import signal
import sys

import msgspec

from parallel import follower, wire
from parallel.follower import Follower, JoinRefused
from parallel.rank import watch_session


def main(does: str, rank: int, digest: str, text: str) -> None:
    if does == "session":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    follower.BEAT_S = follower.LEAVE_S = 0.2
    follower.JOIN_PATIENCE_S = 1.0
    if does == "version":
        true = follower.versions
        follower.versions = lambda: true() | {"mlx-lm": "0.0.9", "python": "2.7"}
    try:
        star = Follower(msgspec.json.decode(text, type=wire.RankPlan), rank, digest)
    except JoinRefused as error:
        print(error, flush=True)
        sys.exit(5)
    print("joined", flush=True)
    if does == "session":
        watch_session(star)
    if does == "lies":
        star._taken = (0, 12345)
    star.phase(wire.Progress(rank, "loading", 3, 9))
    if does == "stuck":
        star.doing("beginning", 7)
        signal.pause()
    if does == "meet":
        star.meet("measured", wire.Fact(kv_bytes=100 + rank))
        print("released", flush=True)
    if does == "fails":
        star.fail("no memory")
    while (step := star.steps.get()) is not None:
        print(f"step {step.id}", flush=True)
    print("told to leave", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
