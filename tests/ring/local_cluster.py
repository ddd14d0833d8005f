"""A whole cluster of several ranks on this machine, as a user starts it: `cluster up MODEL --local N` and mlx.launch.

Every process of it carries the CLUSTER_HOME of its test, so what is left behind is found, whoever its parent is.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.paths import Folders
from cluster.state import ClusterState, read_state
from cluster.supervision.launch import free_port

HERE = Path(__file__).parent
FAULTY = str(HERE / "faulty_rank.py")
WAIT_S = 60.0
SIX_HEADS = {  # divides by 2 and by 3, and has layers for an uneven split
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def until(condition: Callable[[], Any], wait_s: float = WAIT_S) -> Any:
    """What `condition` returns once that is true."""
    end = time.monotonic() + wait_s
    while not (found := condition()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
    return found


class LocalCluster:
    """`cluster` commands in one home folder, on one model and one port."""

    def __init__(self, home: Path, model: str | Path, *settings: str) -> None:
        self.folders = Folders.from_environment({"CLUSTER_HOME": str(home)})
        self.environment = {**os.environ, "CLUSTER_HOME": str(home)}
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.up = ("up", str(model), "--port", str(self.port), "--no-self-check", *settings)

    def start(self, *arguments: str, rank: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """A `cluster` command, with the script `rank[0]` and its arguments in the place of a rank."""
        return subprocess.Popen(
            [sys.executable, str(HERE / "cluster_with_rank.py"), *rank, "--", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            start_new_session=True,
        )

    def run(self, *arguments: str, rank: tuple[str, ...] = ()) -> tuple[int, str]:
        """Exit code and output."""
        with self.start(*arguments, rank=rank) as process:
            try:
                output, _ = process.communicate(timeout=300)
            finally:
                process.kill()
        return process.returncode, output

    @contextlib.contextmanager
    def serving(self, *settings: str, rank: tuple[str, ...] = ()) -> Iterator[None]:
        """`up --detach`, ready; ended after, and nothing of it may be left then."""
        with self.cleared():
            code, output = self.run(*self.up, *settings, "--detach", rank=rank)
            assert code == 0, output
            yield
            assert self.run("down")[0] == 0
            assert self.processes() == []

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Kills, when a test ends, what it has left."""
        try:
            yield
        finally:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def processes(self) -> list[psutil.Process]:
        """All processes of this cluster that run: coordinator, mlx.launch, ranks and what these started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                mine = process.environ().get("CLUSTER_HOME") == self.environment["CLUSTER_HOME"]
                if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks, by MLX_RANK, joined or not; without those that label their output."""
        found: dict[int, psutil.Process] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank = int(process.environ().get("MLX_RANK", "-1"))
                first = rank not in found or process.create_time() < found[rank].create_time()
                if rank >= 0 and first:
                    found[rank] = process
        return found

    @property
    def state(self) -> ClusterState:
        """The record on disk."""
        state = read_state(self.folders)
        assert state is not None
        return state

    def health(self) -> dict[str, Any]:
        """The answer of /health; empty while nobody answers."""
        try:
            answer: dict[str, Any] = httpx.get(f"{self.url}/health", trust_env=False, timeout=5).json()
        except (httpx.HTTPError, json.JSONDecodeError):
            return {}
        return answer

    def ready_again(self, restarts: int) -> dict[str, Any]:
        """Wait until it is ready after so many relaunches."""

        def ready() -> dict[str, Any] | None:
            health = self.health()
            assert health.get("status") != "failed", health
            return health if health.get("status") == "ready" and health["restarts"] >= restarts else None

        found: dict[str, Any] = until(ready)
        return found

    def complete(self, prompt: str | list[int] = "hello", timeout_s: float = 60, **fields: Any) -> httpx.Response:
        """The answer to one completion; greedy, unless `fields` say otherwise."""
        body = {"model": "default", "prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
        return httpx.post(f"{self.url}/v1/completions", json=body, trust_env=False, timeout=timeout_s)
