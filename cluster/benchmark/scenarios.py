"""What `cluster bench --url` does to a server and the figures it makes of the answers.

Three scenarios: a batch of requests; short requests beside running streams; a long prompt beside running streams.
Requests are made by `load.py`; flags, ratios and printing are `bench.py`'s.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.benchmark.load import Answer, Ask, Exchange, Server, complete, start

WORDS = """
water stone river light house garden window morning evening summer winter mountain road city train paper music
voice hand door table bread fire wind rain snow forest field bird horse ship sea island market school story letter
answer question number color green black white small large young old long short early late north south
"""
TASK = (
    "Using the notes above, write a very long and detailed story in many chapters. Describe every place and person at "
    "length, never summarise, and keep writing without an ending."
)
STREAM_TOKENS = 1000  # of a background stream: more than a measurement lasts; one that ends early is replaced


# ---------------------------------------------------------------- prompts


@dataclass(slots=True)
class Prompts:
    """Texts that are the same for the same seed and number, and begin differently, so that no prefix cache helps.

    `overhead` and `per_word` turn wanted tokens into words; `measure` learns them from a server's own counts.
    """

    seed: int
    overhead: float = 0.0
    per_word: float = 1.0

    def text(self, number: int, tokens: int) -> str:
        """Prompt `number`, close to `tokens` tokens long once `measure` ran (never shorter than the task itself)."""
        return self._text(number, max(8, round((tokens - self.overhead) / self.per_word)))

    async def measure(self, server: Server, timeout_s: float) -> Answer:
        """Ask twice with known numbers of words; returns the last answer, which tells whether the server works."""
        counts = []
        for words in (20, 120):
            answer = await complete(server, Ask(self._text(-words, words), 4), timeout_s)
            if answer.error:
                return answer
            counts.append(answer.prompt_tokens)
        if counts[1] > counts[0] > 0:
            self.per_word = (counts[1] - counts[0]) / 100
            self.overhead = counts[0] - 20 * self.per_word
        return answer

    def _text(self, number: int, words: int) -> str:
        draw = random.Random(f"{self.seed}/{number}")
        notes = " ".join(draw.choices(WORDS.split(), k=words))
        return f"{notes}.\n{TASK}"


# ---------------------------------------------------------------- figures


def percentile(values: list[float], percent: float) -> float:
    """Linear interpolation between the two nearest values; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of requests against one server, summed up. Times in seconds, tokens of whole answers only.

    `gap_max_s` is the longest pause of any stream; in the long-prompt scenario only pauses that touch the time in
    which the long prompt was at work count. `counted` says where the numbers of tokens come from.
    """

    url: str
    round: int
    concurrency: int
    requests: int
    errors: dict[str, int]
    error_detail: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    counted: str  # "usage" or "chunks"
    wall_s: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float


def summarise(
    url: str, round: int, concurrency: int, answers: list[Answer], wall_s: float, gaps_s: list[float] | None = None
) -> Run:
    """Figures of `answers`, which took `wall_s` together; `gaps_s` replaces the answers' own inter-token times."""
    whole = [a for a in answers if not a.error]
    failed = [a for a in answers if a.error]
    ttft = [a.ttft_s for a in whole if a.chunks]
    gaps = [gap for a in whole for gap in a.gaps_s] if gaps_s is None else gaps_s
    tokens = sum(a.tokens for a in whole)
    return Run(
        url=url,
        round=round,
        concurrency=concurrency,
        requests=len(answers),
        errors={kind: sum(a.error == kind for a in failed) for kind in sorted({a.error for a in failed})},
        error_detail=failed[0].detail if failed else "",
        tokens=tokens,
        prompt_tokens=sum(a.prompt_tokens for a in whole),
        cached_tokens=sum(a.cached_tokens for a in whole),
        counted="chunks" if any(a.usage_tokens is None for a in whole) else "usage",
        wall_s=wall_s,
        tokens_per_s=tokens / wall_s if wall_s > 0 else 0.0,
        ttft_p50_s=percentile(ttft, 50),
        ttft_p99_s=percentile(ttft, 99),
        gap_p50_s=percentile(gaps, 50),
        gap_p99_s=percentile(gaps, 99),
        gap_max_s=max(gaps, default=0.0),
    )


# ---------------------------------------------------------------- scenarios


@dataclass(frozen=True, slots=True)
class Load:
    """What every scenario shares. `prompt_tokens` and `long_prompt_tokens` are aimed at, `max_tokens` is per answer."""

    prompts: Prompts
    max_tokens: int = 64
    temperature: float = 0.0
    prompt_tokens: int = 0
    long_prompt_tokens: int = 3000
    timeout_s: float = 600.0

    def ask(self, number: int, *, max_tokens: int = 0, prompt_tokens: int = 0) -> Ask:
        """Request `number` of this load."""
        text = self.prompts.text(number, prompt_tokens or self.prompt_tokens)
        return Ask(text, max_tokens or self.max_tokens, self.temperature)


