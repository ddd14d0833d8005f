"""Fixtures for tests of the HTTP API: a server on a loopback port over a scripted engine, and clients for it.

Tests that need no script take only `base_url`, `client` or `http`, so the same tests run against any server: set
CLUSTER_TEST_URL (and CLUSTER_TEST_KEY) and those fixtures point there; tests that take `engine` are then skipped.
Use it with `from api_server import *` in a test module.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import uvicorn
from fake_engine import READY, FakeEngine
from fastapi import FastAPI
from tiny_tokenizer import build_tokenizer_folder

from cluster.serve.api import Settings, create_app
from cluster.serve.chat import ChatModel
from cluster.serve.http_protocol import HttpProtocol
from parallel import wire

__all__ = ["app", "app_settings", "base_url", "chat", "client", "engine", "http", "service", "tokenizer_folder"]

MODEL = "lab/tiny"


@dataclass
class FakeService:
    """The supervisor's part towards the API."""

    chat: ChatModel | None
    engine: FakeEngine | None
    ready: wire.Ready | None = READY
    model: str = MODEL
    created: int = 1700000000
    stats: wire.Stats = field(default_factory=wire.Stats)
    rank_stats: list[tuple[str, wire.Stats]] = field(default_factory=list)

    def health(self) -> dict[str, Any]:
        return {"phase": "ready" if self.engine else "loading"}


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer_folder(tmp_path_factory.mktemp("tokenizers") / "tiny")


@pytest.fixture(scope="session")
def chat(tokenizer_folder: Path) -> ChatModel:
    return ChatModel.load(tokenizer_folder)


@pytest.fixture
def app_settings() -> Settings:
    """What the server is started with; a module or test overrides it."""
    return Settings()


@pytest_asyncio.fixture
async def engine() -> FakeEngine:
    if "CLUSTER_TEST_URL" in os.environ:
        pytest.skip("needs the scripted engine")
    return FakeEngine()


@pytest_asyncio.fixture
async def service(chat: ChatModel, engine: FakeEngine) -> FakeService:
    return FakeService(chat, engine)


@pytest.fixture
def app(request: pytest.FixtureRequest) -> FastAPI | None:
    """The application over the scripted engine; None when a real server is tested."""
    if "CLUSTER_TEST_URL" in os.environ:
        return None
    return create_app(request.getfixturevalue("service"), request.getfixturevalue("app_settings"))


@pytest_asyncio.fixture
async def base_url(app: FastAPI | None) -> AsyncIterator[str]:
    """The server's root."""
    if app is None:
        yield os.environ["CLUSTER_TEST_URL"].rstrip("/")
        return
    config = uvicorn.Config(
        app, port=0, http=HttpProtocol, log_level="error", lifespan="off", timeout_graceful_shutdown=2
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()  # not `serve`, which polls for its exit ten times a second
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    for listener in server.servers:  # not `shutdown`, which sleeps; the clients have closed their connections
        listener.close()
        await listener.wait_closed()
    while server.server_state.connections or server.server_state.tasks:
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    key = os.environ.get("CLUSTER_TEST_KEY", "none")
    plain = openai.DefaultAsyncHttpxClient(verify=False)  # loading certificates takes longer than most tests
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0, http_client=plain) as client:
        yield client


@pytest_asyncio.fixture
async def http(base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A plain client, for what the official one cannot express."""
    key = os.environ.get("CLUSTER_TEST_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60, verify=False) as client:
        yield client
