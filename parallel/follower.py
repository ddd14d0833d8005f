"""The side of every rank but 0 in the control star: join, wait to be released, take Steps, beat, leave.

Threads here never touch an array. The end of the connection to rank 0 ends this process, also while its main thread is
stuck in a collective.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from pathlib import Path

import psutil

from parallel import wire
from parallel.control import (
    ALONE_EXIT_CODE,
    BEAT_S,
    JOIN_TIMEOUT_S,
    OTHERS_FIRST_S,
    VERSION,
    end_with_its_link,
    versions,
)

JOIN_PATIENCE_S = 60.0  # for rank 0 to listen
LEAVE_S = 5.0  # for the main thread to come out of its last step


class JoinRefused(Exception):
    """Rank 0 does not take this rank, or was not there; the message says why."""


class Follower:
    """The connection of rank `rank` to rank 0 of `plan`, whose hash is `digest`. Raises JoinRefused, OSError.

    `steps` yields Steps in order, then None when this rank is to leave.
    """

    def __init__(self, plan: wire.RankPlan, rank: int, digest: str) -> None:
        self.steps: queue.SimpleQueue[wire.Step | None] = queue.SimpleQueue()
        self.rank = rank
        self._secret = Path(plan.of(rank).secret_file).read_text().strip()
        self._go = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._phase = "starting"
        self._stats = wire.Stats()
        self._step, self._begun_s = 0, 0.0
        self._taken = (0, 0)  # steps, and the digest of them all
        self._leaving = False
        self._socket = self._connect(plan.host, plan.port)
        self._join(digest)
        for run in (self._read, self._beat):
            threading.Thread(target=run, name=f"follower-{run.__name__}", daemon=True).start()

    # ------------------------------------------------------------ the main thread's side

    def phase(self, message: wire.Progress) -> None:
        """Report start-up."""
        self._phase = message.phase
        self._send(message)

    def meet(self, point: str, fact: wire.Fact) -> list[wire.Fact]:
        """Come to `point` and wait to be released from it; only this rank's own `fact` is returned."""
        self._send(wire.At(self.rank, point, fact))
        self._go.acquire()
        return [fact]

    def doing(self, phase: str, step: int = 0) -> None:
        """What heartbeats say the main thread does, and in which step."""
        if step != self._step:
            self._step, self._begun_s = step, time.monotonic()
        self._phase = phase

    def publish(self, stats: wire.Stats) -> None:
        """What the next heartbeats say of this rank's memory and time."""
        self._stats = stats

    def fail(self, message: str) -> None:
        """Tell the coordinator, through rank 0, why this rank ends.

        Where another rank is the cause, the end of its connection says so, and goes first.
        """
        time.sleep(OTHERS_FIRST_S)
        self._send(wire.Failed(self.rank, message))

    def hung_up(self) -> None:
        """Tell the coordinator, through rank 0, that this rank's ssh session has ended. Any thread may."""
        self._send(wire.HungUp(self.rank))

    # ------------------------------------------------------------ joining

    @staticmethod
    def _connect(host: str, port: int) -> socket.socket:
        end = time.monotonic() + JOIN_PATIENCE_S
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=JOIN_TIMEOUT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end_with_its_link(connection)
                return connection
            except OSError as error:
                if time.monotonic() > end:
                    raise JoinRefused(f"rank 0 does not answer at {host}:{port}: {error}") from error
                time.sleep(0.1)

    def _join(self, digest: str) -> None:
        started = psutil.Process().create_time()
        self._send(
            wire.Join(self._secret, "rank", VERSION, self.rank, os.getpid(), started, versions(), digest),
        )
        answer = wire.read_frame(self._socket)
        if not isinstance(answer, wire.Go):
            reason = answer.reason if isinstance(answer, wire.Refused) else "it closed the connection"
            raise JoinRefused(f"rank 0 refused rank {self.rank}: {reason}")
        self._socket.settimeout(None)

    # ------------------------------------------------------------ threads

    def _read(self) -> None:
        try:
            while (body := wire.read_body(self._socket)) is not None:
                message = wire.decode(body)
                if isinstance(message, wire.Step):
                    self._taken = (self._taken[0] + 1, wire.fold(self._taken[1], body))
                    self.steps.put(message)
                elif isinstance(message, wire.Go):
                    self._go.release()
                elif isinstance(message, wire.Leave):
                    self._leaving = True
                    self.steps.put(None)
                    break
        except (OSError, wire.WireError):
            pass  # as good as closed
        if self._leaving:
            time.sleep(LEAVE_S)
        os._exit(ALONE_EXIT_CODE)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            last, digest = self._taken
            since_s = time.monotonic() - self._begun_s if self._step else 0.0
            self._send(
                wire.Beat(self.rank, self._phase, self._step, since_s, self._stats, last=last, digest=digest),
            )

    def _send(self, message: wire.Message) -> None:
        with self._lock, contextlib.suppress(OSError):  # _read notices
            self._socket.sendall(wire.encode(message))
