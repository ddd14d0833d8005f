"""What the coordinator knows of its ranks from their messages: phases, heartbeats, progress, who is in trouble.

Pure but for the clock, which is handed in. `supervise.py` feeds it and decides.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parallel import wire

PHASES = ("launching", "starting", "joining", "connecting", "loading", "warming", "checking", "ready")
RECENT_BEATS = 10  # over which rates are taken; one comes each second
STALLED = "without an end"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank may take, in seconds, before it counts as lost, and how often it is relaunched.

    `join_s`: from its start to the first sign of life after the Join. `beat_s`: between two signs of life, `connect_s`
    for joining the others, when it gives none. `phase_s`: in one phase of start-up without progress. A step is stuck
    after `late` times what it should take. A rank that fails has `last_words_s` to say why, one that is told to end
    `stop_s`. `look_again_s`: between looks at hosts that are left out.
    """

    join_s: float = 120
    beat_s: float = 8
    connect_s: float = 60
    phase_s: float = 900
    late: float = 20
    look_again_s: float = 20
    last_words_s: float = 1
    stop_s: float = 3
    relaunches: int = 3
    window_s: float = 600


class RelaunchBudget:
    """At most `limit` relaunches in any `window_s` seconds. Pure: time is an argument."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._times: list[float] = []

    def take(self, now: float) -> bool:
        """Count a relaunch at `now`; False when the budget is used up."""
        self._times = [t for t in self._times if now - t < self._window_s]
        if len(self._times) >= self._limit:
            return False
        self._times.append(now)
        return True


@dataclass(slots=True)
class Seen:
    """One rank. Times as the clock gives them; `recent` are (time, busy seconds, output tokens) of the last beats."""

    host: str
    heard: float
    since: float
    phase: str = "launching"
    done: int = 0
    total: int = 0
    beat: wire.Beat | None = None
    versions: dict[str, str] = field(default_factory=dict)
    recent: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_BEATS))

    @property
    def idle_share(self) -> float | None:
        """Of the last seconds, how much this rank waited: for others, or for work."""
        rate = self._rate(1)
        return None if rate is None else min(1.0, max(0.0, 1 - rate))

    @property
    def tokens_per_s(self) -> float | None:
        """Sampled over the last seconds."""
        return self._rate(2)

    def _rate(self, what: int) -> float | None:
        if len(self.recent) < 2 or self.recent[-1][0] <= self.recent[0][0]:
            return None
        first, last = self.recent[0], self.recent[-1]
        return (last[what] - first[what]) / (last[0] - first[0])


class Watch:
    """The ranks on `hosts`, in order. `stall_s` is the least time after which a step counts as stuck."""

    def __init__(
        self, hosts: list[str], limits: Limits, stall_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._stall_s = stall_s
        self._clock = clock
        now = clock()
        self.ranks = [Seen(host, now, now) for host in hosts]
        self.announced: wire.Ready | None = None
        self.hung_up = ""  # whose ssh session ended first

    def heard(self, rank: int, message: wire.Message) -> None:
        """Take a message of `rank`, which is a sign of life whatever it says."""
        now, seen = self._clock(), self.ranks[rank]
        seen.heard = now
        if isinstance(message, wire.Beat):
            seen.beat = message
            seen.recent.append((now, message.stats.busy_s, message.stats.output_tokens))
        elif isinstance(message, wire.Progress):
            if (message.phase, message.done) != (seen.phase, seen.done):
                seen.since = now
            seen.phase, seen.done = message.phase, message.done
            seen.total = message.total or seen.total
            if message.phase == "checking":  # rank 0 says so, and every rank takes part
                for other in self.ranks:
                    other.phase, other.since = "checking", now
        elif isinstance(message, wire.Joined):
            seen.versions = message.versions
        elif isinstance(message, wire.HungUp):
            self.hung_up = self.hung_up or self.of(rank, "its ssh session ended")
        elif isinstance(message, wire.Ready):
            self.announced = message
            for other in self.ranks:
                other.phase, other.since = "ready", now

    def hear_them_first(self) -> None:
        """We were asleep ourselves (a stopped process, a closed lid): nobody is late."""
        for seen in self.ranks:
            seen.heard = seen.since = self._clock()

    def progress(self) -> tuple[str, int, int]:
        """The cluster is as far as its last rank: that phase and, while loading, bytes done and in total."""
        phase = min((seen.phase if seen.phase in PHASES else "ready" for seen in self.ranks), key=PHASES.index)
        if phase != "loading" or not all(seen.total for seen in self.ranks):
            return phase, 0, 0
        done = sum(seen.done if seen.phase == phase else seen.total for seen in self.ranks)
        return phase, done, sum(seen.total for seen in self.ranks)

    def trouble(self) -> str:
        """Which rank is silent, stuck in a step or in a phase of its start, or ""."""
        limits, now = self._limits, self._clock()
        for rank, seen in enumerate(self.ranks):
            beats = seen.beat is not None or self.announced is not None
            allowed_s = limits.connect_s if seen.phase == "connecting" else limits.beat_s if beats else limits.join_s
            if now - seen.heard > allowed_s:
                if now - self.ranks[0].heard > limits.beat_s / 2:
                    rank, seen = 0, self.ranks[0]  # all others are heard through it
                while_ = "" if beats and seen.phase == "ready" else f" while {seen.phase}"
                return self.of(rank, f"it gave no sign of life for {allowed_s:g} s{while_}")
            if seen.phase != "ready" and seen.phase in PHASES and now - seen.since > limits.phase_s:
                return self.of(rank, f"{seen.phase} has taken {limits.phase_s:g} s without progress")
        return self._stall()

    def _stall(self) -> str:
        leader = self.ranks[0].beat
        if leader is None or leader.since_s <= max(self._stall_s, self._limits.late * leader.expected_s):
            return ""
        others = "; ".join(
            f"rank {rank} ({seen.host}) is {seen.beat.phase}" + (f" in step {seen.beat.step}" if seen.beat.step else "")
            for rank, seen in enumerate(self.ranks)
            if rank and seen.beat is not None
        )
        reason = f"its step {leader.step} has run for {leader.since_s:.0f} s {STALLED}"
        return self.of(0, f"{reason}; {others}" if others else reason)

    def of(self, rank: int, reason: str) -> str:
        """`reason` with the rank's number and host before it."""
        return f"rank {rank} on {self.ranks[rank].host}: {reason}"

    def facts(self, rank: int) -> dict[str, Any]:
        """What /health tells of a rank: phase, bytes, shares and rates of the last seconds."""
        seen = self.ranks[rank]
        facts: dict[str, Any] = {"phase": seen.phase}
        if seen.beat is not None:
            facts |= {
                "active_bytes": seen.beat.stats.active_bytes,
                "peak_bytes": seen.beat.stats.peak_bytes,
                "idle_share": None if seen.idle_share is None else round(seen.idle_share, 3),
            }
        if rank == 0 and seen.tokens_per_s is not None:
            facts["tokens_per_s"] = round(seen.tokens_per_s, 1)
        return facts