async def run_batch(
    load: Load, server: Server, *, round: int, first: int, concurrency: int, requests: int, max_tokens: int = 0
) -> Run:
    """`requests` requests, `concurrency` of them at any time, over one wall-clock time."""
    numbers = iter(range(first, first + requests))
    answers: list[Answer] = []

    async def client() -> None:
        for number in numbers:
            answers.append(await complete(server, load.ask(number, max_tokens=max_tokens), load.timeout_s))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(min(concurrency, requests))))
    return summarise(server.url, round, concurrency, answers, time.perf_counter() - began)


class Streams:
    """Answers that are kept running in the background; one that ends is replaced by a new one."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Inter-token times that overlap the window, the pause still open at its end included."""
        gaps = []
        for exchange in self.exchanges:
            times = exchange.answer.chunks
            if times and not exchange.done.done() and times[-1] < end_s:
                times = [*times, end_s]
            gaps += [b - a for a, b in itertools.pairwise(times) if b > begin_s and a < end_s]
        return gaps

    @property
    def failures(self) -> list[Answer]:
        """Streams that ended by an error; they must show up in the result."""
        return [e.answer for e in self.exchanges if e.done.done() and e.answer.error]


@asynccontextmanager
async def running(load: Load, server: Server, numbers: Iterator[int], count: int) -> AsyncIterator[Streams]:
    """`count` Streams, all past their first token; they are cut off at the end and the server is left idle."""
    streams = Streams()
    started = [asyncio.Event() for _ in range(count)]

    async def keep(has_started: asyncio.Event) -> None:
        failed = False
        while not failed:
            exchange = await start(server, load.ask(next(numbers), max_tokens=STREAM_TOKENS), load.timeout_s)
            streams.exchanges.append(exchange)
            try:
                await asyncio.wait([exchange.first], timeout=load.timeout_s)
                has_started.set()
                await asyncio.wait([exchange.done], timeout=load.timeout_s)
                exchange.end("timeout", f"a stream did not end within {load.timeout_s:g} s")
                failed = bool(exchange.answer.error)
            finally:
                exchange.end()  # cancelled: cut it off, which is no error

    tasks = [asyncio.create_task(keep(event)) for event in started]
    try:
        await asyncio.gather(*(event.wait() for event in started))
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A server notices a lost client at its next write; two short answers later the cut streams are gone.
        for _ in range(2):
            await complete(server, load.ask(next(numbers), max_tokens=1), load.timeout_s)


async def run_ttft(load: Load, server: Server, *, round: int, first: int, streams: int, requests: int) -> Run:
    """While `streams` answers run, `requests` short requests arrive one after the other; the figures are of these."""
    numbers = itertools.count(first)
    async with running(load, server, numbers, streams) as background:
        began = time.perf_counter()
        answers = [
            await complete(server, load.ask(next(numbers), max_tokens=8), load.timeout_s) for _ in range(requests)
        ]
        ended = time.perf_counter()
        gaps, failures = background.gaps_s(began, ended), background.failures
    return summarise(server.url, round, streams, answers + failures, ended - began, gaps)


async def run_long_prompt(load: Load, server: Server, *, round: int, first: int, streams: int) -> Run:
    """While `streams` answers run, one long prompt arrives; gaps are of the running streams, TTFT of the long one."""
    numbers = itertools.count(first)
    async with running(load, server, numbers, streams) as background:
        began = time.perf_counter()
        ask = load.ask(next(numbers), max_tokens=8, prompt_tokens=load.long_prompt_tokens)
        answer = await complete(server, ask, load.timeout_s)
        ended = time.perf_counter()
        gaps, failures = background.gaps_s(began, ended), background.failures
    return summarise(server.url, round, streams, [answer, *failures], ended - began, gaps)


# ---------------------------------------------------------------- in turn

Scenario = Callable[[Server, int, int], Awaitable[Run]]


async def in_turn(
    scenario: Scenario, servers: list[Server], rounds: int, first: int, on_run: Callable[[Run], None]
) -> list[Run]:
    """`rounds` times every server once, in turn (A B A B ...); the servers of a round get the same prompts.

    `scenario(server, round, first)` makes one run from prompt number `first`; rounds never share a prompt, so that no
    round finds its prompts cached.
    """
    runs = []
    for round in range(rounds):
        for server in servers:
            runs.append(await scenario(server, round, first + round * 10_000))
            on_run(runs[-1])
    return runs
