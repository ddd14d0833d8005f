"""The control socket: who may join, what is queued, and the rank as a real process behind it."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from processes import ends

from parallel import wire
from parallel.control import VERSION, Control, Disconnected

WAIT_S = 60.0
T = TypeVar("T")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("sesame\n")
    return path


@pytest.fixture
def control(secret: Path) -> Iterator[Control]:
    control = Control("127.0.0.1", free_port(), secret)
    yield control
    control.close()


class Peer:
    """A coordinator at the other end of the socket."""

    def __init__(self, port: int, secret: str = "sesame", version: str = VERSION) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self.send(wire.Join(secret, "coordinator", version))

    def send(self, message: wire.Message) -> None:
        self.socket.sendall(wire.encode(message))

    def read(self) -> wire.Message | None:
        return wire.read_frame(self.socket)

    def until(self, *kinds: type[T]) -> T:
        """The next message of one of `kinds`; others are passed over."""
        while (message := self.read()) is not None:
            if isinstance(message, kinds):
                return message
        raise AssertionError(f"closed before a {' or '.join(kind.__name__ for kind in kinds)}")

    def close(self) -> None:
        self.socket.close()


def port_of(control: Control) -> int:
    return int(control._listener.getsockname()[1])


def test_who_knows_the_secret_is_greeted_with_the_phase(control: Control) -> None:
    control.phase(wire.Progress(0, "loading", 3, 9))
    peer = Peer(port_of(control))
    assert peer.read() == wire.Progress(0, "loading", 3, 9)
    peer.close()


@pytest.mark.parametrize(
    ("secret_given", "version", "reason"),
    [("wrong", VERSION, "secret"), ("sesame", "0.0.1", "install the same version")],
)
def test_who_does_not_belong_is_refused_with_the_reason(
    control: Control, secret_given: str, version: str, reason: str
) -> None:
    peer = Peer(port_of(control), secret_given, version)
    answer = peer.read()
    assert isinstance(answer, wire.Refused) and reason in answer.reason
    assert peer.read() is None
    peer.close()


def test_a_stream_that_is_not_ours_is_closed_and_the_next_one_served(control: Control) -> None:
    with socket.create_connection(("127.0.0.1", port_of(control)), timeout=WAIT_S) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert noise.recv(10) == b""
    peer = Peer(port_of(control))
    assert isinstance(peer.read(), wire.Progress)
    peer.close()


def test_a_second_coordinator_is_refused_while_the_first_is_there(control: Control) -> None:
    first = Peer(port_of(control))
    first.read()
    second = Peer(port_of(control))
    answer = second.read()
    assert isinstance(answer, wire.Refused) and "another coordinator" in answer.reason
    first.close()
    second.close()


def test_messages_arrive_in_order_and_the_end_is_told(control: Control) -> None:
    peer = Peer(port_of(control))
    peer.read()
    for id in range(1, 4):
        peer.send(wire.Abort(id))
    assert [control.inbox.get(timeout=WAIT_S) for _ in range(3)] == [wire.Abort(1), wire.Abort(2), wire.Abort(3)]
    control.send(wire.Started(1, 5))
    assert peer.until(wire.Started) == wire.Started(1, 5)
    peer.close()
    assert isinstance(control.inbox.get(timeout=WAIT_S), Disconnected)


def test_beats_come_by_themselves_and_say_what_was_published(control: Control) -> None:
    peer = Peer(port_of(control))
    begun_s = time.monotonic() - 5
    control.publish(wire.Stats(running=7))
    control.watch(lambda: (12, begun_s, 1.0))
    beat = peer.until(wire.Beat)
    assert (beat.stats.running, beat.step) == (7, 12)
    assert beat.since_s >= 5
    peer.close()


def test_a_failure_waits_for_somebody_to_hear_it(control: Control) -> None:
    peer = Peer(port_of(control))
    control.fail("out of memory")
    assert peer.until(wire.Failed).message == "out of memory"
    peer.close()


def test_nothing_is_queued_while_nobody_listens(control: Control) -> None:
    control.send(wire.Started(1, 1))
    control.flush()
    peer = Peer(port_of(control))
    peer.send(wire.Abort(1))
    assert control.inbox.get(timeout=WAIT_S) == wire.Abort(1)
    with pytest.raises(queue.Empty):
        control.inbox.get_nowait()
    peer.close()


# ------------------------------------------------------------ the rank's process


@pytest.fixture
def start_rank(secret: Path) -> Iterator[Callable[[Path], tuple[subprocess.Popen[bytes], int]]]:
    """Starts ranks on a model folder; gives process and port, and ends every process with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(model: Path) -> tuple[subprocess.Popen[bytes], int]:
        port = free_port()
        plan = wire.RankPlan(str(model), "127.0.0.1", port, str(secret), slots=4, kv_limit_bytes=1 << 28)
        argv = [sys.executable, "-m", "parallel.rank", msgspec.json.encode(plan).decode()]
        started.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return started[-1], port

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def rank(
    start_rank: Callable[[Path], tuple[subprocess.Popen[bytes], int]], tiny_model: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Peer, wire.Ready]]:
    process, port = start_rank(tiny_model)
    peer = join(process, port)
    yield process, peer, peer.until(wire.Ready)
    peer.close()


