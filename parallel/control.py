"""The star at rank 0: who may join, messages in and out, Steps to the other ranks, heartbeats, and leaving.

The coordinator and, where there are several ranks, all others connect here; `follower.py` is the other ranks' side.
Threads here never touch an array. The main thread reads `inbox` and calls the rest; everything else happens in the
threads, so a main thread stuck in a collective or a long load still answers and still beats.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import queue
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from parallel import wire

VERSION = version("cluster")
BEAT_S = 1.0
JOIN_TIMEOUT_S = 5.0
ALONE_S = 60.0  # how long a coordinator may be away before the rank leaves
ALONE_EXIT_CODE = 3
PREDECESSOR_S = 1.0  # for the connection of a coordinator that has gone to end
TCP_RXT_CONNDROPTIME = 0x80  # of macOS's netinet/tcp.h, in seconds
OTHERS_FIRST_S = 0.5  # before a rank of several tells of its own failure
REMEMBERED_STEPS = 1 << 16  # digests kept to compare with other ranks', whose heartbeats are a second old


def versions() -> dict[str, str]:
    """What this process runs on, by package, without importing any of it."""
    found = {"cluster": VERSION, "python": platform.python_version()}
    for package in ("mlx", "mlx-lm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def plan_digest(text: str) -> str:
    """What all ranks of a launch have in common: a hash of the argument that they were given."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_alive(pid: int) -> bool:
    """Whether process `pid` of this machine runs; one that ended and waits for its parent's notice does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_with_its_link(connection: socket.socket) -> None:
    """Have the system end a connection when what was sent is not acknowledged for `ALONE_S`.

    A cable that was pulled ends no connection, and systems go on trying for a quarter of an hour.
    """
    if sys.platform == "darwin":
        connection.setsockopt(socket.IPPROTO_TCP, TCP_RXT_CONNDROPTIME, int(ALONE_S))
    elif hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(ALONE_S * 1000))


class Disconnected:
    """Put into the inbox when the coordinator's connection has ended."""


