"""256 clients that connect at the same moment: nobody's connection is reset, everyone is served or told to come back.

Over plain sockets, since a client library would limit or repeat connections. Each one says Connection: close, so that
an answer which ends early is seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from api_server import *  # noqa: F403
from fake_engine import READY

from cluster.serve.api import Settings
from cluster.supervision.launch import free_port

CLIENTS = 256


async def told(url: str, number: int) -> str:
    """What one client was told: "served", "full" or what else it saw. Every other one asks for a stream."""
    stream = number % 2 == 0
    body = {"messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 4, "stream": stream}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(head.encode() + content)
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    except OSError as error:
        return type(error).__name__
    head, _, text = answer.partition("\r\n\r\n")
    status, headers = head.partition("\r\n")[0], head.lower()
    if "x-request-id: " not in headers:
        return f"no request id: {answer}"
    if " 200 " in status and (("[DONE]" in text and '"error"' not in text) if stream else '"finish_reason":"' in text):
        return "served"
    return "full" if " 429 " in status and "retry-after: " in headers else answer


async def test_all_of_256_clients_at_once_are_served(base_url, engine, chat):
    engine.says(chat._encode("Hello the end", special=False))
    answers = await asyncio.gather(*(told(base_url, i) for i in range(CLIENTS)))
    assert Counter(answers) == {"served": CLIENTS}
    assert engine.open_requests == 0


class TestShortQueue:
    @pytest.fixture
    def app_settings(self) -> Settings:
        return Settings(queue_limit=64)

    async def test_of_256_clients_at_once_those_beyond_slots_and_queue_are_told_when_to_come_back(
        self, base_url, engine, chat
    ):
        engine.says(chat._encode("Hello the end", special=False))
        engine.hold(at=0)  # nobody makes room before the last one has asked
        asking = {asyncio.create_task(told(base_url, i)) for i in range(CLIENTS)}
        refused: set[asyncio.Task[str]] = set()
        while len(refused) < CLIENTS - READY.slots - 64:
            done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            refused |= done
        engine.release()
        assert Counter([await task for task in refused]) == {"full": CLIENTS - READY.slots - 64}
        assert Counter(await asyncio.gather(*asking)) == {"served": READY.slots + 64}
        assert engine.open_requests == 0


@contextmanager
def cluster_up(model: Path, home: Path, *flags: str) -> Iterator[str]:
    """`cluster up --detach`, and `cluster down` at the end; its URL."""
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "cluster"]
    environment = {**os.environ, "CLUSTER_HOME": str(home)}
    up = [*command, "up", str(model), "--detach", "--port", str(port), *flags]
    try:
        started = subprocess.run(up, env=environment, capture_output=True, text=True, timeout=200)
        assert started.returncode == 0, started.stdout + started.stderr
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([*command, "down"], env=environment, capture_output=True, timeout=60)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("queue", "served"), [(256, 256), (64, 96)])
async def test_256_clients_at_once_of_the_demo_model(demo_model: Path, cluster_home: Path, queue: int, served: int):
    with cluster_up(demo_model, cluster_home, "--slots", "32", "--queue", str(queue)) as url:
        answers = Counter(await asyncio.gather(*(told(url, i) for i in range(CLIENTS))))
    assert answers == Counter({"served": served, "full": CLIENTS - served})
