"""What happens to requests, processes and the record when something goes wrong on one of several ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from ring.local_cluster import FAULTY, LocalCluster, until

TWO = ("--local", "2")


class Asking:
    """A long request in a thread, and when and how it ended."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.answer: httpx.Response | None = None
        self.ended_s = 0.0
        self._cluster = cluster
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        until(lambda: cluster.health().get("requests", {}).get("running"))

    def _ask(self) -> None:
        endless = {"2": -100, "0": -100}  # the stop tokens
        self.answer = self._cluster.complete(max_tokens=3900, timeout_s=100, logit_bias=endless)
        self.ended_s = time.monotonic()

    def error(self, since_s: float, within_s: float) -> str:
        """What it was told, which must be within `within_s` of `since_s`."""
        self._thread.join(60)
        assert self.answer is not None
        assert self.ended_s - since_s < within_s
        assert (self.answer.status_code, self.answer.json()["error"]["code"]) == (503, "engine_lost")
        return str(self.answer.json()["error"]["message"])


def lose(cluster: LocalCluster, fault: Callable[[], object], within_s: float = 10) -> str:
    """What a long request is told when `fault` happens, after which the cluster is ready again by itself."""
    restarts = cluster.health()["restarts"]
    before = {process.pid for process in cluster.processes()} - {cluster.state.coordinator.pid}
    asking, since_s = Asking(cluster), time.monotonic()
    fault()
    message = asking.error(since_s, within_s)
    cluster.ready_again(restarts + 1)
    assert before & {process.pid for process in cluster.processes()} == set()
    assert cluster.complete().status_code == 200
    return message


def test_every_loss_is_told_and_healed_by_itself_three_times_and_then_failed(cluster: LocalCluster, tmp_path: Path):
    trigger = tmp_path / "trigger"
    with cluster.serving(*TWO, rank=(FAULTY, "raise", "1", str(trigger))):
        text = cluster.complete().json()["choices"][0]["text"]
        assert "rank 1 on this machine: its connection closed" in lose(cluster, lambda: cluster.ranks()[1].kill())
        assert "lost: its connection closed" in lose(cluster, lambda: cluster.ranks()[0].kill())
        assert "rank 1 on this machine: RuntimeError: injected" in lose(cluster, trigger.touch)
        assert cluster.complete().json()["choices"][0]["text"] == text
        cluster.ranks()[1].kill()
        until(lambda: cluster.health().get("status") == "failed")
        reason = cluster.health()["reason"]
        assert reason.startswith("rank 1 on this machine: its connection closed and its process was ended by SIGKILL")
        assert "relaunched 3 times in 10 minutes" in reason
        assert [process.pid for process in cluster.processes()] == [cluster.state.coordinator.pid]
        assert "injected" in (cluster.folders.logs / "coordinator.log").read_text()
        code, output = cluster.run(*cluster.up, *TWO, "--detach")  # takes the place of the one that has failed
        assert code == 0, output
        assert cluster.complete().json()["choices"][0]["text"] == text


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_is_stopped_or_killed_is_named_within_ten_seconds(
    cluster: LocalCluster, ranks: int, victim: int, number: signal.Signals
):
    with cluster.serving("--local", str(ranks)):
        message = lose(cluster, lambda: cluster.ranks()[victim].send_signal(number))
        assert ("no sign of life for 8 s" if number == signal.SIGSTOP else "its connection closed") in message
        if victim:  # the end of rank 0 is the end of the engine's own connection
            assert f"rank {victim} on this machine" in message


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (3, 1), (3, 2)])
def test_a_main_thread_stuck_in_a_collective_is_a_stall_although_its_heartbeat_lives(
    cluster: LocalCluster, tmp_path: Path, ranks: int, victim: int
):
    trigger = tmp_path / "trigger"
    with cluster.serving("--local", str(ranks), rank=(FAULTY, "block", str(victim), str(trigger))):
        message = lose(cluster, trigger.touch, within_s=15)
        assert re.search(r"has run for 1\d s without an end; rank 1 \(this machine\) is ", message)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_an_exception_in_a_step_of_any_rank_is_told_in_its_words(
    cluster: LocalCluster, tmp_path: Path, victim: int, strategy: str
):
    trigger = tmp_path / "trigger"
    rank = (FAULTY, "raise", str(victim), str(trigger))
    with cluster.serving(*TWO, "--parallel", strategy, rank=rank):
        assert f"rank {victim} on this machine: RuntimeError: injected" in lose(cluster, trigger.touch)


@pytest.mark.slow
def test_when_mlx_launch_is_killed_no_rank_is_left_and_all_are_relaunched(cluster: LocalCluster):
    with cluster.serving(*TWO):
        launcher = next(record.process.process() for record in cluster.state.ranks if record.rank < 0)
        assert "mlx.launch was ended by SIGKILL" in lose(cluster, launcher.kill)


