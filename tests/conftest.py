"""Fixtures that every test may use: a home folder of its own, a tiny random model, the demo model."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from netns.machines import network as network  # the fixture

from cluster.paths import Folders

# What a shell runs in its background starts with Ctrl-C ignored, and every process that a test starts would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup makes it ignored

USERS = Folders.from_environment(os.environ)  # before the fixture below moves them


@pytest.fixture(autouse=True)
def cluster_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State, logs and cache of this test, away from the user's."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("CLUSTER_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random 3-layer llama in float32, with a tokenizer and a chat template."""
    from tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's folder, fetched and converted on first use and kept in the user's cache."""
    from cluster.ship.demo import demo_model

    return demo_model(cache=USERS.cache)
