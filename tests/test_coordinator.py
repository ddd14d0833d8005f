"""Whole coordinator processes, started by the command line, with a rank that has no model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import ClusterConfig
from cluster.coordinator import Launch, bind, is_loopback, reap_leftovers, url_of
from cluster.errors import AddressUnusable, PortTaken
from cluster.paths import Folders
from cluster.state import Claim, ClusterState, ProcessRecord, RankRecord, read_state
from cluster.supervision.launch import free_port

COMMAND = (sys.executable, str(Path(__file__).with_name("cluster_with_fake_rank.py")))
KEY = "s3cret-key"


class Cluster:
    """Runs `cluster` commands in one home folder."""

    def __init__(self, home: Path, model: Path) -> None:
        self.folders = Folders.from_environment({"CLUSTER_HOME": str(home)})
        self.environment = {**os.environ, "CLUSTER_HOME": str(home)}
        self.model = str(model)
        self.port = str(free_port("127.0.0.1"))

    def start(self, *arguments: str, modes: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *modes, "--", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            start_new_session=True,
            **options,
        )

    def run(self, *arguments: str, stdin: str = "", modes: tuple[str, ...] = ()) -> tuple[int, str]:
        process = self.start(*arguments, modes=modes, stdin=subprocess.PIPE)
        output, _ = process.communicate(stdin, timeout=60)
        return process.returncode, output

    @property
    def up(self) -> tuple[str, ...]:
        return ("up", self.model, "--port", self.port)

    @contextlib.contextmanager
    def serving(self, *modes: str) -> Iterator[subprocess.Popen[str]]:
        """`up` in the foreground, ready; killed at the end if it still runs."""
        process = self.start(*self.up, modes=modes)
        try:
            read_until(process, "is ready at")
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.stdout.close()
            process.wait()
            self.run("down")

    @property
    def state(self) -> ClusterState:
        state = read_state(self.folders)
        assert state is not None
        return state


def read_until(process: subprocess.Popen[str], text: str) -> str:
    output = ""
    while text not in output:
        line = process.stdout.readline()
        assert line, f"it ended before {text!r}: {output}"
        output += line
    return output


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def cluster(cluster_home: Path, tiny_model: Path) -> Cluster:
    return Cluster(cluster_home, tiny_model)


@pytest.fixture(scope="module")
def detached(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Cluster]:
    """A detached cluster with an API key, and what its start printed in `.output`."""
    cluster = Cluster(tmp_path_factory.mktemp("detached"), tiny_model)
    cluster.environment["CLUSTER_API_KEY"] = KEY
    code, cluster.output = cluster.run(*cluster.up, "--detach")  # type: ignore[attr-defined]
    assert code == 0, cluster.output  # type: ignore[attr-defined]
    yield cluster
    state = cluster.state
    assert cluster.run("down") == (0, f"Stopped the cluster at {state.url} (pid {state.coordinator.pid}).\n")
    assert [p for p in (state.coordinator, *(r.process for r in state.ranks)) if p.process()] == []


# ---------------------------------------------------------------- a detached cluster, from other terminals


def test_a_detached_start_shows_phases_and_ends_with_the_ready_block(detached):
    assert detached.output.index("warming") < detached.output.index("tiny-llama is ready at http://127.0.0.1:")


def test_the_printed_curl_line_works_when_pasted(detached):
    line = next(line for line in detached.output.splitlines() if line.strip().startswith("curl "))
    assert KEY not in line
    pasted = subprocess.run(["bash", "-c", line], env=detached.environment, capture_output=True, text=True, check=True)
    assert json.loads(pasted.stdout)["choices"][0]["finish_reason"] == "length"


def test_status_tells_the_phase_in_words_and_in_json(detached):
    code, table = detached.run("status")
    assert code == 0
    assert "needs the API key" in table
    code, text = detached.run("status", "--json")
    status = json.loads(text)
    assert (code, status["status"], status["model"], status["running"]) == (0, "ready", "tiny-llama", True)


def test_a_second_up_with_the_same_settings_says_that_it_runs(detached):
    for arguments in (detached.up, (*detached.up, "--detach")):
        code, output = detached.run(*arguments)
        assert code == 0
        assert output.startswith(f"Already running at {detached.state.url}/v1")


def test_a_second_up_with_other_settings_is_refused_and_names_them(detached):
    code, output = detached.run(*detached.up, "--slots", "3", "--queue", "9")
    assert code == 1
    assert "with other settings: slots, queue." in output
    assert "cluster down" in output


def test_a_second_up_with_another_key_is_refused(detached):
    code, output = detached.run(*detached.up, "--api-key", "another")
    assert (code, "with other settings: api-key." in output) == (1, True)


def test_chat_reads_a_pipe_and_prints_the_answer(detached):
    code, output = detached.run("chat", stdin="hello\n")
    assert code == 0
    assert output.strip()
    assert "error" not in output


def test_client_prints_the_models_limits(detached):
    code, output = detached.run("client", "opencode")
    models = json.loads(output)["provider"]["cluster"]["models"]
    assert (code, models["tiny-llama"]["limit"]["context"]) == (0, 4096)


def test_logs_show_both_processes(detached):
    code, output = detached.run("logs", "-n", "2")
    assert code == 0
    assert "coordinator | " in output
    assert "rank 0 | fake rank" in output


def test_the_api_key_is_in_no_file_and_in_no_argument(detached):
    files = [p for f in (detached.folders.state, detached.folders.logs) for p in f.rglob("*") if p.is_file()]
    assert len(files) >= 4
    assert [p for p in files if KEY.encode() in p.read_bytes()] == []
    for record in (detached.state.coordinator, detached.state.ranks[0].process):
        process = record.process()
        assert KEY not in " ".join([*process.cmdline(), *process.environ().values()])


# ---------------------------------------------------------------- ending


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_and_exits_with_0(cluster, number):
    with cluster.serving() as process:
        ranks = cluster.state.ranks
        os.killpg(process.pid, number)
        assert process.wait(20) == 0
        assert ranks[0].process.process() is None
        assert cluster.state.phase == "ended"
        assert not cluster.folders.secret.exists()
    assert "it was stopped" in cluster.run("status")[1]


def test_ctrl_c_with_an_open_stream_ends_the_stream_with_an_error(cluster):
    with cluster.serving("--mute") as process:
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with (
            httpx.Client(trust_env=False, timeout=30) as client,
            client.stream("POST", f"{cluster.state.url}/v1/chat/completions", json=body) as response,
        ):
            assert response.status_code == 200
            os.kill(process.pid, signal.SIGINT)
            assert "error" in "".join(response.iter_text())
        assert process.wait(20) == 0


def test_ctrl_c_during_a_download_does_not_wait_for_it(cluster):
    process = cluster.start(*cluster.up, modes=("endless-download",))
    read_until(process, "resolving")
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(20) == 0
    process.stdout.close()


def test_ctrl_c_while_a_detached_start_is_followed_ends_it(cluster, tmp_path):
    process = cluster.start(*cluster.up, "--detach", modes=("--slow", str(tmp_path / "never")))
    read_until(process, "loading")
    coordinator = cluster.state.coordinator
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(20) != 0
    process.stdout.close()
    assert coordinator.process() is None
    assert cluster.state.ranks == []


def test_after_a_killed_coordinator_the_next_up_ends_its_rank_and_serves(cluster):
    with cluster.serving("--deaf") as process:
        left = cluster.state.ranks[0].process
        process.kill()
        process.wait()
        assert left.process() is not None
        assert "its coordinator was killed" in cluster.run("status")[1]
        with cluster.serving():
            assert left.process() is None
            assert httpx.get(f"{cluster.state.url}/health", trust_env=False).json()["status"] == "ready"


def test_down_ends_what_a_killed_coordinator_left(cluster):
    with cluster.serving("--deaf") as process:
        left = cluster.state.ranks[0].process
        process.kill()
        process.wait()
        code, output = cluster.run("down")
        assert (code, output) == (0, f"Ended rank {left.pid}, left by a cluster that crashed.\n")
        assert left.process() is None


# ---------------------------------------------------------------- starting


def test_of_two_starts_at_once_one_serves_and_the_other_says_so(cluster):
    both = [cluster.start(*cluster.up) for _ in range(2)]
    outputs: list[str] = ["", ""]

    def read(i: int) -> None:
        for line in both[i].stdout:
            outputs[i] += line

    readers = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for reader in readers:
        reader.start()
    until(lambda: any("is ready at" in output for output in outputs))
    until(lambda: any(process.poll() == 0 for process in both))
    assert sorted(process.poll() is None for process in both) == [False, True]
    assert cluster.run("down")[0] == 0
    for reader in readers:
        reader.join()
    assert sorted("Already running" in output for output in outputs) == [False, True]
    for process in both:
        process.wait()
        process.stdout.close()


def test_the_api_answers_while_the_model_loads(cluster, tmp_path):
    go = tmp_path / "go"
    process = cluster.start(*cluster.up, modes=("--slow", str(go)))
    read_until(process, "loading")
    with httpx.Client(trust_env=False, base_url=cluster.state.url, timeout=30) as client:
        health = client.get("/health").json()
        assert (health["status"], health["progress"]["done"]) == ("loading", 500)
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        go.touch()
        read_until(process, "is ready at")
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
    process.terminate()
    process.wait(20)
    process.stdout.close()


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_a_rank_that_fails_to_start_is_an_error_with_its_last_words(cluster, detach):
    code, output = cluster.run(*cluster.up, *detach, modes=("--crash-loading",))
    assert code == 1
    assert "failed while loading: rank 0 on this machine: its process ended with exit code 7" in output
    assert "Traceback: no weights here" in output
    assert "exit code 7" in cluster.run("status")[1]


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_a_taken_port_is_named_with_its_holder(cluster, detach):
    with socket.create_server(("127.0.0.1", int(cluster.port))):
        code, output = cluster.run(*cluster.up, *detach)
    assert code == 1
    assert f"Port {cluster.port} of 127.0.0.1 is taken" in output
    assert "--port" in output


def test_a_wide_address_without_a_key_is_warned_about(cluster):
    process = cluster.start(*cluster.up, "--host", "0.0.0.0")
    output = read_until(process, "is ready at")
    process.terminate()
    process.wait(20)
    process.stdout.close()
    assert "warning: everyone who reaches 0.0.0.0 may use the API" in output
    assert f"is ready at http://127.0.0.1:{cluster.port}/v1" in output


# ---------------------------------------------------------------- parts


def test_a_taken_port_tells_who_holds_it():
    with bind("127.0.0.1", free_port("127.0.0.1")) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"Port {port} of 127.0.0.1 is taken by .*\(pid {os.getpid()}\)"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "message"), [("192.0.2.1", "not an address of this machine"), ("no.such.invalid", "is not known")]
)
def test_an_address_that_cannot_be_bound_is_named(host, message):
    with pytest.raises(AddressUnusable, match=message):
        bind(host, 8080)


def test_a_client_on_this_machine_gets_an_address_it_can_reach():
    hosts = ["127.0.0.1", "0.0.0.0", "::", "::1", "10.0.0.7"]
    assert [url_of(ClusterConfig(host=h)).removesuffix(":8080") for h in hosts] == [
        "http://127.0.0.1",
        "http://127.0.0.1",
        "http://[::1]",
        "http://[::1]",
        "http://10.0.0.7",
    ]


def test_loopback_is_told_from_wider_addresses():
    assert [is_loopback(h) for h in ("127.0.0.1", "127.1.2.3", "localhost", "::1", "0.0.0.0", "::", "10.0.0.7")] == [
        True,
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_launch_survives_its_way_through_stdin(cluster_home):
    folders = Folders.from_environment({"CLUSTER_HOME": str(cluster_home)})
    config = ClusterConfig(model="m", api_key=KEY, cors_origin=("*",), kv_memory=5, stall_timeout=7.0)
    launch = Launch(config, folders, ("python", "-m", "x"), detached=True)
    assert Launch.decode(launch.encode()) == launch


def test_a_leftover_is_known_by_its_start_time_and_not_by_its_pid_alone(cluster_home):
    folders = Folders.from_environment({"CLUSTER_HOME": str(cluster_home)})
    claim = Claim.take(folders)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        record = ProcessRecord.of(process.pid)
        other = ProcessRecord(record.pid, record.started - 1000)
        state = ClusterState(other, "http://x", {}, "", ranks=[RankRecord(0, "this machine", other)])
        claim.write(state)
        assert reap_leftovers(folders) == []
        assert process.poll() is None
        process.kill()
    claim.release()
