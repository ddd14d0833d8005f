"""A chat server for tests of the load generator: it answers over real sockets as its script says, token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Reply = Callable[["Request"], Awaitable[None]]


class Request:
    """What a client sent, and how to answer it."""

    def __init__(self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.decode().split("\r\n")
        self.path = first.split()[1]
        self.headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines if line)}
        self.body: dict[str, Any] = json.loads(body)
        self.reader = reader
        self.writer = writer

    @property
    def prompt(self) -> str:
        """What the user said."""
        return str(self.body["messages"][0]["content"])

    async def send(self, data: bytes) -> None:
        """Write and flush."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> None:
        """An event stream that ends with its connection, as mlx_lm.server sends it."""
        await self.send(b"HTTP/1.0 200 OK\r\nContent-type: text/event-stream\r\n\r\n")

    async def text(self, text: str = "word ") -> None:
        """One piece of the answer."""
        await self.event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})

    async def end(self, usage: dict[str, Any] | None = None) -> None:
        """The finish reason, the usage if there is one, and the end mark."""
        await self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if usage is not None:
            await self.event({"choices": [], "usage": usage})
        await self.send(b"data: [DONE]\n\n")

    async def event(self, value: dict[str, Any]) -> None:
        """One server-sent event."""
        await self.send(b"data: " + json.dumps(value).encode() + b"\n\n")


class SseServer:
    """Answers every request by `reply`; keeps what was asked and how many requests were open at once."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.url = ""
        self.requests: list[Request] = []
        self.open = 0
        self.most_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
            length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"Content-Length" in line)
            request = Request(head, await reader.readexactly(length), reader, writer)
            self.requests.append(request)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            try:
                await self.reply(request)
            finally:
                self.open -= 1
        except ConnectionError:
            pass  # the client cut a stream off
        finally:
            writer.close()


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[SseServer]:
    """An SseServer on a free loopback port."""
    stand_in = SseServer(reply)
    server = await asyncio.start_server(stand_in.serve, "127.0.0.1", 0)
    stand_in.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield stand_in


async def answer_fully(request: Request) -> None:
    """As many tokens as were asked for, and a usage that counts words."""
    await request.head()
    for _ in range(request.body["max_tokens"]):
        await request.text()
    await request.end(usage_of(request))


def usage_of(request: Request) -> dict[str, Any]:
    """Three tokens a word and ten for the template; two of them from a cache."""
    return {
        "prompt_tokens": 10 + 3 * len(request.prompt.split()),
        "completion_tokens": request.body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": 2},
    }
