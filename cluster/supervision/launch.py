"""Starts and ends processes: the rank, as a direct child, and a detached coordinator. Owns their output.

It does not decide when; `supervise.py` and `coordinator.py` do. The only module that writes environment variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from cluster.errors import ProcessStuck
from cluster.logs import LogFile
from cluster.state import ProcessRecord
from parallel import wire

RANK_COMMAND = (sys.executable, "-m", "parallel.rank")
COORDINATOR_COMMAND = (sys.executable, "-m", "cluster.coordinator")
OPENBLAS = "openblas-pthread/libopenblas.so.0"


def rank_environment(environment: Mapping[str, str], libraries: Path = Path("/usr/lib")) -> dict[str, str]:
    """The environment of a rank, from the coordinator's.

    On Linux, Debian's OpenBLAS is preloaded when installed (`libraries` is where to look): the CPU wheel of MLX carries
    a slow reference BLAS, and OpenBLAS makes products of 8-256 float32 rows 5 to 50 times faster. MLX's CUDA build
    keeps 400 graphs unless told otherwise, and every number of rows in a batch is one of its own.
    """
    result = {name: value for name, value in environment.items() if name != "CLUSTER_API_KEY"}
    result["PYTHONUNBUFFERED"] = "1"  # so that its last words are in the log when it is killed
    if sys.platform == "linux":
        result.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", "4000")
        found = sorted(libraries.glob(f"{platform.machine()}-linux-gnu*/{OPENBLAS}"))
        if found:
            result["LD_PRELOAD"] = ":".join(filter(None, [str(found[0]), environment.get("LD_PRELOAD")]))
    return result


def quiet_libraries() -> None:
    """Keep transformers from advising, on the terminal of `cluster up`, to install PyTorch. Call before its import."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def in_words(code: int) -> str:
    """How a process ended, from its exit code (negative: a signal)."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def free_port(host: str) -> int:
    """A TCP port of `host` that nobody listens on now. Should it be taken before use, the rank says so and ends."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class RankProcess:
    """A rank that is our child. What it prints goes through a pipe to its log, so a full disk is not its problem."""

    def __init__(self, process: asyncio.subprocess.Process, log: LogFile) -> None:
        self._process = process
        self._output = asyncio.create_task(self._copy(), name="rank-output")
        self.log = log
        try:
            self.record = ProcessRecord.of(process.pid)
        except psutil.NoSuchProcess:  # it ended at once
            self.record = ProcessRecord(process.pid, time.time())

    @classmethod
    async def start(cls, plan: wire.RankPlan, log_path: Path, command: Sequence[str] = RANK_COMMAND) -> RankProcess:
        """Start `command` with the plan as its last argument. Raises FolderUnusable when its log cannot be written.

        It gets a session of its own: a Ctrl-C in the terminal reaches the coordinator only, which stops it in order.
        """
        log = LogFile(log_path)
        process = await asyncio.create_subprocess_exec(
            *command,
            msgspec.json.encode(plan).decode(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=rank_environment(os.environ),
            start_new_session=True,
        )
        return cls(process, log)

    async def ended(self) -> str:
        """Wait for its end; how it ended, in words."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # a grandchild may hold the pipe open
            await asyncio.wait_for(asyncio.shield(self._output), 1)
        return f"its process {in_words(code)}"

    @property
    def processes(self) -> dict[int, ProcessRecord]:
        """The process of each rank."""
        return {0: self.record}

    @property
    def errors(self) -> list[str]:
        """Why its log is not written, when it is not."""
        return [self.log.error] if self.log.error else []

    def last_lines(self, count: int) -> list[str]:
        """Its last words."""
        return self.log.last_lines(count)

    def joined(self, message: wire.Joined) -> None:
        """It has said which process it is; we know."""

    async def stop(self, grace_s: float, patience_s: float = 0.0) -> None:
        """SIGTERM, then SIGKILL after `grace_s` seconds; returns when the process is gone and its output is read.

        First it has `patience_s` seconds to end by itself.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), patience_s)
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                self.kill()
        await self.ended()
        self._output.cancel()
        await asyncio.gather(self._output, return_exceptions=True)
        self.log.close()

    def kill(self) -> None:
        """SIGKILL, also to a rank that is stopped; `stop` then returns at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _copy(self) -> None:
        assert self._process.stdout is not None
        while part := await self._process.stdout.read(1 << 16):
            self.log.write(part)


def end_process(record: ProcessRecord, grace_s: float) -> bool:
    """End a process that need not be our child, by pid and start time: SIGTERM, SIGKILL after `grace_s` seconds.

    False when it was gone already. Blocks until it is gone. Raises ProcessStuck.
    """
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        if (process := record.process()) is None:
            return number == signal.SIGKILL
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        if _gone(record, patience_s):
            return True
    raise ProcessStuck(
        f"Process {record.pid} on this machine does not end, not even by SIGKILL: the system or its GPU holds it.",
        hint="Reboot this machine to get its memory back.",
    )


def _gone(record: ProcessRecord, patience_s: float) -> bool:
    """Wait for the end of a process; one that only waits for its parent to take note of it is gone."""
    end = time.monotonic() + patience_s
    while record.process() is not None:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def start_detached(
    launch: bytes, log_path: Path, command: Sequence[str] = COORDINATOR_COMMAND
) -> subprocess.Popen[bytes]:
    """Start a coordinator in a session of its own, its output in `log_path`, and hand it `launch` on stdin.

    Through stdin, because argv and environment of a process can be read by others and the launch holds the API key.
    """
    log = LogFile(log_path)
    environment = {name: value for name, value in os.environ.items() if name != "CLUSTER_API_KEY"}
    with open(log_path, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    log.close()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # it ended at once; its exit code tells
        process.stdin.write(launch)
    return process