class Control:
    """Listens on `host`:`port`; one coordinator at a time is served, and ranks 1 to `size` - 1 of the plan `digest`.

    With `parent`, the end of that process ends this one. `inbox` yields Submit, Abort, Leave and Disconnected.
    Raises OSError when the address is taken.
    """

    def __init__(
        self, host: str, port: int, secret_file: Path, parent: int = 0, *, size: int = 1, digest: str = ""
    ) -> None:
        self.inbox: queue.SimpleQueue[wire.Message | Disconnected] = queue.SimpleQueue()
        self._secret = secret_file.read_text().strip()
        self.size = size
        self._digest = digest
        self._versions = versions()
        self._listener = socket.create_server((host, port), reuse_port=False)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards everything below
        self._peer: socket.socket | None = None
        self._followers: dict[int, socket.socket] = {}
        self._arrived: dict[str, dict[int, wire.Fact]] = {}
        self._told: list[wire.Message] = []  # who joined and who was lost, for a coordinator that comes later
        self._greeting: wire.Progress | wire.Ready = wire.Progress(0, "starting")
        self._stats = wire.Stats()
        self._oldest: Callable[[], tuple[int, float, float]] = lambda: (0, 0.0, 0.0)
        self._sent = 0
        self._running = 0
        self._digests: OrderedDict[int, int] = OrderedDict()
        self._parent = parent
        self._alone_since = time.monotonic()
        self._closed = threading.Event()
        self._tell(wire.Joined(0, os.getpid(), psutil.Process().create_time(), self._versions))
        for run in (self._accept, self._write, self._beat):
            threading.Thread(target=run, name=f"control-{run.__name__}", daemon=True).start()

    # ------------------------------------------------------------ the main thread's side

    def send(self, message: wire.Message) -> None:
        """Queue `message` for the coordinator; dropped when none is connected."""
        self._outbox.put(wire.encode(message))

    def phase(self, message: wire.Progress | wire.Ready) -> None:
        """Send `message`, and greet every coordinator that joins later with it."""
        with self._changed:
            self._greeting = message
        self.send(message)

    def publish(self, stats: wire.Stats) -> None:
        """What the next heartbeats say of the engine."""
        self._stats = stats

    def watch(self, oldest: Callable[[], tuple[int, float, float]]) -> None:
        """From now on heartbeats say what `oldest` does: the oldest unfinished step, when it was begun, its expected
        time. A thread calls it, since the main thread may be stuck in that very step.
        """
        self._oldest = oldest

    def meet(self, point: str, fact: wire.Fact) -> list[wire.Fact]:
        """Wait until every other rank has come to `point`, then release them all; everybody's facts, in order.

        How long that may take is the coordinator's business.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._arrived.get(point, {})) == self.size - 1)
            arrived = self._arrived.pop(point, {})
        for rank in sorted(arrived):
            _try_send(self._followers[rank], wire.encode(wire.Go()))
        return [fact, *(arrived[rank] for rank in sorted(arrived))]

    def send_step(self, step: wire.Step) -> None:
        """Hand `step` to every other rank. A rank that does not read blocks this, and its silence is noticed."""
        if self.size == 1:
            return
        frame = wire.encode(step)
        self._running = wire.fold(self._running, memoryview(frame)[wire.HEADER_BYTES :])
        self._sent += 1
        self._digests[self._sent] = self._running
        if len(self._digests) > REMEMBERED_STEPS:
            self._digests.popitem(last=False)
        for follower in self._followers.values():
            _try_send(follower, frame)

    def dismiss(self) -> None:
        """Tell the other ranks to finish and exit."""
        for follower in self._followers.values():
            _try_send(follower, wire.encode(wire.Leave()))

    def fail(self, message: str, wait_s: float = 5.0) -> None:
        """Tell the coordinator why this rank ends, waiting a little for one to join.

        Where another rank is the cause, the end of its connection says so, and goes first.
        """
        if self.size > 1:
            time.sleep(OTHERS_FIRST_S)
        deadline = time.monotonic() + wait_s
        while self._peer is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.send(wire.Failed(0, message))
        self.flush()

    def hung_up(self) -> None:
        """Tell the coordinator that this rank's ssh session has ended."""
        self._tell(wire.HungUp(0))

    def flush(self) -> None:
        """Wait until everything queued has been handed to the socket."""
        self._outbox.put(None)
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while not self._outbox.empty() and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Stop listening and watching; a connection that is open stays until its peer ends it."""
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # ------------------------------------------------------------ threads

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(peer,), name="control-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_with_its_link(peer)
            peer.settimeout(JOIN_TIMEOUT_S)
            join = wire.read_frame(peer)
            refusal = self._refusal(join)
            if refusal or not isinstance(join, wire.Join):
                peer.sendall(wire.encode(wire.Refused(refusal)))
                return
            peer.settimeout(None)
            if join.role == "rank":
                self._serve_rank(peer, join)
            else:
                self._serve_coordinator(peer)
        except (OSError, wire.WireError):
            pass  # a peer that breaks off or talks nonsense is a peer that has left
        finally:
            self._gone(peer)
            peer.close()

    def _serve_coordinator(self, peer: socket.socket) -> None:
        with self._changed:
            greeting = self._greeting
            first = greeting if isinstance(greeting, wire.Progress) else wire.Progress(0, "ready")
            rest = [] if first is greeting else [greeting]
            for known in (first, *self._told, *rest):
                peer.sendall(wire.encode(known))
            self._peer = peer
        while (message := wire.read_frame(peer)) is not None:
            self.inbox.put(message)

    def _serve_rank(self, peer: socket.socket, join: wire.Join) -> None:
        peer.sendall(wire.encode(wire.Go()))
        with self._changed:
            self._followers[join.rank] = peer
            self._changed.notify_all()
        self._tell(wire.Joined(join.rank, join.pid, join.started, join.versions))
        while (message := wire.read_frame(peer)) is not None:
            if isinstance(message, wire.At):
                with self._changed:
                    self._arrived.setdefault(message.point, {})[message.rank] = message.fact
                    self._changed.notify_all()
                continue
            self.send(message)
            if isinstance(message, wire.Beat) and self._digests.get(message.last, message.digest) != message.digest:
                self._tell(wire.Lost(message.rank, f"it executed other steps than rank 0, up to step {message.last}"))

    def _refusal(self, join: wire.Message | None) -> str:
        """Why `join` is not accepted, or nothing."""
        if not isinstance(join, wire.Join):
            return "the first frame was no Join"
        if not hmac.compare_digest(join.secret, self._secret):
            return "its secret is not this launch's"
        if join.version != VERSION:
            return f"it runs cluster {join.version}, this rank {VERSION}; install the same version on both"
        if join.role != "rank":
            with self._changed:  # the end of the last one may not have been noticed yet
                alone = self._changed.wait_for(lambda: self._peer is None, PREDECESSOR_S)
            return "" if alone else "another coordinator is connected to it"
        reason = self._rank_refusal(join)
        if reason:  # nobody sees what a refused rank says before it ends, so the coordinator hears it from here
            self._tell(wire.Failed(join.rank, f"rank 0 refused it: {reason}"))
        return reason

    def _rank_refusal(self, join: wire.Join) -> str:
        differ = [
            f"{name} {join.versions.get(name, 'unknown')} instead of {mine}"
            for name, mine in self._versions.items()
            if join.versions.get(name) != mine
        ]
        if differ:
            return f"it runs {', '.join(differ)}; install the same on all hosts"
        if join.plan != self._digest or not 0 < join.rank < self.size:
            return "it was started for another launch"
        return f"there is a rank {join.rank} already" if join.rank in self._followers else ""

    def _tell(self, message: wire.Message) -> None:
        """Send what concerns other ranks; a coordinator that comes later hears it too."""
        with self._changed:
            self._told.append(message)
        self.send(message)

    def _gone(self, peer: socket.socket) -> None:
        with self._changed:
            rank = next((rank for rank, follower in self._followers.items() if follower is peer), 0)
            if self._peer is peer:
                self._peer = None
                self._alone_since = time.monotonic()
                self.inbox.put(Disconnected())
                self._changed.notify_all()
        if rank:
            self._tell(wire.Lost(rank, "its connection closed"))

    def _write(self) -> None:
        while True:
            frame = self._outbox.get()
            with self._changed:
                peer = self._peer
            if peer is not None and frame is not None and not _try_send(peer, frame):
                self._gone(peer)

    def _beat(self) -> None:
        """Heartbeats, and the watchdog: a rank whose coordinator is gone for good ends itself."""
        while not self._closed.wait(BEAT_S):
            if self._peer is None:
                orphan = bool(self._parent) and not is_alive(self._parent)
                if orphan or time.monotonic() - self._alone_since > ALONE_S:
                    os._exit(ALONE_EXIT_CODE)
                continue
            step, begun_s, expected_s = self._oldest()
            since_s = time.monotonic() - begun_s if step else 0.0
            name = self._greeting.phase if isinstance(self._greeting, wire.Progress) else "ready"
            self.send(wire.Beat(0, name, step, since_s, self._stats, expected_s))


def _try_send(peer: socket.socket, frame: bytes) -> bool:
    """Send to a peer that may be gone; whoever reads from it notices its end."""
    try:
        peer.sendall(frame)
    except OSError:
        return False
    return True
