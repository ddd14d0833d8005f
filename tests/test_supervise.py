"""The supervisor against real child processes that play a rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.errors import ClusterError, EngineLost, RankFailed
from cluster.paths import Folders
from cluster.state import Claim
from cluster.supervision.supervise import Supervisor
from cluster.supervision.watch import Limits, RelaunchBudget, Watch
from parallel import wire

FAKE_RANK = str(Path(__file__).with_name("fake_rank.py"))
QUICK = Limits(join_s=20, beat_s=1, stop_s=1)


@dataclass
class Resolved:
    name: str
    folder: Path


def resolve(model: str | None, *, cache: Path, progress: Callable[[str, int, int], None]) -> Any:
    progress("fetching", 5, 10)
    return Resolved("tiny", cache)


class Life:
    """A supervisor that runs as a task, and the phases that it went through."""

    def __init__(self, home: Path, *modes: str, limits: Limits = QUICK, **options: Any) -> None:
        self.folders = Folders.from_environment({"CLUSTER_HOME": str(home)})
        claim = Claim.take(self.folders)
        assert claim is not None
        self.claim = claim
        claim.new_secret()
        self.phases: list[str] = []
        self._ended = False
        options = {"resolve": resolve, "load_chat": lambda folder: SimpleNamespace(takes=["chat"])} | options
        self.supervisor = Supervisor(
            ClusterConfig(),
            self.folders,
            rank_command=(sys.executable, FAKE_RANK, *modes),
            on_change=self._note,
            limits=limits,
            **options,
        )
        self._event = asyncio.Event()
        self.task = asyncio.create_task(self.supervisor.run())

    def _note(self) -> None:
        if not self.phases or self.phases[-1] != self.supervisor.phase:
            self.phases.append(self.supervisor.phase)
        self._event.set()

    async def until(self, phase: str, after: int = 0) -> None:
        """Wait until `phase` was entered, not counting the first `after` phases."""
        while phase not in self.phases[after:]:
            self._event.clear()
            waiting = asyncio.create_task(self._event.wait())
            await asyncio.wait({waiting, self.task}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if self.task.done():
                self.task.result()
            assert self._event.is_set(), self.phases

    @property
    def pid(self) -> int:
        return self.supervisor.ranks[0].process.pid

    async def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.claim.release()


@pytest.fixture
async def live(cluster_home: Path) -> AsyncIterator[Callable[..., Life]]:
    lives: list[Life] = []

    def start(*modes: str, **options: Any) -> Life:
        lives.append(Life(cluster_home, *modes, **options))
        return lives[-1]

    yield start
    for life in lives:
        await life.end()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_start_passes_its_phases_in_order_and_ends_ready(live):
    life = live()
    await life.until("ready")
    assert life.phases == ["resolving", "launching", "loading", "warming", "ready"]
    assert life.supervisor.model == "tiny"
    assert life.supervisor.ready.context == 4096
    assert life.supervisor.health()["status"] == "ready"


async def test_a_request_reaches_the_rank_and_its_tokens_come_back(live):
    life = live()
    await life.until("ready")
    events = [event async for event in life.supervisor.engine.submit(wire.Submit(0, [1, 2], 3))]
    assert [event.token for event in events[1:]] == [10, 11, 12]


async def test_the_age_of_the_last_token_is_known_once_tokens_were_made(live):
    life = live()
    await life.until("ready")
    await life.supervisor.engine.submit(wire.Submit(0, [1], 3)).__aiter__().__anext__()
    while life.supervisor.health()["last_token_age_s"] is None:
        await asyncio.sleep(0.01)
    assert life.supervisor.health()["last_token_age_s"] >= 0


async def test_cancelling_the_life_leaves_no_process(live):
    life = live()
    await life.until("ready")
    pid = life.pid
    await life.end()
    assert gone(pid)
    assert life.supervisor.ranks == []


async def test_a_rank_that_ignores_sigterm_is_killed(live):
    life = live("--deaf")
    await life.until("ready")
    pid = life.pid
    await life.end()
    assert gone(pid)


@pytest.mark.parametrize("phase", ["launching", "loading"])
async def test_cancelling_before_it_is_ready_leaves_no_process(live, tmp_path, phase):
    life = live("--slow", str(tmp_path / "never"))
    await life.until(phase)
    await life.end()
    assert life.supervisor.ranks == []
    assert life.supervisor._processes is None


async def test_a_killed_rank_fails_open_requests_and_is_relaunched(live, tmp_path):
    life = live("--die-once", str(tmp_path / "died"))
    await life.until("ready")
    first = life.pid
    with pytest.raises(EngineLost):
        async for _ in life.supervisor.engine.submit(wire.Submit(0, [1], 3)):
            pass
    await life.until("ready", after=5)
    assert life.phases[5:7] == ["lost", "relaunching"]
    assert life.pid != first
    assert life.supervisor.health()["restarts"] == 1
    events = [event async for event in life.supervisor.engine.submit(wire.Submit(0, [1], 3))]
    assert len(events) == 4


async def test_the_reason_tells_which_signal_ended_the_rank(live):
    life = live()
    await life.until("ready")
    os.kill(life.pid, signal.SIGKILL)
    await life.until("lost")
    assert life.supervisor.reason == "rank 0 on this machine: its process was ended by SIGKILL"
    assert life.supervisor.ready is None or life.supervisor.phase == "lost"


async def test_a_rank_that_stops_beating_is_relaunched(live):
    life = live("--silent")
    await life.until("lost")
    assert "no sign of life for 1 s" in life.supervisor.reason


async def test_a_stopped_process_is_found_and_killed(live):
    life = live()
    await life.until("ready")
    pid = life.pid
    os.kill(pid, signal.SIGSTOP)
    await life.until("relaunching", after=5)
    assert gone(pid)


async def test_a_step_without_an_end_counts_as_lost_although_the_rank_beats(live):
    life = live("--stuck")
    await life.until("lost")
    assert life.supervisor.reason.endswith("its step 3 has run for 1000 s without an end")


async def test_after_three_relaunches_it_is_failed_and_says_why(live):
    life = live("--stuck")
    await life.until("failed")
    assert life.phases.count("relaunching") == 3
    health = life.supervisor.health()
    assert health["status"] == "failed"
    assert "relaunched 3 times in 10 minutes" in health["reason"]
    assert life.supervisor.engine is None
    assert not life.task.done()


async def test_a_rank_that_dies_while_loading_ends_the_start_with_its_last_words(live):
    life = live("--crash-loading")
    with pytest.raises(
        RankFailed, match="failed while loading: rank 0 on this machine: its process ended with exit code 7"
    ) as failure:
        await life.task
    assert "no weights here" in failure.value.message


async def test_a_rank_that_reports_a_failure_ends_the_start_with_its_message(live):
    life = live("--broken")
    with pytest.raises(RankFailed, match="needs 9 GB and there are 4 GB"):
        await life.task


async def test_a_rank_that_refuses_the_join_ends_the_start(live):
    life = live("--refuse")
    with pytest.raises(RankFailed, match=r"wrong secret|exit code"):
        await life.task


async def test_a_rank_that_never_listens_ends_the_start_after_its_bound(live):
    life = live("--never-listens", limits=Limits(join_s=1, beat_s=1, stop_s=1))
    with pytest.raises(RankFailed, match="no sign of life for 1 s while launching"):
        await life.task


async def test_a_model_that_cannot_be_resolved_ends_the_start_with_its_own_error(live):
    def no_model(model: str | None, **_: Any) -> Any:
        raise ClusterError("no such model")

    life = live(resolve=no_model)
    with pytest.raises(ClusterError, match="no such model"):
        await life.task


async def test_a_tokenizer_that_cannot_be_loaded_ends_the_start_with_its_own_error(live):
    def no_tokenizer(folder: Path) -> Any:
        raise ClusterError("tokenizer.json is missing")

    life = live(load_chat=no_tokenizer)
    with pytest.raises(ClusterError, match=r"tokenizer.json is missing"):
        await life.task
    assert life.supervisor.ranks == []


async def test_it_is_not_ready_before_the_tokenizer_is(live):
    import threading

    release = threading.Event()
    life = live(load_chat=lambda folder: release.wait(30))
    await life.until("warming")
    while life.supervisor._watch.announced is None:
        await asyncio.sleep(0.01)
    assert life.supervisor.phase == "warming"
    release.set()
    await life.until("ready")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
async def test_a_full_disk_for_logs_is_told_and_the_rank_runs_on(live):
    life = live()
    await life.until("ready")
    log = life.supervisor._processes.log
    with contextlib.closing(open("/dev/full", "wb", buffering=0)) as full:
        kept, log._file = log._file, full
        log.write(b"one line\n")
        log._file = kept
    assert "No space left on device" in life.supervisor.health()["warnings"][0]
    assert log.last_lines(1) == ["one line"]
    assert life.supervisor.phase == "ready"


def test_the_budget_counts_only_the_last_ten_minutes():
    budget = RelaunchBudget(3, 600)
    assert [budget.take(t) for t in (0, 10, 20, 30, 599, 601, 602)] == [True, True, True, False, False, True, False]


def test_a_rank_that_ended_by_itself_is_named_before_the_sessions_that_ended_after_it():
    watch = Watch(["a", "b", "c"], QUICK, 10.0)
    watch.heard(1, wire.HungUp(1))
    supervisor: Any = SimpleNamespace(_watch=watch, model="tiny")
    exits = {0: "was ended by SIGTERM", 2: "ended with exit code 1"}
    told = Supervisor._with_exit(supervisor, watch.hung_up, exits)
    assert told == "rank 2 on c: its process ended with exit code 1"
    assert Supervisor._with_exit(supervisor, watch.hung_up, {}) == "rank 1 on b: its ssh session ended"
