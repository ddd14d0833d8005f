"""`cluster up` over several ranks with the demo model, and what it refuses before any rank is started."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from ring.local_cluster import LocalCluster, until

HOSTFILES = Path(__file__).parent.parent.parent / "hostfiles"


@pytest.fixture
def demo(cluster_home: Path, demo_model: Path) -> LocalCluster:
    return LocalCluster(cluster_home, demo_model)


def capital(cluster: LocalCluster) -> str:
    """What the demo model says when it is asked for the capital of France."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "default", "messages": question, "temperature": 0, "max_tokens": 12}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, trust_env=False, timeout=120).json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.model
def test_the_demo_model_answers_from_two_stages(demo: LocalCluster) -> None:
    with demo.serving("--local", "2", "--split", "20,10"):
        assert "Paris" in capital(demo)
        assert [rank["layers"] for rank in demo.health()["ranks"]] == [[10, 30], [0, 10]]


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_model_answers_from_three_shards(demo: LocalCluster) -> None:
    with demo.serving("--local", "3", "--parallel", "tensor"):
        assert "Paris" in capital(demo)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_self_check_passes_before_ready(demo: LocalCluster) -> None:
    demo.up = tuple(word for word in demo.up if word != "--no-self-check")
    with demo.serving("--local", "2"):
        # what a rank prints goes through mlx.launch, and may come a moment after what it says to the coordinator
        until(lambda: "self-check: a prompt of 4200 tokens" in demo.folders.rank_log(0).read_text())


@pytest.mark.model
def test_tensor_parallel_that_does_not_divide_is_refused_with_reason_and_alternatives(demo: LocalCluster) -> None:
    code, output = demo.run(*demo.up, "--local", "2", "--parallel", "tensor")
    assert code == 1
    assert "llama cannot run tensor-parallel on 2 ranks: " in output
    assert "heads" in output
    assert "Possible: tensor parallel on 3 ranks or a pipeline on 2 to 30 ranks." in output
    assert demo.processes() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--local", "2", "--split", "3,4"), "--split 3,4 is for 2 ranks and 7 layers, but there are 2 ranks and the"),
        (("--local", "2", "--split", "2,2,2"), "--split 2,2,2 is for 3 ranks and 6 layers, but there are 2 ranks"),
        (("--local", "2", "--split", "0,6"), "--split must be numbers of layers, one for each rank, like 20,10"),
        (("--local", "2", "--split", "a,b"), "--split must be numbers of layers, one for each rank, like 20,10"),
        (("--local", "2", "--parallel", "tensor", "--split", "3,3"), "--split is for --parallel pipeline"),
        (("--split", "3,3"), "are for several ranks"),
        (("--local", "7"), "7 stages: it has 6 layers"),
        (("--local", "2", "--hostfile", str(HOSTFILES / "local-2.json")), "both say where the ranks are"),
        (("--hostfile", "/nonexistent/hostfile.json"), "/nonexistent/hostfile.json"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_any_rank(
    cluster: LocalCluster, settings: tuple[str, ...], message: str
) -> None:
    code, output = cluster.run(*cluster.up, *settings)
    assert code in (1, 2)
    assert message in " ".join(output.split())
    assert "Traceback" not in output
    assert cluster.processes() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "JSON"),
        ("[]", "no hosts"),
        (json.dumps([{"ssh": "127.0.0.1"}, {"ssh": "127.0.0.1"}]), "ips"),
        (json.dumps({"backend": "rign", "hosts": [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2}), "ring"),
    ],
)
def test_a_hostfile_with_faults_is_refused_by_name_before_any_rank(
    cluster: LocalCluster, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "faulty.json").write_text(content)
    code, output = cluster.run(*cluster.up, "--hostfile", str(tmp_path / "faulty.json"))
    assert code == 1
    assert "faulty.json" in output
    assert message in output
    assert cluster.processes() == []