STARTS = {
    "memory": r"rank 1 on this machine: RuntimeError: \[malloc\] Unable to allocate 9000000000 bytes",
    "killed": "rank 1 on this machine: its connection closed and its process was ended by SIGKILL",
    "init": "its process did not come out of joining the others and ended itself by SIGALRM",
    "version": "rank 1 on this machine: rank 0 refused it: it runs mlx 0.0.1 instead of .*; install the same",
    "plan": "rank 1 on this machine: rank 0 refused it: it was started for another launch",
    "secret": r"rank 1 on this machine: its process ended with exit code 5\.[^$]*its secret is not this launch's",
}


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault == "version" else pytest.mark.slow) for fault in STARTS]
)
def test_a_start_that_fails_says_why_leaves_nothing_and_the_next_one_serves(
    cluster: LocalCluster, tmp_path: Path, fault: str
):
    (tmp_path / "trigger").touch()
    code, output = cluster.run(*cluster.up, *TWO, rank=(FAULTY, fault, "1", str(tmp_path / "trigger")))
    assert code == 1
    assert re.search(STARTS[fault], output)
    assert cluster.processes() == []
    assert re.search(STARTS[fault], cluster.state.reason)
    if fault == "killed":
        with cluster.serving(*TWO):
            assert cluster.complete().status_code == 200


@pytest.mark.slow
def test_a_killed_coordinator_takes_its_ranks_with_it_and_the_next_start_serves(cluster: LocalCluster):
    with cluster.serving(*TWO):
        cluster.state.coordinator.process().kill()
        until(lambda: not cluster.processes(), 10)
        code, output = cluster.run(*cluster.up, *TWO, "--detach")
        assert code == 0, output
        assert cluster.complete().status_code == 200


PHASES = ("launching", "joining", "connecting", "warming", "ready")


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        pytest.param(number, phase, marks=[] if (number, phase) == (signal.SIGINT, "joining") else pytest.mark.slow)
        for number in (signal.SIGINT, signal.SIGTERM)
        for phase in PHASES
    ],
)
def test_a_signal_in_any_phase_of_the_start_leaves_no_process(
    cluster: LocalCluster, number: signal.Signals, phase: str
):
    process = cluster.start(*cluster.up, *TWO)
    seen = ""
    while phase not in seen and not ("ready" in seen and phase != "ready"):
        line = process.stdout.readline()
        assert line, seen
        seen += line
    os.kill(process.pid, number)
    assert process.wait(20) == 0
    process.stdout.close()
    assert cluster.processes() == []
    assert (cluster.state.phase, cluster.state.ranks) == ("ended", [])


@pytest.mark.slow
def test_of_two_starts_at_once_one_serves_and_the_other_says_so(cluster: LocalCluster):
    both = [cluster.start(*cluster.up, *TWO, "--detach") for _ in range(2)]
    outputs = sorted(process.communicate(timeout=60)[0] for process in both)
    assert sum("is ready at" in output for output in outputs) == 1
    assert sum("Already running" in output or "already runs" in output for output in outputs) == 1
    assert sorted(cluster.ranks()) == [0, 1]
    assert cluster.run("down")[0] == 0
    assert cluster.processes() == []


@pytest.mark.slow
def test_a_port_that_is_taken_is_told_before_any_rank_is_started(cluster: LocalCluster):
    with socket.create_server(("127.0.0.1", cluster.port)):
        code, output = cluster.run(*cluster.up, *TWO)
    assert code == 1
    assert f"Port {cluster.port} of 127.0.0.1 is taken" in output
    assert cluster.processes() == []


@pytest.mark.slow
def test_a_wrong_model_path_is_told_before_any_rank_is_started(cluster: LocalCluster, tmp_path: Path):
    code, output = cluster.run("up", str(tmp_path / "nowhere"), *cluster.up[2:], *TWO)
    assert code == 1
    assert "nowhere" in output
    assert cluster.processes() == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc").exists(), reason="mounts a small disk")
def test_a_full_disk_for_logs_is_warned_about_and_the_cluster_serves_on(cluster: LocalCluster):
    logs = cluster.folders.logs
    logs.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(logs)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount here")
    try:
        with cluster.serving(*TWO):
            (logs / "filler").write_bytes(b"x" * 4096)
            with (logs / "filler").open("ab", buffering=0) as filler, pytest.raises(OSError, match="No space"):
                while True:
                    filler.write(b"x" * 4096)
            lose(cluster, lambda: cluster.ranks()[1].kill())
            assert cluster.complete().status_code == 200
    finally:
        subprocess.run(["umount", "-l", str(logs)], check=True)


@pytest.mark.slow
def test_an_idle_cluster_takes_less_than_two_percent_of_a_core(cluster: LocalCluster):
    with cluster.serving(*TWO):
        idle = [cluster.state.coordinator.process()]
        idle += [record.process.process() for record in cluster.state.ranks if record.rank < 0]
        cluster.complete()
        time.sleep(2)  # what the request has left to do
        before_s, began_s = sum(used_s(process) for process in idle), time.monotonic()
        time.sleep(10)
        share = (sum(used_s(process) for process in idle) - before_s) / (time.monotonic() - began_s)
        print(f"coordinator and mlx.launch together: {share:.2%} of a core")
        assert share < 0.02


def used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
