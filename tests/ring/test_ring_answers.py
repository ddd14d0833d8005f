"""Engines over real ranks, joined by MLX's ring and started by mlx.launch, say what the whole model says alone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from matrix import FURTHER, REQUIRED, blank, config_of
from ring.local_cluster import until

from cluster.supervision.launch import free_port, rank_environment
from cluster.supervision.mlx_launch import FILL_BYTES, free_ports, launcher
from parallel import tensor, wire
from parallel.control import VERSION

HERE = Path(__file__).parent
HOSTFILES = HERE.parent.parent / "hostfiles"
Case = tuple[str, str, tuple[int, ...], int]
# A sliding window, recurrent layers, latent attention with experts; uneven stages, some with one kind of layer.
QUICK: dict[int, tuple[Case, ...]] = {
    2: (
        ("llama", "pipeline", (3, 3), 7),
        ("gpt_oss", "pipeline", (1, 5), 5),
        ("qwen3_next", "pipeline", (4, 2), 16),
        ("deepseek_v3", "pipeline", (3, 3), 64),
        ("llama", "tensor", (), 7),
    ),
    3: (
        ("llama", "pipeline", (1, 3, 2), 7),
        ("llama", "tensor", (), 16),
    ),
}


def every_case(size: int) -> Iterator[Case]:
    """Each architecture in each way that it can be split."""
    for name in REQUIRED + FURTHER:
        model = blank(config_of(name))
        rest = len(model.layers) - 2 * (size - 1)
        yield name, "pipeline", (rest, *[2] * (size - 1)), 7
        if not tensor.reasons(model, size):
            yield name, "tensor", (), 11


@contextlib.contextmanager
def launched(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has no children left after."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE.parent.parent}", "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=rank_environment(environment),
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()


def run_ranks(size: int, cases: tuple[Case, ...], folder: Path) -> list[dict[str, Any]]:
    """What rank 0 of `size` found in each case."""
    secret = folder / "secret"
    secret.write_text("sesame")
    port, specs = free_port("127.0.0.1"), [wire.RankSpec("this machine")] * size
    plan = wire.RankPlan("", "127.0.0.1", port, str(secret), os.getpid(), kv_limit_bytes=1 << 28, ranks=specs)
    argv = [launcher(), "--hostfile", str(HOSTFILES / f"local-{size}.json")]
    argv += ["--starting-port", str(free_ports("127.0.0.1", size)), "--", sys.executable, str(HERE / "engine_ranks.py")]
    argv += [json.dumps(cases), msgspec.json.encode(plan).decode()]
    with launched(argv) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n" * FILL_BYTES)  # and left open: mlx.launch burns a core otherwise
        process.stdin.flush()
        with until(lambda: joined(port)):  # a rank without a coordinator leaves after a while
            output = process.stdout.read()
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    assert len(found) == len(cases), output[-3000:]
    return found


def joined(port: int) -> socket.socket | None:
    """A connection to rank 0, as a coordinator's; None while it does not listen."""
    try:
        connection = socket.create_connection(("127.0.0.1", port))
    except OSError:
        return None
    connection.sendall(wire.encode(wire.Join("sesame", "coordinator", VERSION)))
    return connection


def check(found: list[dict[str, Any]]) -> None:
    assert {str(case["case"]): case["wrong"] for case in found if case["wrong"]} == {}
    assert {str(case["case"]): case["left"] for case in found if any(case["left"])} == {}


@pytest.mark.parametrize("size", [2, 3])
def test_a_random_mix_on_several_ranks_is_answered_as_by_the_whole_model_alone(tmp_path: Path, size: int) -> None:
    check(run_ranks(size, QUICK[size], tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [2, 3])
def test_every_architecture_on_real_ranks_is_answered_as_by_the_whole_model_alone(tmp_path: Path, size: int) -> None:
    check(run_ranks(size, tuple(every_case(size)), tmp_path))
