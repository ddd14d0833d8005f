from __future__ import annotations

import asyncio
import json
import socket

import pytest
from sse_server import Request, answer_fully, serving

from cluster.benchmark.load import Answer, Ask, Server, complete, start

ASK = Ask("Tell me a story.", max_tokens=3, temperature=0.7)
LIMIT_S = 20.0


async def ask(url: str, **server: str) -> Answer:
    return await complete(Server(url, **server), ASK, LIMIT_S)


async def test_a_whole_answer_has_its_arrival_times_and_the_servers_own_counts() -> None:
    async with serving(answer_fully) as server:
        answer = await ask(server.url)
    assert (answer.error, answer.finish, len(answer.chunks)) == ("", "length", 3)
    assert (answer.tokens, answer.prompt_tokens, answer.cached_tokens) == (3, 22, 2)
    assert answer.sent_s < answer.chunks[0] <= answer.chunks[1] <= answer.chunks[2] <= answer.ended_s
    assert answer.ttft_s == answer.chunks[0] - answer.sent_s and len(answer.gaps_s) == 2


async def test_every_sampling_field_is_sent_and_nothing_that_mlx_lm_server_refuses_or_serves_alone() -> None:
    async with serving(answer_fully) as server:
        await ask(server.url, model="some/model", api_key="secret")
    (request,) = server.requests
    body = request.body
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("some/model", 3, 0.7)
    assert (body["top_p"], body["top_k"], body["min_p"]) == (1.0, 0, 0.0)
    assert body["presence_penalty"] == body["frequency_penalty"] == 0.0
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert None not in body.values() and "seed" not in body
    assert request.headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("root", ["", "/", "/v1", "/v1/"])
async def test_a_servers_root_and_its_v1_mean_the_same(root: str) -> None:
    async with serving(answer_fully) as server:
        await ask(server.url + root)
    assert server.requests[0].path == "/v1/chat/completions"


def test_an_address_without_scheme_or_host_is_refused() -> None:
    for url in ("127.0.0.1:8080", "ftp://host", "http://"):
        with pytest.raises(ValueError, match="http"):
            Server(url).address()


async def test_without_usage_pieces_of_text_are_counted() -> None:
    async def reply(request: Request) -> None:
        await request.head()
        for _ in range(2):
            await request.text()
        await request.end()

    async with serving(reply) as server:
        answer = await ask(server.url)
    assert (answer.usage_tokens, answer.tokens) == (None, 2)


async def test_comments_and_events_without_text_are_not_the_first_token() -> None:
    async def reply(request: Request) -> None:
        await request.head()
        await request.send(b": keepalive 1/2\n\n")
        await request.event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
        await request.event({"choices": [{"delta": {"reasoning_content": "Hm"}}]})
        await request.text()
        await request.end()

    async with serving(reply) as server:
        answer = await ask(server.url)
    assert len(answer.chunks) == 2


async def test_a_chunked_answer_is_read_however_its_bytes_are_cut() -> None:
    events = [
        {"choices": [{"delta": {"content": text}, "finish_reason": end}]} for text, end in (("ä", None), ("b", "stop"))
    ]
    text = b"".join(b"data: " + json.dumps(e, ensure_ascii=False).encode() + b"\r\n\r\n" for e in events)

    async def reply(request: Request) -> None:
        await request.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(0, len(text), 7):
            part = text[at : at + 7]
            await request.send(b"%x\r\n%s\r\n" % (len(part), part))
        await request.send(b"0\r\n\r\n")

    async with serving(reply) as server:
        answer = await ask(server.url)
    assert (answer.error, answer.finish, answer.tokens) == ("", "stop", 2)


async def test_an_answer_that_finished_is_whole_without_the_end_mark() -> None:
    async def reply(request: Request) -> None:
        await request.head()
        await request.event({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]})

    async with serving(reply) as server:
        assert (await ask(server.url)).error == ""


async def test_a_connection_that_closes_in_mid_answer_is_a_reset() -> None:
    async def reply(request: Request) -> None:
        await request.head()
        await request.text()

    async with serving(reply) as server:
        answer = await ask(server.url)
    assert answer.error == "reset" and len(answer.chunks) == 1


@pytest.mark.parametrize("length", [b"Content-Length: 11\r\n", b""])
async def test_a_status_is_an_error_of_its_own_and_its_body_is_told(length: bytes) -> None:
    async def reply(request: Request) -> None:
        await request.send(b"HTTP/1.0 429 Too Many\r\n" + length + b"\r\nqueue\nfull!")

    async with serving(reply) as server:
        answer = await ask(server.url)
    assert (answer.error, answer.detail) == ("429", "queue\nfull!")


async def test_an_error_event_ends_the_answer_as_a_stream_error() -> None:
    async def reply(request: Request) -> None:
        await request.head()
        await request.event({"error": {"message": "the engine was lost"}})
        await request.send(b"data: [DONE]\n\n")

    async with serving(reply) as server:
        answer = await ask(server.url)
    assert answer.error == "stream" and "engine was lost" in answer.detail


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\ndata: {half\n\n"])
async def test_what_is_no_chat_stream_is_a_protocol_error(said: bytes) -> None:
    async def reply(request: Request) -> None:
        await request.send(said)

    async with serving(reply) as server:
        assert (await ask(server.url)).error == "protocol"


async def test_a_port_where_nobody_listens_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        answer = await ask(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert answer.error == "refused"


async def test_a_server_that_never_answers_is_a_timeout_and_loses_its_client() -> None:
    gone = asyncio.Event()

    async def reply(request: Request) -> None:
        try:
            await request.reader.read()
        finally:
            gone.set()

    async with serving(reply) as server:
        answer = await complete(Server(server.url), ASK, timeout_s=0.05)
        await asyncio.wait_for(gone.wait(), LIMIT_S)
    assert answer.error == "timeout" and not answer.chunks


async def test_an_exchange_tells_of_its_first_text_before_its_end() -> None:
    go_on = asyncio.Event()

    async def reply(request: Request) -> None:
        await request.head()
        await request.text()
        await go_on.wait()
        await request.end()

    async with serving(reply) as server:
        exchange = await start(Server(server.url), ASK, LIMIT_S)
        await asyncio.wait_for(exchange.first, LIMIT_S)
        assert not exchange.done.done()
        go_on.set()
        await asyncio.wait_for(exchange.done, LIMIT_S)
    assert exchange.answer.error == ""
