"""One coordinator process from start to end: the claim, the port, the API and the supervisor in one event loop.

`cluster up` calls `run` in its own process; `cluster up --detach` starts this module as a program and hands it a
`Launch` on stdin. What other terminals do with a running cluster is in `running.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil

from cluster.config import ClusterConfig
from cluster.errors import AddressUnusable, AlreadyRunning, ClusterError, FolderUnusable, PortTaken
from cluster.logs import LogFile
from cluster.paths import Folders
from cluster.state import Claim, ClusterState, ProcessRecord, key_digest, read_state, same_settings, take_or_find
from cluster.supervision.launch import RANK_COMMAND, end_process, quiet_libraries
from cluster.supervision.supervise import Supervisor

logger = logging.getLogger("cluster.coordinator")
BACKLOG = 2048
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_S = 15.0  # for a coordinator without ranks to end
DRAIN_S = 2  # for open streams to send their last words


class Launch(msgspec.Struct, frozen=True):
    """What a detached coordinator is told, the API key included."""

    config: ClusterConfig
    folders: Folders
    rank_command: tuple[str, ...] = RANK_COMMAND
    detached: bool = False

    def encode(self) -> bytes:
        """JSON for `decode`."""
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def decode(cls, content: bytes) -> Launch:
        """The launch that `encode` wrote."""
        return msgspec.json.decode(content, type=cls, dec_hook=lambda kind, value: kind(value))


def url_of(config: ClusterConfig) -> str:
    """Where a client on this machine reaches the API."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an API that is bound to `host`."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def claim(config: ClusterConfig, folders: Folders) -> Claim | ClusterState:
    """The claim to run here, or the record of the cluster that runs with these very settings already.

    One that has failed only still tells why, and is ended. Raises AlreadyRunning when one runs with other settings.
    """
    found = take_or_find(folders)
    if isinstance(found, ClusterState) and found.phase == "failed":
        end_process(found.coordinator, STOP_S)
        found = take_or_find(folders)
    if isinstance(found, Claim) or same_settings(found, config, folders):
        return found
    raise already_running(found, config)


