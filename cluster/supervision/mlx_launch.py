"""Starts several ranks through mlx.launch, and does what mlx.launch does not: labels, ends and verifies.

mlx.launch exits with 0 when a rank fails, leaves ranks behind when it is ended, mixes their output, and burns a core
while it waits. So the ranks are watched through their own messages, ended by pid and start time, told apart by the
label that each puts before its lines, and its waiting is cured by filling the ranks' stdin, which they never read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from cluster.cabling.hostfile import write as write_hostfile
from cluster.errors import ClusterError, PortTaken
from cluster.logs import LogFile
from cluster.paths import Folders
from cluster.state import ProcessRecord
from cluster.supervision.arrange import Arrangement
from cluster.supervision.deploy import Deployment
from cluster.supervision.launch import RANK_COMMAND, end_process, in_words, rank_environment
from cluster.supervision.sites import Sites, python_argv
from parallel import wire

LAUNCHER = -1  # stands for mlx.launch itself where ranks are numbered
LABEL = re.compile(rb"\[rank (\d+)\] ")
EXIT = re.compile(rb"Node with rank (\d+) exited with code (-?\d+)")
FIRST_PORT, LAST_PORT = 32323, 60000
FILL_BYTES = 1 << 22  # more than all that holds bytes between mlx.launch and a rank: pipes, and 2 MiB in ssh
HUNG = "did not come out of joining the others and ended itself by SIGALRM"  # set by group.connect
FLUSH_S = 2.0  # for mlx.launch to pass on the last output and end, once the ranks are gone
SYNCH = "MLX_METAL_FAST_SYNCH"
SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"


def launcher() -> str:
    """The mlx.launch of this environment."""
    return str(Path(sys.executable).with_name("mlx.launch"))


def launch_argv(
    plan: wire.RankPlan,
    arrangement: Arrangement,
    hostfile: Path,
    port: int,
    variables: Sequence[str],
    command: Sequence[str],
) -> list[str]:
    """What a person would type to start these ranks by hand."""
    words = [*command, msgspec.json.encode(plan).decode()]
    if plan.size == 1:  # which mlx.launch cannot do with every backend
        return ["ssh", "-tt", "--", plan.of(0).host, f"{' '.join(map(shlex.quote, variables))} {shlex.join(words)}"]
    argv = [launcher(), "--hostfile", str(hostfile), "--backend", arrangement.backend]
    argv += ["--nccl-port" if arrangement.backend == "nccl" else "--starting-port", str(port)]
    argv += [word for name in variables for word in ("--env", name)]
    return [*argv, "--", *words]


def synch_variables(arrangement: Arrangement, fast_synch: str) -> list[str]:
    """Variables for all ranks. Automatic: on for tensor parallel over RDMA, where each token waits for the CPU twice a
    layer; else off. What the hostfile's envs say wins over that."""
    given = any(entry.startswith(f"{SYNCH}=") for entry in arrangement.hostfile.envs)
    if fast_synch == "auto" and given:
        return []
    pays = arrangement.strategy == "tensor" and arrangement.backend.startswith("jaccl")
    return [f"{SYNCH}={int(fast_synch == 'on' or (fast_synch == 'auto' and pays))}"]


def remote_variables(deployment: Deployment, environment: Mapping[str, str]) -> list[str]:
    """Variables that ranks on other hosts need; they do not inherit ours."""
    names = ["PYTHONUNBUFFERED"]
    if deployment.systems == {"Linux"}:
        names += ["LD_PRELOAD", "OPENBLAS_NUM_THREADS"]
    return [f"{name}={environment[name]}" for name in names if environment.get(name)]


def patient_ssh(folders: Folders) -> Path:
    """A folder with an `ssh` for mlx.launch, which calls it without any of the options that keep it from hanging.

    It never asks, gives up on a host that does not answer, and notices a connection that has died.
    """
    folder = folders.state / "bin"
    folder.mkdir(exist_ok=True)
    script = folder / "ssh"
    own = shutil.which("ssh") or "ssh"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(own)} {SSH_OPTIONS} "$@"\n')
    script.chmod(0o700)
    return folder


def free_ports(host: str, count: int) -> int:
    """The first of `count` ports in a row that nobody listens on at `host`. Raises PortTaken.

    Anywhere in the range, since they are taken only seconds later, and another cluster may start here meanwhile.
    """
    firsts = range(FIRST_PORT, LAST_PORT - count, count)
    for first in random.sample(firsts, len(firsts)):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probe = stack.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            return first
    raise PortTaken(f"No {count} ports in a row are free at {host} between {FIRST_PORT} and {LAST_PORT}.")