def join(process: subprocess.Popen[bytes], port: int) -> Peer:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return Peer(port)
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise AssertionError("the rank never listened")


def test_a_rank_says_what_it_offers(rank: tuple[subprocess.Popen[bytes], Peer, wire.Ready]) -> None:
    process, _, ready = rank
    assert (ready.pid, ready.slots, ready.context, ready.prefix_reuse) == (process.pid, 4, 4096, "any")
    assert ready.kv_tokens > 0 and ready.weights_bytes > 0


def test_a_request_is_answered_with_one_message_per_step(
    rank: tuple[subprocess.Popen[bytes], Peer, wire.Ready],
) -> None:
    _, peer, _ = rank
    peer.send(wire.Submit(1, [5, 6, 7], 6, 2, wire.Sampling(temperature=0.0)))
    assert peer.until(wire.Started) == wire.Started(1, 0)
    rows: list[wire.Token] = []
    steps = 0
    while sum(bool(row.finish) for row in rows) < 2:
        rows += peer.until(wire.Tokens).rows
        steps += 1
    assert steps == 6 and len(rows) == 12
    assert [r.token for r in rows if r.index == 0] == [r.token for r in rows if r.index == 1]


def test_a_request_that_can_never_fit_is_told_so_at_once(
    rank: tuple[subprocess.Popen[bytes], Peer, wire.Ready],
) -> None:
    _, peer, _ = rank
    peer.send(wire.Submit(1, [5] * 5000, 6, 1, wire.Sampling(temperature=0.0)))
    failure = peer.until(wire.RequestFailed)
    assert failure.kind == "bad" and "5000" in failure.message and "4095" in failure.message


def test_a_rank_leaves_when_told(rank: tuple[subprocess.Popen[bytes], Peer, wire.Ready]) -> None:
    process, peer, _ = rank
    peer.send(wire.Leave())
    assert process.wait(WAIT_S) == 0


def test_a_rank_leaves_sigterm_at_its_default(rank: tuple[subprocess.Popen[bytes], Peer, wire.Ready]) -> None:
    process, _, _ = rank
    process.terminate()
    assert process.wait(WAIT_S) == -signal.SIGTERM


def test_a_coordinator_that_is_gone_takes_its_requests_with_it(
    rank: tuple[subprocess.Popen[bytes], Peer, wire.Ready],
) -> None:
    process, peer, _ = rank
    port = peer.socket.getpeername()[1]
    peer.send(wire.Submit(1, [5, 6, 7], 4000, 1, wire.Sampling(temperature=0.0)))
    peer.until(wire.Tokens)
    peer.close()
    again = join(process, port)
    while (beat := again.until(wire.Beat)).stats.running:
        pass
    assert beat.stats.waiting == 0
    again.close()


def test_a_folder_that_cannot_be_loaded_is_reported_before_the_rank_ends(
    start_rank: Callable[[Path], tuple[subprocess.Popen[bytes], int]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    process, port = start_rank(tmp_path)
    peer = join(process, port)
    assert "safetensors" in peer.until(wire.Failed).message
    assert process.wait(WAIT_S) == 1
    peer.close()


def test_a_rank_whose_parent_died_leaves_by_itself(tiny_model: Path, secret: Path) -> None:
    script = (
        "import msgspec, os, subprocess, sys; from parallel import wire;"
        f"plan = wire.RankPlan({str(tiny_model)!r}, '127.0.0.1', {free_port()}, {str(secret)!r}, os.getpid());"
        "p = subprocess.Popen([sys.executable, '-m', 'parallel.rank', msgspec.json.encode(plan).decode()]);"
        "print(p.pid, flush=True); p.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ends(pid, WAIT_S)
