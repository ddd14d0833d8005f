"""The control socket of rank 0: who may join, messages in and out, heartbeats, and leaving when nobody is there.

Threads here never touch an array. The main thread reads `inbox` and calls `send`, `phase` and `publish`; everything
else happens in the threads, so a main thread stuck in a collective or a long load still answers and still beats.
"""

from __future__ import annotations

import hmac
import os
import queue
import socket
import threading
import time
from importlib.metadata import version
from pathlib import Path

from parallel import wire

VERSION = version("cluster")
BEAT_S = 1.0
JOIN_TIMEOUT_S = 5.0
ALONE_S = 60.0  # how long a coordinator may be away before the rank leaves
ALONE_EXIT_CODE = 3


class Disconnected:
    """Put into the inbox when the coordinator's connection has ended."""


class Control:
    """Listens on `host`:`port` for the coordinator; one at a time is served.

    With `parent`, the end of that process ends this one. `inbox` yields Submit, Abort, Leave and Disconnected.
    Raises OSError when the address is taken.
    """

    def __init__(self, host: str, port: int, secret_file: Path, parent: int = 0) -> None:
        self.inbox: queue.SimpleQueue[wire.Message | Disconnected] = queue.SimpleQueue()
        self._secret = secret_file.read_text().strip()
        self._listener = socket.create_server((host, port), reuse_port=False)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self._greeting: list[wire.Message] = [wire.Progress(0, "starting")]
        self._stats = wire.Stats()
        self._oldest = (0, 0.0)
        self._parent = parent
        self._alone_since = time.monotonic()
        self._closed = threading.Event()
        for run in (self._accept, self._write, self._beat):
            threading.Thread(target=run, name=f"control-{run.__name__}", daemon=True).start()

    # ------------------------------------------------------------ the main thread's side

    def send(self, message: wire.Message) -> None:
        """Queue `message` for the coordinator; dropped when none is connected."""
        self._outbox.put(wire.encode(message))

    def phase(self, message: wire.Progress | wire.Ready) -> None:
        """Send `message`, and greet every coordinator that joins later with it."""
        with self._lock:
            self._greeting = [message]
        self.send(message)

    def publish(self, stats: wire.Stats, oldest: tuple[int, float]) -> None:
        """What the next heartbeats say; `oldest` is the oldest unfinished step and when it was begun."""
        self._stats, self._oldest = stats, oldest

    def fail(self, message: str, wait_s: float = 5.0) -> None:
        """Tell the coordinator why this rank ends, waiting a little for one to join."""
        deadline = time.monotonic() + wait_s
        while self._peer is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.send(wire.Failed(0, message))
        self.flush()

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
            peer.settimeout(JOIN_TIMEOUT_S)
            refusal = self._refusal(wire.read_frame(peer))
            if refusal:
                peer.sendall(wire.encode(wire.Refused(refusal)))
                return
            peer.settimeout(None)
            with self._lock:
                greeting = self._greeting if isinstance(self._greeting[0], wire.Progress) else []
                peer.sendall(wire.encode(greeting[0] if greeting else wire.Progress(0, "ready")))
                if not greeting:
                    peer.sendall(wire.encode(self._greeting[0]))
                self._peer = peer
            while (message := wire.read_frame(peer)) is not None:
                self.inbox.put(message)
        except (OSError, wire.WireError):
            pass  # a peer that breaks off or talks nonsense is a peer that has left
        finally:
            peer.close()
            self._gone(peer)

    def _refusal(self, join: wire.Message | None) -> str:
        """Why `join` is not accepted, or nothing."""
        if not isinstance(join, wire.Join):
            return "the first frame was no Join"
        if not hmac.compare_digest(join.secret, self._secret):
            return "its secret is not this launch's"
        if join.version != VERSION:
            return f"it runs cluster {join.version}, this rank {VERSION}; install the same version on both"
        if self._peer is not None:
            return "another coordinator is connected to it"
        return ""

    def _gone(self, peer: socket.socket) -> None:
        with self._lock:
            if self._peer is not peer:
                return
            self._peer = None
            self._alone_since = time.monotonic()
        self.inbox.put(Disconnected())

    def _write(self) -> None:
        while True:
            frame = self._outbox.get()
            with self._lock:
                peer = self._peer
            if peer is None or frame is None:
                continue
            try:
                peer.sendall(frame)
            except OSError:
                self._gone(peer)

    def _beat(self) -> None:
        """Heartbeats, and the watchdog: a rank whose coordinator is gone for good ends itself."""
        while not self._closed.wait(BEAT_S):
            if self._peer is None:
                orphan = bool(self._parent) and os.getppid() != self._parent
                if orphan or time.monotonic() - self._alone_since > ALONE_S:
                    os._exit(ALONE_EXIT_CODE)
                continue
            step, begun_s = self._oldest
            since_s = time.monotonic() - begun_s if step else 0.0
            name = self._greeting[0].phase if isinstance(self._greeting[0], wire.Progress) else "ready"
            self.send(wire.Beat(0, name, step, since_s, self._stats))