class LaunchedRanks:
    """mlx.launch as our child, and the ranks that it started. What they print goes to a log for each.

    With `sites`, ranks run on other hosts and are ended there.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        logs: dict[int, LogFile],
        plan: wire.RankPlan,
        sites: Sites | None = None,
    ) -> None:
        self._process = process
        self._logs = logs
        self._size = plan.size
        self._launch = plan.launch
        self._sites = sites
        self._ranks: dict[int, ProcessRecord] = {}
        self.reports: dict[str, wire.Reaped | ClusterError] = {}  # by host, once it is stopped
        self.exits: dict[int, str] = {}  # how the process of a rank ended, as far as mlx.launch has said it
        self._speaking = LAUNCHER if plan.size > 1 else 0  # a rank alone puts no label before its lines
        self._output = asyncio.create_task(self._copy(), name="ranks-output")
        self.launcher = ProcessRecord.of(process.pid)

    @classmethod
    async def start(
        cls,
        plan: wire.RankPlan,
        arrangement: Arrangement,
        folders: Folders,
        *,
        fast_synch: str = "auto",
        command: Sequence[str] = RANK_COMMAND,
        deployment: Deployment | None = None,
    ) -> LaunchedRanks:
        """Start `command` on every host. Raises FolderUnusable when a log or the hostfile cannot be written.

        mlx.launch gets a session of its own: a Ctrl-C in the terminal reaches the coordinator only, which stops it in
        order. Ranks on this machine share its cores.
        """
        logs = {LAUNCHER: LogFile(folders.launcher_log)}
        logs |= {rank: LogFile(folders.rank_log(rank)) for rank in range(plan.size)}
        hostfile = folders.state / "hostfile.json"
        write_hostfile(arrangement.hostfile, hostfile)
        environment = rank_environment(os.environ)
        sites, variables = None, synch_variables(arrangement, fast_synch)
        if deployment is not None:
            sites, command = deployment.sites, (*python_argv(deployment.sites.python), "-m", "parallel.rank")
            variables += remote_variables(deployment, environment)
            environment["PATH"] = f"{patient_ssh(folders)}{os.pathsep}{environment['PATH']}"
            port = random.randrange(FIRST_PORT, LAST_PORT)
        else:
            port = free_ports("127.0.0.1", sum(len(host.ips) for host in arrangement.hostfile.hosts) or 1)
        if arrangement.local:
            threads = max(1, (os.cpu_count() or 1) // plan.size)
            environment = {"OPENBLAS_NUM_THREADS": str(threads)} | environment
        process = await asyncio.create_subprocess_exec(
            *launch_argv(plan, arrangement, hostfile, port, variables, command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        return cls(process, logs, plan, sites)

    def joined(self, message: wire.Joined) -> None:
        """A rank has said which process it is. Once all have, mlx.launch is given what cures its waiting."""
        self._ranks[message.rank] = ProcessRecord(message.pid, message.started)
        stdin = self._process.stdin
        if len(self._ranks) == self._size and stdin is not None and not stdin.is_closing():
            with contextlib.suppress(OSError):
                stdin.write(b"\n" * FILL_BYTES)

    @property
    def processes(self) -> dict[int, ProcessRecord]:
        """mlx.launch, under LAUNCHER, and the ranks that have joined."""
        return {LAUNCHER: self.launcher, **self._ranks}

    @property
    def errors(self) -> list[str]:
        """Why logs are not written, where they are not."""
        return [log.error for log in self._logs.values() if log.error]

    def last_lines(self, count: int) -> list[str]:
        """The last words of every rank and of mlx.launch, at most `count` lines each."""
        return [
            f"{'mlx.launch' if rank == LAUNCHER else f'rank {rank}'} | {line}"
            for rank, log in sorted(self._logs.items())
            for line in log.last_lines(count)
        ]

    async def ended(self) -> str:
        """Wait for the end of mlx.launch; how it ended, in words."""
        code = await self._process.wait()
        return f"mlx.launch {in_words(code)}"

    async def stop(self, grace_s: float, patience_s: float = 0.0) -> None:
        """End every rank, then mlx.launch: SIGTERM, SIGKILL after `grace_s` seconds. Returns when all are gone.

        First they have `patience_s` seconds to end by themselves: a rank that fails still has to say where. mlx.launch
        goes last, since what it has not passed on is lost; a rank that it has started meanwhile is ended after it.
        Raises ProcessStuck.
        """
        ranks = self._started()
        await self._gone(patience_s, ranks)
        if self._sites is not None:
            self.reports = await asyncio.to_thread(self._sites.end, self._launch, grace_s)
        self._signal(signal.SIGTERM, ranks)
        await asyncio.to_thread(_end, ranks, grace_s)
        await self._gone(FLUSH_S if ranks or self._ranks else 0, [self.launcher])
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        while late := self._started():
            await asyncio.to_thread(_end, late, grace_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._output), 1)
        self._output.cancel()
        await asyncio.gather(self._output, return_exceptions=True)
        for log in self._logs.values():
            log.close()

    def kill(self) -> None:
        """SIGKILL, also to ranks that are stopped; `stop` then returns at once."""
        self._signal(signal.SIGKILL, [*self._started(), self.launcher])

    def _started(self) -> list[ProcessRecord]:
        """What mlx.launch has started here and still runs: ranks, joined or not, and what labels their lines.

        They are in its session, whoever their parent is by now.
        """
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                if pid != self.launcher.pid and os.getsid(pid) == self.launcher.pid:
                    found.append(ProcessRecord.of(pid))
        return [record for record in found if record.process() is not None]

    @staticmethod
    async def _gone(patience_s: float, processes: list[ProcessRecord]) -> None:
        """Wait until all `processes` have ended, at most `patience_s` seconds."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end and any(record.process() is not None for record in processes):
            await asyncio.sleep(0.02)

    @staticmethod
    def _signal(number: signal.Signals, processes: list[ProcessRecord]) -> None:
        for record in processes:
            if (process := record.process()) is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    async def _copy(self) -> None:
        """Every line to the log of the rank whose label it bears; a line without goes where the last one went."""
        assert self._process.stdout is not None
        rest = b""
        while part := await self._process.stdout.read(1 << 16):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                self._write(line + b"\n")
        if rest:
            self._write(rest + b"\n")

    def _write(self, line: bytes) -> None:
        if exits := EXIT.findall(line):
            self.exits |= {
                int(rank): HUNG if int(code) == -signal.SIGALRM else in_words(int(code)) for rank, code in exits
            }
            self._logs[LAUNCHER].write(line)
            return
        if label := LABEL.match(line):
            self._speaking = int(label[1])
            line = line[label.end() :]
        self._logs.get(self._speaking, self._logs[LAUNCHER]).write(line.replace(b"\r", b""))


def _end(processes: list[ProcessRecord], grace_s: float) -> None:
    for record in processes:
        end_process(record, grace_s)
