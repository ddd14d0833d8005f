"""Starting and ending processes."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import FolderUnusable
from cluster.state import ProcessRecord
from cluster.supervision.launch import RankProcess, end_process, free_port, rank_environment, start_detached
from parallel.wire import RankPlan

PLAN = RankPlan("/models/m", "127.0.0.1", 1, "/secret")
DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
linux = pytest.mark.skipif(sys.platform != "linux", reason="the reference BLAS is in the Linux wheel only")


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.fixture
def openblas(tmp_path: Path) -> Path:
    library = tmp_path / f"{platform.machine()}-linux-gnu" / "openblas-pthread" / "libopenblas.so.0"
    library.parent.mkdir(parents=True)
    library.touch()
    return library


@linux
def test_openblas_is_preloaded_where_it_is_installed(tmp_path, openblas):
    assert rank_environment({}, tmp_path)["LD_PRELOAD"] == str(openblas)


@linux
def test_what_the_user_preloads_stays(tmp_path, openblas):
    assert rank_environment({"LD_PRELOAD": "mine.so"}, tmp_path)["LD_PRELOAD"] == f"{openblas}:mine.so"


def test_nothing_is_preloaded_where_it_is_not_installed(tmp_path):
    assert "LD_PRELOAD" not in rank_environment({}, tmp_path)


def test_a_rank_does_not_learn_the_api_key():
    environment = rank_environment({"CLUSTER_API_KEY": "s3cret", "PATH": "/bin"})
    assert "CLUSTER_API_KEY" not in environment
    assert environment["PATH"] == "/bin"


async def test_a_rank_gets_the_plan_as_its_last_argument_and_its_output_is_in_the_log(tmp_path):
    rank = await RankProcess.start(PLAN, tmp_path / "log", python("import sys; print(sys.argv[-1])"))
    assert await rank.ended() == "its process ended with exit code 0"
    await rank.stop(1)
    assert json.loads((tmp_path / "log").read_text())["secret_file"] == "/secret"


async def test_the_last_words_of_a_crash_are_known(tmp_path):
    rank = await RankProcess.start(PLAN, tmp_path / "log", python("raise MemoryError('too big')"))
    assert await rank.ended() == "its process ended with exit code 1"
    assert rank.log.last_lines(1) == ["MemoryError: too big"]
    await rank.stop(1)


async def test_a_rank_is_in_a_session_of_its_own(tmp_path):
    rank = await RankProcess.start(PLAN, tmp_path / "log", python("import signal; signal.pause()"))
    assert os.getsid(rank.record.pid) != os.getsid(0)
    await rank.stop(5)


async def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    rank = await RankProcess.start(PLAN, tmp_path / "log", python(DEAF))
    while rank.log.last_lines(1) != ["up"]:
        await asyncio.sleep(0.01)
    await rank.stop(0.1)
    assert await rank.ended() == "its process was ended by SIGKILL"
    assert rank.record.process() is None


async def test_a_log_that_cannot_be_written_stops_the_launch(tmp_path):
    with pytest.raises(FolderUnusable, match="absent"):
        await RankProcess.start(PLAN, tmp_path / "absent" / "log", python(""))


def test_a_process_that_is_not_our_child_is_ended_by_pid_and_start_time():
    with subprocess.Popen(python(DEAF), stdout=-1) as process:
        process.stdout.readline()
        record = ProcessRecord.of(process.pid)
        assert not end_process(ProcessRecord(record.pid, record.started - 100), 0.1)
        assert process.poll() is None
        assert end_process(record, 0.1)
        process.wait()
        assert not end_process(record, 0.1)


def test_a_free_port_is_free():
    import socket

    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))):
        pass


def test_a_detached_process_reads_its_launch_from_stdin_and_logs_to_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CLUSTER_API_KEY", "s3cret")
    code = "import os, sys; print(sys.stdin.read(), os.getsid(0) == os.getpid(), 'CLUSTER_API_KEY' in os.environ)"
    process = start_detached(b"the launch", tmp_path / "log", python(code))
    assert process.wait() == 0
    assert (tmp_path / "log").read_text() == "the launch True False\n"


def test_a_detached_process_that_ends_at_once_is_told_by_its_exit_code(tmp_path):
    process = start_detached(b"x" * (1 << 20), tmp_path / "log", python("import os; os._exit(3)"))
    assert process.wait() == 3
