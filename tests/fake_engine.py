"""A scripted stand-in for the engine behind EngineClient's methods: no sockets, no model, no clock.

It answers a Submit with the script's tokens through the real Generation, so its semantics are the real ones, and
keeps every message it was sent. `hold` stops it before a given token of every answer until it is released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import msgspec

from cluster.errors import ClusterError, EngineLost
from cluster.serve.engine_client import EngineClient, Generation
from parallel import wire

READY = wire.Ready(
    rank=0,
    pid=1,
    model="tiny",
    context=512,
    slots=4,
    kv_limit_bytes=1 << 20,
    kv_tokens=400,
    weights_bytes=1,
    prefix_reuse="any",
)


class FakeEngine:
    """`script` holds one answer per sample (the last one repeats): token ids, then "stop" or "length"."""

    def __init__(self) -> None:
        self.script: list[tuple[list[int], str]] = [([], "stop")]
        self.submits: list[wire.Submit] = []
        self.aborts: list[wire.Abort] = []
        self.changed = asyncio.Event()  # set at each message it gets
        self.cached = 0
        self.batch = False  # all tokens at once, as if the reader had been slow
        self.fail: tuple[int, ClusterError] | None = None  # (before token number, with)
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._held_at = -1
        self._gate = asyncio.Event()
        self._gate.set()
        self._open: dict[int, Generation] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ what tests set

    def says(self, ids: Sequence[int], finish: str = "stop") -> None:
        """Every sample answers with `ids`."""
        self.script = [(list(ids), finish)]

    def hold(self, at: int) -> None:
        """Stop before token number `at` of each answer (0: still waiting in the queue)."""
        self._held_at = at
        self._gate.clear()

    def release(self) -> None:
        """Go on."""
        self._gate.set()

    async def until(self, condition: str) -> None:
        """Wait until `condition` ("submit", "abort" or "idle") has come true."""
        test = {"submit": lambda: self.submits, "abort": lambda: self.aborts, "idle": lambda: not self._open}[condition]
        while not test():
            self.changed.clear()
            await self.changed.wait()

    # ------------------------------------------------------------ EngineClient's methods

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def submit(self, request: wire.Submit) -> Generation:
        if self.lost.done():
            raise EngineLost(self.lost.result())
        request = msgspec.structs.replace(request, id=len(self.submits) + 1)
        self.submits.append(request)
        generation = self._open[request.id] = Generation(cast(EngineClient, self), request)
        task = asyncio.create_task(self._answer(request, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.changed.set()
        return generation

    def lose(self, reason: str) -> None:
        """The engine is gone."""
        self.lost.set_result(reason)
        for generation in list(self._open.values()):
            generation.push(EngineLost(f"The engine was lost: {reason}."))

    # ------------------------------------------------------------ what Generation calls

    def _send(self, message: wire.Message) -> None:
        assert isinstance(message, wire.Abort)
        self.aborts.append(message)
        self.changed.set()

    def _forget(self, id: int) -> None:
        self._open.pop(id, None)
        self.changed.set()

    # ------------------------------------------------------------ the script

    async def _answer(self, request: wire.Submit, generation: Generation) -> None:
        if self._held_at == 0:
            await self._gate.wait()
        generation.push(wire.Started(request.id, self.cached))
        samples = [self.script[min(i, len(self.script) - 1)] for i in range(request.n)]
        for position in range(max(len(ids) for ids, _ in samples) + 1):
            if position and position == self._held_at:
                await self._gate.wait()
            if self.fail is not None and self.fail[0] == position:
                generation.push(self.fail[1])
                return
            for index, (ids, finish) in enumerate(samples):
                if (token := self._token(request, index, position, ids, finish)) is not None:
                    generation.push(token)
            if not self.batch:
                await asyncio.sleep(0)
                await asyncio.sleep(0)

    def _token(self, request: wire.Submit, index: int, position: int, ids: list[int], finish: str) -> wire.Token | None:
        limit = min(request.max_tokens, len(ids))
        ended = position == request.max_tokens - 1 or (finish == "length" and position == len(ids) - 1)
        if position < limit:
            id, end = ids[position], "length" if ended else ""
        elif position == len(ids) and finish == "stop" and len(ids) < request.max_tokens:
            id, end = request.stop_ids[0], "stop"
        else:
            return None
        count = request.sampling.logprobs
        top = None if count < 0 else [(id, -0.5), *((i, -1.0 - i) for i in range(count))]
        return wire.Token(request.id, index, id, end, top)
