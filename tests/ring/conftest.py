"""Fixtures for whole clusters on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ring.local_cluster import SIX_HEADS, LocalCluster


@pytest.fixture(scope="session")
def six_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 6 layers and 6 heads: it divides by 2 and by 3."""
    from tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("models") / "six-heads", config=SIX_HEADS)


@pytest.fixture
def cluster(cluster_home: Path, six_heads: Path) -> Iterator[LocalCluster]:
    """A home of its own; nothing of it is left when the test ends, however it ends."""
    cluster = LocalCluster(cluster_home, six_heads)
    with cluster.cleared():
        yield cluster
