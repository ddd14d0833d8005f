"""The one loop: the same for one rank and for many. Rank 0 decides steps, every rank executes them in order.

Its executor is handed in, so it imports no mlx and runs in tests with a stand-in. Who feeds it with messages, and where
its messages go, is `rank.py`'s business.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from parallel import wire
from parallel.engine.scheduler import Scheduler
from parallel.engine.sequence import StepResult


class Executes(Protocol):
    """What the loop needs of an executor."""

    def prepare(self, step: wire.Step) -> None:
        """Get ready to begin `step` next, without starting anything."""

    def begin(self, step: wire.Step) -> None:
        """Start `step`; must not block on its result."""

    def finish(self, step: wire.Step) -> StepResult:
        """Wait for the oldest begun step and give its result; never raises for a failed step."""

    @property
    def busy_s(self) -> float:
        """How long it has worked on steps so far, in seconds."""


class Engine:
    """Rank 0's side of the loop: `add` and `abort`, then `step` as long as it is not `idle`.

    At most `depth` steps are in flight; `send` hands each new step to the other ranks before anything blocks, since a
    pipeline of three stages and more starves otherwise. At most `ahead` of them are begun here: the last stage of a
    pipeline waits for data when it begins a step, so it finishes one before it begins the next.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executes,
        *,
        depth: int = 2,
        ahead: int = 2,
        send: Callable[[wire.Step], None] = lambda step: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._ahead = ahead
        self._send = send
        self._clock = clock
        self._unbegun: deque[wire.Step] = deque()
        self._begun: deque[tuple[wire.Step, float]] = deque()
        self._last_finish_s = 0.0

    @property
    def idle(self) -> bool:
        """Whether `step` would have nothing to do."""
        return self._scheduler.idle

    @property
    def oldest(self) -> tuple[int, float, float]:
        """The oldest unfinished step, when it was begun, and how long it should take; zeros when there is none.

        Any thread may ask.
        """
        try:
            step, since_s = self._begun[0]
        except IndexError:
            return 0, 0.0, 0.0
        return step.id, since_s, self._scheduler.expected_s(step)

    def add(self, request: wire.Submit) -> None:
        """Queue a request; it takes part from the next step on."""
        self._scheduler.add(request, self._clock())

    def abort(self, abort: wire.Abort) -> None:
        """End a request or one of its samples at the next step."""
        self._scheduler.abort(abort)

    def abort_all(self) -> None:
        """End every request: whoever asked is gone."""
        self._scheduler.abort_all()

    def events(self) -> list[wire.Started | wire.RequestFailed]:
        """What happened outside of steps since it was last told: a request that was refused at once."""
        return self._scheduler.take_events()

    def stats(self) -> wire.Stats:
        """The scheduler's counts and sizes."""
        return msgspec.structs.replace(self._scheduler.stats(), busy_s=self._executor.busy_s)

    def clear_prefixes(self) -> None:
        """Forget every prefix entry at the next step."""
        self._scheduler.clear_prefixes()

    def step(self) -> list[wire.Message]:
        """Once round the loop: send and begin what may be in flight, finish the oldest step, say what happened."""
        while self._scheduler.inflight < self._depth and (step := self._scheduler.next_step()) is not None:
            self._send(step)
            self._unbegun.append(step)
        while self._unbegun and len(self._begun) < self._ahead:
            step = self._unbegun.popleft()
            self._begun.append((step, self._clock()))
            self._executor.begin(step)
        messages: list[wire.Message] = list(self._scheduler.take_events())
        if self._begun:
            if self._unbegun:
                self._executor.prepare(self._unbegun[0])
            step, begun_s = self._begun[0]
            result = self._executor.finish(step)
            self._begun.popleft()
            now_s = self._clock()
            duration_s = now_s - max(begun_s, self._last_finish_s)
            self._last_finish_s = now_s
            tokens = self._scheduler.apply(result, duration_s)
            if tokens:
                messages.append(wire.Tokens(step.id, tokens))
        messages += self._scheduler.take_events()
        return messages