def already_running(state: ClusterState, config: ClusterConfig) -> AlreadyRunning:
    """The error that names what differs between the running cluster and `config`."""
    wanted = config.without_key()
    different = [name.replace("_", "-") for name in wanted if wanted[name] != state.settings.get(name)]
    return AlreadyRunning(
        f"A cluster already runs at {state.url} (pid {state.coordinator.pid}) with other settings: "
        f"{', '.join(different) or 'api-key'}.",
        hint="Run `cluster down` first, or set CLUSTER_HOME to another folder to run a second one beside it.",
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PortTaken, AddressUnusable.

    It listens at once, because two sockets may be bound to one port until one of them does.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise AddressUnusable(f"--host {host} is not known: {error.strerror}.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"Port {port} of {host} is taken{_holder(port)}.",
                hint=f"Choose another one, for example `--port {port + 1 if port < 65535 else 8080}`.",
            ) from error
        why = "it is not an address of this machine" if error.errno == errno.EADDRNOTAVAIL else error.strerror
        raise AddressUnusable(f"The API cannot listen at {host} port {port}: {why}.") from error
    return listener


def _holder(port: int) -> str:
    """Who listens on `port`, where the system tells: macOS wants root for it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and tuple(connection.laddr)[1:2] == (port,) and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def reap_leftovers(folders: Folders) -> list[int]:
    """End the ranks of a coordinator that crashed, by pid and start time; their pids. Needs the claim."""
    state = read_state(folders)
    if state is None:
        return []
    return [rank.process.pid for rank in state.local_ranks if end_process(rank.process, grace_s=2)]


def run(launch: Launch, held: Claim, on_change: Callable[[dict[str, Any]], None] = lambda health: None) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; the exit code: 1 when the cluster had failed, else 0.

    `on_change` gets the health after every change. Releases the claim. Raises ClusterError when it could not start.
    """
    folders, config = launch.folders, launch.config
    quiet_libraries()
    with contextlib.ExitStack() as stack:
        stack.callback(held.release)
        for number in SIGNALS:  # until the loop has its own handlers, a signal unwinds this stack
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, and means it
                stack.callback(signal.signal, number, signal.signal(number, _interrupt))
        stack.enter_context(_logging(None if launch.detached else folders.coordinator_log))
        for pid in reap_leftovers(folders):
            logger.warning("ended rank %d, a leftover of a coordinator that crashed", pid)
        secret = held.new_secret()
        record = _Record(
            held,
            ClusterState(
                coordinator=ProcessRecord.of(os.getpid()),
                url=url_of(config),
                settings=config.without_key(),
                key_digest=key_digest(config.api_key, secret),
                detached=launch.detached,
                model=config.model or "",
            ),
        )
        try:
            with bind(config.host, config.port) as listener:
                return _run_loop(_serve(launch, listener, record, on_change))
        except KeyboardInterrupt:
            return 0
        except ClusterError as error:
            record.change(reason=error.message, hint=error.hint)
            raise
        except Exception as error:
            record.change(reason=f"an internal error: {error!r}", hint="`cluster logs` shows more.")
            raise
        finally:
            record.change(phase="ended", ranks=[])


def exit_process(code: int) -> NoReturn:
    """Leave with `code` at once, after `run` has put everything in order.

    The interpreter's own end waits for the pool of a download that still runs, and takes a second or two to free what
    the tokenizer's libraries loaded.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _Record:
    """The state on disk; written when it changes. A full disk is told in the log and does not end the cluster."""

    def __init__(self, held: Claim, state: ClusterState) -> None:
        self._held = held
        self._state = state
        held.write(state)

    def change(self, **changes: Any) -> None:
        state = msgspec.structs.replace(self._state, **changes)
        if state == self._state:
            return
        self._state = state
        try:
            self._held.write(state)
        except FolderUnusable as error:
            logger.warning("%s", error.message)


async def _serve(
    launch: Launch, listener: socket.socket, record: _Record, on_change: Callable[[dict[str, Any]], None]
) -> int:
    import uvicorn

    from cluster.serve.api import Settings, create_app
    from cluster.serve.chat import ChatModel
    from cluster.serve.http_protocol import HttpProtocol
    from cluster.ship.weights import resolve

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            yield  # the signals are ours: the ranks must be stopped first

    def changed() -> None:
        record.change(
            phase=supervisor.phase,
            model=supervisor.model,
            reason=_with_log(supervisor),
            ranks=list(supervisor.ranks),
            launch=supervisor.launch[0],
            hosts=supervisor.launch[1],
            warnings=supervisor.warnings,
        )
        on_change(supervisor.health())

    supervisor = Supervisor(
        launch.config,
        launch.folders,
        resolve=resolve,
        load_chat=ChatModel.load,
        rank_command=launch.rank_command,
        on_change=changed,
    )
    config = launch.config
    settings = Settings(
        api_key=config.api_key or "",
        cors_origin=config.cors_origin,
        queue_limit=config.queue,
        max_body_bytes=config.max_body,
        log_prompts=config.log_prompts,
    )
    server = Server(
        uvicorn.Config(
            create_app(supervisor, settings),
            http=HttpProtocol,
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    stop = _stop_signal(supervisor)
    api = asyncio.create_task(server.serve(sockets=[listener]), name="api")
    life = asyncio.create_task(supervisor.run(), name="life")
    try:
        await asyncio.wait({api, life, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        failed = supervisor.phase == "failed"
        if not life.done():
            life.cancel()
        await asyncio.wait({life})
        server.should_exit = True
        await asyncio.wait({api})
    for task in (api, life):
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return 1 if failed else 0


def _stop_signal(supervisor: Supervisor) -> asyncio.Future[None]:
    """Done at the first signal; a second one kills the rank instead of waiting for it."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if stop.done():
            supervisor.kill()
        else:
            logger.info("stopping")
            stop.set_result(None)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGUSR1, supervisor.take_in)
    return stop


def _with_log(supervisor: Supervisor) -> str:
    if supervisor.phase != "failed" or not supervisor.log_tail:
        return supervisor.reason
    return "\n  ".join([f"{supervisor.reason}\nLast lines of its log:", *supervisor.log_tail])


def _run_loop(work: Any) -> int:
    try:
        import uvloop
    except ImportError:  # not built for this platform; asyncio's own loop does
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        result: int = runner.run(work)
        return result


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _logging(path: Path | None) -> Iterator[None]:
    """Log to `path`, or to stderr, which is the log of a detached coordinator. Raises FolderUnusable."""
    log = LogFile(path) if path is not None else None
    handler = _ToLog(log) if log is not None else logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("cluster").setLevel(logging.INFO)
    logging.raiseExceptions = False  # a full disk is no reason to print a traceback for every line
    try:
        yield
    finally:
        root.removeHandler(handler)
        if log is not None:
            log.close()


class _ToLog(logging.Handler):
    def __init__(self, log: LogFile) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write(self.format(record).encode() + b"\n")


def main() -> None:
    """The detached coordinator; the terminal that started it reads its end from the record and its log."""
    launch = Launch.decode(sys.stdin.buffer.read())
    try:
        held = claim(launch.config, launch.folders)
        if isinstance(held, ClusterState):  # another `up` with the same settings was faster
            raise already_running(held, launch.config)
        code = run(launch, held)
    except ClusterError as error:
        print(f"error: {error.message}", f"hint: {error.hint}" if error.hint else "", sep="\n", file=sys.stderr)
        code = error.exit_code
    exit_process(code)


if __name__ == "__main__":
    main()
