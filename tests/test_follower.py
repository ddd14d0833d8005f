"""Ranks that follow, as processes, in the star of a rank 0 that is played here."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_control import Peer, free_port

from parallel import control as control_module
from parallel import wire
from parallel.control import ALONE_EXIT_CODE, Control, versions

SCRIPT = str(Path(__file__).with_name("follower_rank.py"))
DIGEST = "feed"


class Star:
    """Rank 0 of `size`, a coordinator that hears it, and ranks that follow."""

    def __init__(self, folder: Path, size: int) -> None:
        self.secret = folder / "secret"
        self.secret.write_text("sesame\n")
        self.port = free_port()
        self.control = Control("127.0.0.1", self.port, self.secret, size=size, digest=DIGEST)
        self.coordinator = Peer(self.port)
        self.ranks: list[subprocess.Popen[str]] = []

    def follow(self, does: str, rank: int = 1, digest: str = DIGEST, secret: str = "") -> subprocess.Popen[str]:
        secret_file = self.secret
        if secret:
            secret_file = self.secret.with_name("other")
            secret_file.write_text(secret)
        plan = wire.RankPlan("", "127.0.0.1", self.port, str(secret_file))
        argv = [sys.executable, SCRIPT, does, str(rank), digest, msgspec.json.encode(plan).decode()]
        self.ranks.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        return self.ranks[-1]

    def told(self, kind: type[Any], what: Callable[[Any], bool] = lambda message: True) -> Any:
        """The next message of `kind` to the coordinator that `what` holds of."""
        while not what(message := self.coordinator.until(kind)):
            pass
        return message

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.coordinator.close()
        self.control.close()


@pytest.fixture
def star(tmp_path: Path) -> Iterator[Star]:
    star = Star(tmp_path, 3)
    yield star
    star.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_rank_that_joins_is_told_to_the_coordinator_with_its_process_and_versions(star: Star) -> None:
    rank = star.follow("steps", 2)
    assert line(rank) == "joined"
    joined = star.told(wire.Joined, lambda message: message.rank == 2)
    assert (joined.pid, joined.versions) == (rank.pid, versions())
    assert star.told(wire.Progress, lambda message: message.rank == 2) == wire.Progress(2, "loading", 3, 9)


def test_a_coordinator_that_comes_later_hears_who_has_joined_and_who_was_lost(star: Star) -> None:
    rank = star.follow("steps", 2)
    star.told(wire.Joined, lambda message: message.rank == 2)
    rank.kill()
    star.told(wire.Lost)
    star.coordinator.close()
    while not isinstance(star.control.inbox.get(timeout=10), control_module.Disconnected):
        pass
    star.coordinator = Peer(star.port)
    assert star.told(wire.Joined, lambda message: message.rank == 2).pid == rank.pid
    assert star.told(wire.Lost) == wire.Lost(2, "its connection closed")


def test_steps_come_in_order_and_then_the_word_to_leave(star: Star) -> None:
    ranks = [star.follow("steps", rank) for rank in (1, 2)]
    assert [line(rank) for rank in ranks] == ["joined"] * 2
    joined: set[int] = set()
    while joined != {1, 2}:  # in either order
        joined.add(star.told(wire.Joined, lambda message: message.rank > 0).rank)
    for id in range(1, 6):
        star.control.send_step(wire.Step(id, chunks=[wire.Chunk(1, [id])]))
    star.control.dismiss()
    for rank in ranks:
        assert [line(rank) for _ in range(6)] == [*(f"step {id}" for id in range(1, 6)), "told to leave"]
        assert rank.wait(10) == 0


def test_heartbeats_say_the_phase_and_step_of_a_main_thread_that_is_stuck(star: Star) -> None:
    star.follow("stuck")
    beats = [star.told(wire.Beat, lambda message: message.rank == 1) for _ in range(2)]
    assert [(beat.phase, beat.step) for beat in beats] == [("beginning", 7)] * 2
    assert beats[1].since_s > beats[0].since_s > 0


def test_heartbeats_bear_the_digest_of_what_was_executed_and_rank_0_agrees(star: Star) -> None:
    star.follow("steps")
    star.told(wire.Joined, lambda message: message.rank == 1)
    for id in (1, 2):
        star.control.send_step(wire.Step(id))
    beat = star.told(wire.Beat, lambda message: message.rank == 1 and message.last == 2)
    assert beat.digest == star.control._digests[2] != 0


def test_a_rank_that_executed_other_steps_is_lost(star: Star) -> None:
    star.follow("lies")
    star.told(wire.Progress, lambda message: message.rank == 1)
    star.control.send_step(wire.Step(1))
    assert star.told(wire.Lost) == wire.Lost(1, "it executed other steps than rank 0, up to step 1")


def test_all_are_released_from_a_point_when_the_last_one_comes_and_rank_0_has_their_facts(star: Star) -> None:
    ranks = [star.follow("meet", rank) for rank in (1, 2)]
    facts = star.control.meet("measured", wire.Fact(kv_bytes=100))
    assert [fact.kv_bytes for fact in facts] == [100, 101, 102]
    assert [[line(rank), line(rank)] for rank in ranks] == [["joined", "released"]] * 2


def test_what_a_rank_says_of_its_failure_reaches_the_coordinator(star: Star) -> None:
    star.follow("fails")
    assert star.told(wire.Failed) == wire.Failed(1, "no memory")


def test_a_rank_that_fails_because_another_ended_tells_it_after_that_end(star: Star) -> None:
    cause = star.follow("stuck", 2)
    star.told(wire.Joined, lambda message: message.rank == 2)
    assert line(star.follow("fails", 1)) == "joined"
    cause.kill()
    heard = [star.coordinator.until(wire.Lost, wire.Failed) for _ in range(2)]
    assert heard == [wire.Lost(2, "its connection closed"), wire.Failed(1, "no memory")]


def test_the_end_of_a_ranks_ssh_session_is_told_and_the_rank_lives_on(star: Star) -> None:
    rank = star.follow("session")
    star.told(wire.Progress, lambda message: message.rank == 1)
    rank.send_signal(signal.SIGHUP)
    assert star.told(wire.HungUp) == wire.HungUp(1)
    star.control.send_step(wire.Step(1))
    assert [line(rank) for _ in range(2)] == ["joined", "step 1"]


def test_the_end_of_a_ranks_process_is_told(star: Star) -> None:
    rank = star.follow("stuck", 2)
    star.told(wire.Joined, lambda message: message.rank == 2)
    rank.kill()
    assert star.told(wire.Lost) == wire.Lost(2, "its connection closed")


def test_the_end_of_rank_0_ends_a_rank_whose_main_thread_is_stuck(star: Star) -> None:
    rank = star.follow("stuck")
    star.told(wire.Joined, lambda message: message.rank == 1)
    star.control._followers[1].shutdown(2)
    assert rank.wait(10) == ALONE_EXIT_CODE


def test_a_rank_whose_main_thread_is_stuck_leaves_all_the_same_when_told(star: Star) -> None:
    rank = star.follow("stuck")
    star.told(wire.Joined, lambda message: message.rank == 1)
    star.control.dismiss()
    assert rank.wait(10) == ALONE_EXIT_CODE


@pytest.mark.parametrize(
    ("does", "rank", "digest", "reason"),
    [
        ("version", 1, DIGEST, "it runs python 2.7 instead of .*, mlx-lm 0.0.9 instead of .*; install the same"),
        ("steps", 1, "beef", "it was started for another launch"),
        ("steps", 3, DIGEST, "it was started for another launch"),
        ("steps", 0, DIGEST, "it was started for another launch"),
    ],
)
def test_a_rank_that_does_not_belong_is_refused_by_name_and_the_coordinator_hears_it(
    star: Star, does: str, rank: int, digest: str, reason: str
) -> None:
    process = star.follow(does, rank, digest)
    failed = star.told(wire.Failed)
    assert failed.rank == rank
    assert re.search(f"rank 0 refused it: {reason}", failed.message)
    assert re.search(f"rank 0 refused rank {rank}: {reason}", line(process))
    assert process.wait(10) == 5
    assert star.control._followers == {}


def test_a_second_process_for_a_rank_is_refused(star: Star) -> None:
    assert line(star.follow("steps")) == "joined"
    star.told(wire.Joined, lambda message: message.rank == 1)
    assert line(star.follow("steps")) == "rank 0 refused rank 1: there is a rank 1 already"


def test_who_has_another_secret_is_refused_and_cannot_make_the_coordinator_give_up(star: Star) -> None:
    stranger = star.follow("steps", secret="guessed")
    assert line(stranger) == "rank 0 refused rank 1: its secret is not this launch's"
    assert line(star.follow("fails")) == "joined"
    assert star.told(wire.Failed) == wire.Failed(1, "no memory")  # the first that it hears


def test_a_rank_does_not_wait_for_ever_for_a_rank_0_that_is_not_there(star: Star) -> None:
    star.port = free_port()
    began_s = time.monotonic()
    rank = star.follow("steps")
    assert line(rank).startswith(f"rank 0 does not answer at 127.0.0.1:{star.port}: ")
    assert rank.wait(10) == 5
    assert time.monotonic() - began_s >= 1
