"""The load generator's client: one streamed chat request to any OpenAI-compatible server, every arrival timed.

It knows HTTP and clocks; what is asked and how figures are made of answers is in `scenarios.py`. On a small machine the
client competes with the server for the same cores, so an asyncio protocol feeds httptools and looks at each event once;
there is no task switch per token. One connection per request, as a client's first request would have it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go. `url` is the server's root or its /v1; `model` is the name every request carries."""

    url: str
    model: str = "default_model"
    api_key: str = ""

    def address(self) -> tuple[str, int, ssl.SSLContext | None, str]:
        """Host, port, TLS context (None for http) and the path of chat completions. Raises ValueError."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url} is not an http:// or https:// address.")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        root = parts.path.rstrip("/")
        root = root if root.endswith("/v1") else root + "/v1"
        return parts.hostname, parts.port or (443 if tls else 80), tls, root + "/chat/completions"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: what is said and how much is wanted. Every sampling field is sent, so that all servers do the same.

    No seed is sent: mlx_lm.server serves seeded requests one at a time.
    """

    prompt: str
    max_tokens: int
    temperature: float = 0.0

    def body(self, model: str) -> bytes:
        """The JSON body. No field is null and none is unknown to mlx_lm.server."""
        fields = {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields).encode()


@dataclass(slots=True)
class Answer:
    """What came back for one Ask. Times are seconds of the monotonic clock; `chunks` are the arrivals of text.

    `error` is "" or a kind: "refused" (nobody listens), "reset" (connection reset, or closed before the answer was
    whole), "timeout", "stream" (an error event), "protocol" (not HTTP), or an HTTP status such as "429".
    """

    sent_s: float = 0.0
    ended_s: float = 0.0
    chunks: list[float] = field(default_factory=list)
    finish: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    usage_tokens: int | None = None
    error: str = ""
    detail: str = ""

    @property
    def tokens(self) -> int:
        """Output tokens: by the server's usage, else the chunks that held text."""
        return len(self.chunks) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft_s(self) -> float:
        """From sending the request to the first text."""
        return self.chunks[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between one piece of text and the next."""
        return [b - a for a, b in itertools.pairwise(self.chunks)]


class Exchange(asyncio.Protocol):
    """One request on one connection; fills `answer` as bytes arrive. `first` and `done` resolve once each."""

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.answer = Answer()
        self.first: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._line = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request at once; the clock of this answer starts here."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        self.answer.sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Feed the HTTP parser, which calls `on_body` and `on_message_complete`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.end("protocol", f"not an HTTP answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """A body without a length ends with its connection; an answer without an end was cut off."""
        self._finish(str(exc or "the server closed the connection in mid-answer"))

    def on_body(self, body: bytes) -> None:
        """A piece of the body: look at its whole lines, keep the rest."""
        *lines, self._line = (self._line + body).split(b"\n")
        if self._parser.get_status_code() != 200:
            self._line = b"\n".join([*lines, self._line])[:2000]
            return
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip())

    def on_message_complete(self) -> None:
        """The body is whole."""
        self._finish("the answer ended without a finish_reason")

    def end(self, error: str = "", detail: str = "") -> None:
        """Close the connection and resolve the futures; only the first call counts."""
        if self.done.done():
            return
        self.answer.ended_s = time.perf_counter()
        self.answer.error, self.answer.detail = error, detail
        if self._transport is not None:
            self._transport.abort()
        self.done.set_result(None)
        if not self.first.done():
            self.first.set_result(None)

    def _finish(self, cut: str) -> None:
        status = self._parser.get_status_code()
        if status not in (0, 200):
            self.end(str(status), self._line.decode(errors="replace")[:300])
        elif self.answer.finish:
            self.end()
        else:
            self.end("reset", cut)

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.end()
            return
        try:
            event = _event.decode(data)
        except msgspec.MsgspecError as error:
            self.end("protocol", f"an event that is not a chat chunk: {error}")
            return
        answer = self.answer
        if event.error is not None:
            self.end("stream", json.dumps(event.error)[:300])
        if event.usage is not None:
            answer.usage_tokens = event.usage.completion_tokens
            answer.prompt_tokens = event.usage.prompt_tokens
            details = event.usage.prompt_tokens_details
            answer.cached_tokens = (details.cached_tokens or 0) if details else 0
        for choice in event.choices:
            delta = choice.delta
            if delta is not None and (delta.content or delta.reasoning_content or delta.reasoning):
                answer.chunks.append(time.perf_counter())
                if not self.first.done():
                    self.first.set_result(None)
            answer.finish = choice.finish_reason or answer.finish


async def start(server: Server, ask: Ask, timeout_s: float) -> Exchange:
    """Connect and send; the exchange goes on by itself. A failed connection is an ended exchange with its error."""
    host, port, tls, path = server.address()
    body = ask.body(server.model)
    key = f"Authorization: Bearer {server.api_key}\r\n" if server.api_key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\n{key}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    exchange = Exchange(head.encode() + body)
    exchange.answer.sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(lambda: exchange, host, port, ssl=tls)
    except TimeoutError:
        exchange.end("timeout", f"no connection within {timeout_s:g} s")
    except ConnectionRefusedError as error:
        exchange.end("refused", str(error))
    except OSError as error:
        exchange.end("reset", str(error))
    return exchange


async def complete(server: Server, ask: Ask, timeout_s: float) -> Answer:
    """One request from start to end; errors are in the answer, never raised."""
    exchange = await start(server, ask, timeout_s)
    await asyncio.wait([exchange.done], timeout=timeout_s)
    exchange.end("timeout", f"no whole answer within {timeout_s:g} s")
    return exchange.answer
