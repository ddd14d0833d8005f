"""What other terminals do with a running cluster, or with what is left of one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.errors import HostUnreachable, NothingRuns, ServerUnanswering, StartFailed
from cluster.paths import Folders
from cluster.running import ask, end, find, log_lines, wait_ready
from cluster.state import Claim, ClusterState, ProcessRecord, RankRecord

GONE = ProcessRecord(os.getpid(), 1.0)


@pytest.fixture
def folders(cluster_home: Path) -> Folders:
    folders = Folders.from_environment({"CLUSTER_HOME": str(cluster_home)})
    folders.make()
    return folders


@pytest.fixture
def record(folders: Folders) -> Iterator[Callable[..., ClusterState]]:
    """Write a record; its coordinator is this process unless told otherwise."""
    claim = Claim.take(folders)
    assert claim is not None

    def write(**fields: Any) -> ClusterState:
        plain = ClusterState(ProcessRecord.of(os.getpid()), "http://127.0.0.1:9", {}, "", model="tiny")
        state = msgspec.structs.replace(plain, **fields)
        claim.write(state)
        return state

    yield write
    claim.release()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


def test_a_running_cluster_is_found(folders, record):
    state = record(phase="ready")
    assert find(folders) == state


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"phase": "ended"}, r"\(tiny\) ended: it was stopped\."),
        ({"phase": "ended", "reason": "Out of memory.\nmore"}, r"ended: Out of memory\.$"),
        ({"coordinator": GONE, "phase": "ready"}, "its coordinator was killed"),
    ],
)
def test_a_cluster_that_is_gone_tells_how_it_ended(folders, record, fields, words):
    record(**fields)
    with pytest.raises(NothingRuns, match=words):
        find(folders)


def test_an_api_that_does_not_answer_is_named(record):
    with pytest.raises(ServerUnanswering, match=r"http://127\.0\.0\.1:9 does not answer"):
        ask(record())


def test_an_answer_counts_whatever_its_status(record):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"status": "loading"}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            assert ask(record(url=f"http://127.0.0.1:{server.server_port}")) == {"status": "loading"}
        finally:
            server.shutdown()
            thread.join()


def test_there_is_nothing_to_end_before_the_first_run(folders):
    assert end(folders) is None


def test_there_is_nothing_to_end_after_a_clean_end(folders, record):
    record(phase="ended")
    assert end(folders) is None


def test_ending_ends_the_coordinator_and_the_rank_it_left(folders, record):
    with sleeper() as coordinator, sleeper() as rank:
        record(
            coordinator=ProcessRecord.of(coordinator.pid),
            ranks=[RankRecord(0, "this machine", ProcessRecord.of(rank.pid))],
        )
        assert end(folders) == f"Stopped the cluster at http://127.0.0.1:9 (pid {coordinator.pid})."
        assert (coordinator.wait(10), rank.wait(10)) == (-15, -15)


def test_the_rank_of_a_killed_coordinator_is_ended(folders, record):
    with sleeper() as rank:
        record(coordinator=GONE, ranks=[RankRecord(0, "this machine", ProcessRecord.of(rank.pid))])
        assert end(folders) == f"Ended rank {rank.pid}, left by a cluster that crashed."
        assert rank.wait(10) == -15


def test_hosts_to_reboot_are_told_with_the_end(folders, record):
    with sleeper() as coordinator:
        reboot = "reboot a if nothing else uses it: 99.0 GB of memory did not come back"
        record(coordinator=ProcessRecord.of(coordinator.pid), warnings=[reboot, "b could not be asked"])
        assert end(folders).splitlines()[1:] == [reboot]
        coordinator.wait(10)


def test_a_host_that_cannot_be_asked_is_named_and_the_rest_is_ended_all_the_same(folders, record):
    with sleeper() as coordinator:
        record(coordinator=ProcessRecord.of(coordinator.pid), launch="1", hosts=["nowhere.invalid"])
        with pytest.raises(HostUnreachable) as error:
            end(folders)
        assert coordinator.wait(10) == -15
    assert error.value.message.startswith(f"Stopped the cluster at http://127.0.0.1:9 (pid {coordinator.pid}).\n")
    assert "nowhere.invalid could not be asked whether its ranks have ended: " in error.value.message


def test_a_detached_start_that_ends_tells_its_recorded_reason(folders, record):
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]) as process:
        record(coordinator=ProcessRecord(process.pid, 1.0), phase="ended", reason="No such model.", hint="Try another.")
        with pytest.raises(StartFailed, match="No such model") as error:
            wait_ready(process, folders, lambda health: None)
    assert error.value.hint == "Try another."


def test_a_detached_start_that_crashes_tells_the_last_lines_of_its_log(folders):
    folders.coordinator_log.write_text("Traceback\nKeyError: ours\n")
    with (
        subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"]) as process,
        pytest.raises(StartFailed, match=r"exit code 5(.|\n)*KeyError: ours"),
    ):
        wait_ready(process, folders, lambda health: None)


def test_the_last_lines_of_each_log_carry_the_name_of_their_process(folders):
    folders.coordinator_log.write_text("a\nb\nc\n")
    folders.rank_log(0).write_text("x\ny\n")
    folders.rank_log(1).write_text("z\n")
    lines = list(log_lines(folders, count=2, goes_on=None))
    assert lines == ["coordinator | b", "coordinator | c", "rank 0 | x", "rank 0 | y", "rank 1 | z"]


def test_following_goes_on_until_the_cluster_ends(folders):
    folders.coordinator_log.write_text("a\n")
    folders.rank_log(0).write_text("x\n")
    running = True
    lines = log_lines(folders, count=1, goes_on=lambda: running)
    assert [next(lines), next(lines)] == ["coordinator | a", "rank 0 | x"]

    def write() -> None:
        nonlocal running
        with folders.rank_log(0).open("a") as file:
            file.write("y\n")
        running = False

    writer = threading.Timer(0.1, write)
    writer.start()
    assert list(lines) == ["rank 0 | y"]
    writer.join()
