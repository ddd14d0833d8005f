from __future__ import annotations

import asyncio
import itertools

import pytest
from sse_server import Request, SseServer, answer_fully, serving, usage_of

from cluster.benchmark.load import Answer, Server
from cluster.benchmark.scenarios import (
    STREAM_TOKENS,
    Load,
    Prompts,
    Run,
    Streams,
    in_turn,
    percentile,
    run_batch,
    run_long_prompt,
    run_ttft,
    running,
    summarise,
)

LOAD = Load(Prompts(seed=1), max_tokens=4, timeout_s=20.0)


def answer(sent_s: float, chunks: list[float], **fields: object) -> Answer:
    return Answer(sent_s=sent_s, ended_s=chunks[-1] if chunks else sent_s, chunks=chunks, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.5), (99, 3.97), (100, 4.0)])
def test_a_percentile_lies_between_its_two_nearest_values(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(expected)


def test_a_percentile_of_nothing_is_zero() -> None:
    assert percentile([], 99) == 0.0


def test_prompts_are_the_same_for_the_same_seed_and_differ_from_their_first_words_on() -> None:
    one, again, other = Prompts(7), Prompts(7), Prompts(8)
    texts = [one.text(number, 50) for number in range(200)]
    assert texts == [again.text(number, 50) for number in range(200)]
    assert texts[0] != other.text(0, 50)
    assert len({" ".join(text.split()[:5]) for text in texts}) == 200


async def test_prompts_learn_how_many_tokens_a_server_counts_for_a_word() -> None:
    prompts = Prompts(seed=3)
    async with serving(answer_fully) as server:
        first = await prompts.measure(Server(server.url), 20.0)
        asked = await run_batch(
            Load(prompts, 2, prompt_tokens=400), Server(server.url), round=0, first=0, concurrency=1, requests=1
        )
    assert first.error == ""
    assert prompts.per_word == pytest.approx(3.0)
    assert asked.prompt_tokens == pytest.approx(400, abs=3)


def test_only_whole_answers_count_and_errors_are_told_by_kind() -> None:
    run = summarise(
        "u",
        0,
        4,
        [
            answer(0.0, [1.0, 2.0, 5.0], usage_tokens=4, prompt_tokens=10, cached_tokens=1),
            answer(0.0, [3.0, 4.0], usage_tokens=2, prompt_tokens=10),
            answer(0.0, [1.0], usage_tokens=None, error="reset", detail="cut"),
            answer(0.0, [], error="429"),
            answer(0.0, [], error="429"),
        ],
        wall_s=2.0,
    )
    assert (run.tokens, run.tokens_per_s, run.counted) == (6, 3.0, "usage")
    assert (run.requests, run.errors, run.error_detail) == (5, {"429": 2, "reset": 1}, "cut")
    assert (run.ttft_p50_s, run.gap_p50_s, run.gap_max_s) == (2.0, 1.0, 3.0)
    assert (run.prompt_tokens, run.cached_tokens) == (20, 1)


def test_one_answer_without_usage_makes_the_counts_chunks() -> None:
    run = summarise("u", 0, 1, [answer(0.0, [1.0], usage_tokens=1), answer(0.0, [1.0])], wall_s=1.0)
    assert (run.counted, run.tokens) == ("chunks", 2)


async def test_a_batch_keeps_its_concurrency_and_asks_every_prompt_once() -> None:
    three_are_open = asyncio.Event()

    async def reply(request: Request) -> None:
        if server.open == 3:
            three_are_open.set()
        await three_are_open.wait()
        await answer_fully(request)

    async with serving(reply) as server:
        run = await run_batch(LOAD, Server(server.url), round=2, first=5, concurrency=3, requests=7)
    assert (run.requests, run.tokens, run.errors, run.round) == (7, 28, {}, 2)
    assert server.most_open == 3
    assert sorted(r.prompt for r in server.requests) == sorted(LOAD.prompts.text(n, 0) for n in range(5, 12))


class Endless:
    """Streams go on until they are cut off; short requests are answered in full while all streams run."""

    def __init__(self) -> None:
        self.running = 0
        self.running_at_requests: list[int] = []
        self.server: SseServer | None = None

    async def __call__(self, request: Request) -> None:
        if request.body["max_tokens"] != STREAM_TOKENS:
            self.running_at_requests.append(self.running)
            await answer_fully(request)
            return
        await request.head()
        await request.text()
        self.running += 1
        try:
            await request.reader.read()  # until the client has gone
        finally:
            self.running -= 1


async def test_short_requests_are_measured_one_by_one_while_the_streams_run() -> None:
    endless = Endless()
    async with serving(endless) as server:
        run = await run_ttft(LOAD, Server(server.url), round=0, first=0, streams=3, requests=4)
    assert endless.running_at_requests[:4] == [3, 3, 3, 3]
    assert (run.concurrency, run.requests, run.errors, run.tokens) == (3, 4, {}, 32)
    assert server.most_open == 4


async def test_the_long_prompt_is_long_and_the_gaps_are_of_the_streams() -> None:
    endless = Endless()
    async with serving(endless) as server:
        run = await run_long_prompt(LOAD, Server(server.url), round=0, first=0, streams=2)
    long = max(server.requests, key=lambda request: len(request.prompt))
    assert len(long.prompt.split()) >= LOAD.long_prompt_tokens
    assert (run.requests, run.tokens) == (1, 8)
    assert run.gap_max_s >= run.wall_s  # the silent streams' pause is still open when the long answer ends


async def test_a_stream_that_ends_is_replaced_by_one_with_another_prompt() -> None:
    third = asyncio.Event()

    async def reply(request: Request) -> None:
        if len(server.requests) == 3:
            third.set()
        await request.head()
        await request.text()
        if len(server.requests) >= 3:
            await request.reader.read()
        await request.end(usage_of(request))

    async with serving(reply) as server:
        async with running(LOAD, Server(server.url), itertools.count(), 1) as streams:
            await asyncio.wait_for(third.wait(), 20)
            # the settling requests at the end must be answered
            server.reply = answer_fully
        assert streams.failures == []
    prompts = [request.prompt for request in server.requests]
    assert len(set(prompts)) == len(prompts) == 5


async def test_a_stream_that_fails_shows_up_in_the_result() -> None:
    async def reply(request: Request) -> None:
        await request.head()
        if request.body["max_tokens"] == STREAM_TOKENS:
            await request.text()  # and no end
        else:
            await request.text()
            await request.end()

    async with serving(reply) as server:
        run = await run_ttft(LOAD, Server(server.url), round=0, first=0, streams=2, requests=40)
    assert run.errors == {"reset": 2}


async def test_a_pause_counts_when_it_touches_the_window() -> None:
    class Ended:
        def __init__(self, chunks: list[float], ended: bool) -> None:
            self.answer = answer(0.0, chunks)
            self.done = asyncio.get_running_loop().create_future()
            if ended:
                self.done.set_result(None)

    streams = Streams()
    streams.exchanges = [Ended([1.0, 2.0, 4.0, 5.0, 9.0], True), Ended([2.5, 3.0], False)]  # type: ignore[list-item]
    assert streams.gaps_s(3.5, 4.5) == [2.0, 1.0, 1.5]


async def test_servers_take_turns_with_the_same_prompts_and_no_round_repeats_one() -> None:
    said: list[str] = []
    async with serving(answer_fully) as a, serving(answer_fully) as b:

        async def scenario(server: Server, round: int, first: int) -> Run:
            return await run_batch(LOAD, server, round=round, first=first, concurrency=1, requests=2)

        runs = await in_turn(scenario, [Server(a.url), Server(b.url)], 2, 0, lambda run: said.append(run.url))
    assert [run.url for run in runs] == said == [a.url, b.url, a.url, b.url]
    prompts = [[request.prompt for request in server.requests] for server in (a, b)]
    assert prompts[0] == prompts[1] and len(set(prompts[0])) == 4
