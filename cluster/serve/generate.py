"""One client request inside the engine, whatever dialect it came in: submit it, gather its answers, end it.

`TextRequest` is what every dialect (`openai.py`; others later) turns its bodies into. `Run` is that request while it
is open: it feeds the Answers and says when there is news. Knows nothing of HTTP or JSON.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from cluster.errors import BadRequest, ClusterError, QueueFull, StepFailed
from cluster.serve.answer import Answer, ToolUse
from cluster.serve.chat import ChatModel, Prompt
from cluster.serve.engine_client import Generation
from cluster.serve.text import Needles
from parallel import wire

logger = logging.getLogger("cluster.generate")


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A validated request. `max_tokens` None: the room that is left. `is_chat`: markers and tools are looked for."""

    prompts: list[Prompt]
    sampling: wire.Sampling
    stop_ids: list[int]
    max_tokens: int | None = None
    n: int = 1
    stops: list[str] = field(default_factory=list)
    tool_use: ToolUse | None = None
    is_chat: bool = True


class Engine(Protocol):
    """What is needed of `engine_client.EngineClient`."""

    @property
    def open_requests(self) -> int: ...

    def submit(self, request: wire.Submit) -> Generation: ...


@dataclass(slots=True)
class Timing:
    """Monotonic seconds at which things happened; 0 for not yet."""

    begin_s: float
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    end_s: float = 0.0


class Observer(Protocol):
    """Told of a run's events as they happen (`metrics.py`)."""

    def tokens_came(self, run: Run, gap_s: float, first: bool) -> None: ...


