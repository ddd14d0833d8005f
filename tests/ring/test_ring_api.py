"""The API over several ranks says what it says over one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ring.local_cluster import LocalCluster, until

TESTS = Path(__file__).parent.parent
SHARED = "the hour and the inner thin hand of the other one "
CHAT = {"messages": [{"role": "user", "content": "the inner hour"}]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": SHARED * 3, "max_tokens": 12, "temperature": 0, "logprobs": 3}),
    ("completions", {"prompt": SHARED * 3 + "and", "max_tokens": 12, "temperature": 0}),  # a prefix is cached
    ("completions", {"prompt": "in", "max_tokens": 9, "temperature": 1.0, "seed": 7, "n": 3}),
    ("completions", {"prompt": [5, 6, 7, 8], "max_tokens": 9, "temperature": 0, "presence_penalty": 1.5}),
    ("completions", {"prompt": "the", "max_tokens": 9, "temperature": 0, "logit_bias": {"9": 100}}),
    ("chat/completions", CHAT | {"max_tokens": 15, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", CHAT | {"max_tokens": 15, "temperature": 0.8, "top_p": 0.9, "seed": 3}),
    ("chat/completions", CHAT | {"max_tokens": 15, "temperature": 0, "stop": ["e"]}),
]


def answers(url: str) -> list[Any]:
    """What the server says to REQUESTS, but for ids, times and the last digits of numbers."""
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        return [told(client.post(f"/v1/{path}", json={"model": "default"} | body).json()) for path, body in REQUESTS]


def told(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items() if key not in ("id", "created", "system_fingerprint")}
    if isinstance(value, list):
        return [told(item) for item in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, six_heads: Path) -> list[Any]:
    """The answers of single mode."""
    cluster = LocalCluster(tmp_path_factory.mktemp("alone"), six_heads)
    with cluster.serving():
        return answers(cluster.url)


@pytest.fixture(
    scope="module",
    params=[
        ("--hostfile", str(TESTS.parent / "hostfiles" / "local-2.json"), "--split", "4,2"),
        pytest.param(("--local", "3", "--parallel", "tensor"), marks=pytest.mark.slow),
        pytest.param(("--local", "3"), marks=pytest.mark.slow),
    ],
    ids=["2 stages", "3 shards", "3 stages"],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, six_heads: Path
) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path_factory.mktemp("served"), six_heads)
    with cluster.serving(*request.param):
        yield cluster


def test_every_field_of_an_answer_is_that_of_single_mode(served: LocalCluster, alone: list[Any]) -> None:
    assert answers(served.url) == alone


def test_the_tests_of_the_api_pass_over_it(served: LocalCluster) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(TESTS / "test_api.py"), "-p", "no:cacheprovider"],
        env={**os.environ, "CLUSTER_TEST_URL": served.url},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout


def test_a_client_that_leaves_frees_its_request_on_all_ranks(served: LocalCluster) -> None:
    endless = {"prompt": "the", "max_tokens": 3000, "stream": True, "logit_bias": {"2": -100, "0": -100}}
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{served.url}/v1/completions", json={"model": "default"} | endless) as response,
    ):
        assert response.status_code == 200
        next(response.iter_lines())
    until(lambda: served.health()["requests"] == {"waiting": 0, "running": 0}, 5)


def test_health_and_metrics_tell_of_every_rank(served: LocalCluster) -> None:
    health = served.health()
    ranks = health["ranks"]
    assert [rank["rank"] for rank in ranks] == list(range(len(ranks)))
    assert {rank["pid"] for rank in ranks} == {process.pid for process in served.ranks().values()}
    until(lambda: all(rank.get("active_bytes", 0) > 0 for rank in served.health()["ranks"]))
    assert httpx.get(f"{served.url}/metrics", trust_env=False).status_code == 200
    layers = [rank["layers"] for rank in ranks]
    if health["strategy"] == "pipeline":  # rank 0 has the last layers
        assert [start for start, _ in layers] == [stop for _, stop in layers[1:]] + [0]
        assert layers[0][1] == 6
    else:
        assert layers == [[0, 6]] * 3
