"""What is refused before it is a request, over plain sockets."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest
from api_server import *  # noqa: F403

from cluster.serve.http_protocol import MAX_HEAD_BYTES


async def exchange(url: str, content: bytes) -> tuple[str, dict[str, str], bytes]:
    """The status line, headers and body with which the server answers `content`, and closes."""
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    writer.write(content)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.decode().split("\r\n")
    return status, dict(line.lower().split(": ", 1) for line in lines), body


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"garbage\r\n\r\n",
        b"FOO /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["no HTTP", "unknown method", "bad length", "HTTP/2", "a proxy's", "no ASCII"],
)
async def test_what_is_no_http_gets_an_error_object_with_an_id(base_url, engine, request_bytes):
    status, headers, body = await exchange(base_url, request_bytes)
    assert status == "HTTP/1.1 400 Bad Request"
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert headers["x-request-id"].startswith("req_")
    assert int(headers["content-length"]) == len(body)


@pytest.mark.parametrize("line", [b"a" * 1000, b"b\r\nx-a: " + b"b" * 991], ids=["one header", "many headers"])
@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["first", "kept alive"])
async def test_headers_that_do_not_end_are_refused_before_they_fill_the_memory(base_url, engine, line, before):
    begin = b"GET /health HTTP/1.1\r\nhost: x\r\nx-b: "
    head = (begin + line * (MAX_HEAD_BYTES // len(line) + 1))[: MAX_HEAD_BYTES + 1]
    reader, writer = await asyncio.open_connection(urlsplit(base_url).hostname, urlsplit(base_url).port)
    if before:
        writer.write(before)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        length = int((await reader.readuntil(b"\r\n\r\n")).partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
    writer.write(head)
    assert b'"code":"headers_too_large"' in await reader.read()
    writer.close()


async def test_a_long_body_is_not_taken_for_headers(http, engine):
    for _ in range(3):
        response = await http.post("/v1/completions", content=b" " * (4 * MAX_HEAD_BYTES))
        assert response.json()["error"]["code"] == "invalid_json"


async def test_a_request_after_a_refused_one_is_served_on_a_new_connection(http, base_url, engine):
    await exchange(base_url, b"garbage\r\n\r\n")
    assert (await http.get("/health")).status_code == 200