class Run:
    """An open request. Await `news`, then read `answers`; `done` when no more will come, `error` when it failed.

    Choices are numbered prompt by prompt: choice p * n + i is sample i of prompt p. Always call `cancel` at the end
    (it costs nothing when the request has ended).
    """

    def __init__(
        self,
        engine: Engine,
        ready: wire.Ready,
        chat: ChatModel,
        request: TextRequest,
        queue_limit: int,
        observer: Observer,
    ) -> None:
        """Submit it. Raises BadRequest when it can never fit, QueueFull, EngineLost."""
        self.request = request
        limits = [token_limit(ready, len(prompt.ids), request.max_tokens) for prompt in request.prompts]
        check_queue(engine, ready, queue_limit, len(request.prompts))
        self.timing = Timing(time.monotonic())
        self.cached_tokens = 0
        self.error: ClusterError | None = None
        self.cancelled = False
        self._observer = observer
        self._wake = asyncio.Event()
        self._fresh: dict[int, Answer] = {}
        self.answers = [answer for prompt in request.prompts for answer in _answers(chat, request, prompt)]
        self._generations: list[Generation] = []
        try:
            for prompt, limit in zip(request.prompts, limits, strict=True):
                submit = wire.Submit(0, prompt.ids, limit, request.n, request.sampling, request.stop_ids)
                self._generations.append(engine.submit(submit))
        except ClusterError:
            self._cancel_generations()
            raise
        self._open = len(self._generations)
        self._tasks = [
            asyncio.create_task(self._pump(generation, i * request.n), name=f"request-{generation.id}")
            for i, generation in enumerate(self._generations)
        ]

    @property
    def done(self) -> bool:
        """No more will come: all answers have ended, or it failed, or was cancelled."""
        return not self._open or self.error is not None or self.cancelled

    @property
    def settled(self) -> bool:
        """Done, and all news has been read."""
        return self.done and not self._fresh

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.request.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    async def news(self, timeout_s: float | None = None) -> bool:
        """Wait until there is something new in an answer, or the run is done. False when `timeout_s` passed first."""
        if timeout_s is None:
            await self._wake.wait()
        else:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, self._wake.set)
            await self._wake.wait()
            timer.cancel()
        self._wake.clear()
        return bool(self._fresh) or self.done

    def fresh(self) -> Iterator[tuple[int, Answer]]:
        """The choices with news since the last call."""
        fresh, self._fresh = self._fresh, {}
        yield from sorted(fresh.items())

    async def finish(self) -> None:
        """Wait for all answers to be whole. Raises the ClusterError that the request failed with."""
        while not self.done:
            await self.news()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Free what the request still holds in the engine, at its next step."""
        self.cancelled = self.cancelled or not self.done
        self._cancel_generations()
        for task in self._tasks:
            task.cancel()
        self.timing.end_s = self.timing.end_s or time.monotonic()
        self._wake.set()

    def _cancel_generations(self) -> None:
        for generation in self._generations:
            generation.cancel()

    async def _pump(self, generation: Generation, first_choice: int) -> None:
        """Feed the answers. Tokens that wait in the generation's queue pass without a pause, so a reader that is
        woken once finds them all."""
        try:
            async for event in generation:
                if isinstance(event, wire.Started):
                    self.cached_tokens += event.cached
                    continue
                choice = first_choice + event.index
                answer = self.answers[choice]
                if answer.feed(event):
                    generation.stop(event.index, answer.tokens)
                self._token_came()
                if answer.has_news:
                    self._fresh[choice] = answer
                    self._wake.set()
        except ClusterError as error:
            self._fail(error)
        except Exception as error:  # a bug of ours costs this request, with a traceback in the log, and no other
            logger.exception("reading an answer failed")
            self._fail(StepFailed(f"The answer could not be read: {type(error).__name__}."))
        finally:
            self._open -= 1
            self._wake.set()

    def _fail(self, error: ClusterError) -> None:
        if self.error is None:
            self.error = error
        self._cancel_generations()

    def _token_came(self) -> None:
        now = time.monotonic()
        timing = self.timing
        first = not timing.first_token_s
        if first:
            timing.first_token_s = now
        self._observer.tokens_came(self, now - (timing.begin_s if first else timing.last_token_s), first)
        timing.last_token_s = now


def _answers(chat: ChatModel, request: TextRequest, prompt: Prompt) -> list[Answer]:
    vocabulary = chat.vocabulary
    if request.tool_use:  # call formats are full of control tokens
        keep = vocabulary.special
    else:
        markers = (chat.markers.think_start, chat.markers.think_end, *chat.markers.silent) if request.is_chat else ()
        keep = vocabulary.ids_within((*request.stops, *markers))
    stops = Needles(request.stops)
    return [
        Answer(
            vocabulary.decoder(keep, strip=request.is_chat),
            stops,
            markers=chat.markers if request.is_chat else None,
            tool_use=request.tool_use,
            reasoning=prompt.reasoning,
            logprobs=request.sampling.logprobs >= 0,
        )
        for _ in range(request.n)
    ]


def most_tokens(ready: wire.Ready) -> int:
    """How many tokens a prompt and its answer may have together."""
    return min(ready.context, ready.kv_tokens)


def token_limit(ready: wire.Ready, prompt_tokens: int, wanted: int | None) -> int:
    """How many tokens the request may produce. Raises BadRequest when its prompt leaves no room."""
    if not prompt_tokens:
        raise BadRequest("The prompt is empty.", param="prompt")
    room = most_tokens(ready) - prompt_tokens
    if room < 1:
        limit, what = (
            (ready.context, "the context") if ready.context <= ready.kv_tokens else (ready.kv_tokens, "the KV memory")
        )
        raise BadRequest(
            f"The prompt has {prompt_tokens} tokens, but {what} holds {limit} and the answer needs at least one.",
            code="context_length_exceeded",
            hint="Shorten the prompt, or start the server with a larger --context.",
        )
    return room if wanted is None else min(wanted, room)


def check_queue(engine: Engine, ready: wire.Ready, queue_limit: int, requests: int = 1) -> None:
    """Raises QueueFull when the engine's slots and the queue behind them have no place for `requests` more."""
    places = ready.slots + queue_limit
    if requests > places:
        raise BadRequest(f"The request has {requests} prompts; slots and queue hold {places}.", param="prompt")
    if engine.open_requests + requests > places:
        raise QueueFull(f"{engine.open_requests} requests are open and the queue holds {queue_limit} beyond the slots.")
