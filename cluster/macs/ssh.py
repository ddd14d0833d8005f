"""Run commands and copy files on a machine: over ssh, on this one, or replayed from a recording.

The one seam to other machines; whoever looks at or changes a host takes a `Shell`. The system's own ssh tells what its
configuration means (`ssh -G`: Include, Match, aliases), paramiko connects. Nothing here asks a question, retries, or
waits without a time limit. It knows nothing of Macs: probe.py does.
"""

from __future__ import annotations

import logging
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import paramiko

from cluster.errors import ClusterError, CommandTimedOut, CopyFailed, HostUnreachable
from cluster.macs.ssh_login import Settings, open_transport, settings_of

CONNECT_S = 10.0
COMMAND_S = 30.0
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
MISSING = 127  # what a POSIX shell exits with when there is no such command
NOT_RECORDED = "not recorded"
# What the login shell's own files print comes before this line, and is no answer of the command.
MARK = "--- cluster: the command begins here ---"
WRAPPED = f"echo '{MARK}'; echo '{MARK}' >&2; exec \"$@\""

logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it logs as tracebacks what is raised here with a remedy

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended. `rc` is its exit status; 127: there is no such command; negative: a signal ended it."""

    rc: int
    out: str = ""
    err: str = ""

    @property
    def ok(self) -> bool:
        return self.rc == 0


class Runner(Protocol):
    """A machine on which commands run. `name` is how ssh knows it."""

    name: str

    def run(self, argv: Sequence[str], timeout_s: float = COMMAND_S) -> Result:
        """Run a program, in the home folder, with no input. Raises CommandTimedOut, HostUnreachable."""


class Shell(Runner, Protocol):
    """A machine on which commands run, to and from which files are copied. A context manager."""

    def put(self, local: Path, remote: str) -> None:
        """Copy a file there, with its mode, whole or not at all. Raises CopyFailed, HostUnreachable."""

    def get(self, remote: str, local: Path) -> None:
        """Copy a file here, whole or not at all. Raises CopyFailed, HostUnreachable."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Closing:
    """`with shell:` closes it."""

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_shell(name: str, connect_s: float = CONNECT_S) -> Shell:
    """A shell on the host that ssh knows as `name`; on this machine itself for localhost.

    Raises HostUnreachable, HostKeyUnknown, HostKeyChanged, LoginRefused, SshUnusable, each naming the host.
    """
    return LocalShell(name) if name in LOCAL_NAMES else ParamikoShell(name, connect_s)


def on_all(things: Sequence[T], fn: Callable[[T], R]) -> list[R | ClusterError]:
    """`fn` of each thing, all at once, in the order given; an expected failure stands in the place of its result."""

    def attempt(thing: T) -> R | ClusterError:
        try:
            return fn(thing)
        except ClusterError as error:
            return error

    if not things:
        return []
    with ThreadPoolExecutor(max_workers=len(things), thread_name_prefix="host") as pool:
        return list(pool.map(attempt, things))


def batch_login(name: str, connect_s: float = CONNECT_S) -> str:
    """ "" when the system's ssh gets into `name` without a question, else its words: mlx.launch goes that way."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s:.0f}"]
    try:
        result = LocalShell("ssh").run(["ssh", *options, "--", name, "true"], timeout_s=2 * connect_s)
    except CommandTimedOut:
        return f"`ssh {name}` did not answer within {2 * connect_s:.0f} s"
    words = " ".join(result.err.split())
    return "" if result.ok else words or f"`ssh {name} true` ended with status {result.rc}"


class ParamikoShell(_Closing):
    """A machine over ssh: one connection, a channel per command."""

    def __init__(self, name: str, connect_s: float = CONNECT_S) -> None:
        self.name = name
        self.settings: Settings = settings_of(name)
        self._transport, self._proxy = open_transport(self.settings, connect_s)

    def run(self, argv: Sequence[str], timeout_s: float = COMMAND_S) -> Result:
        deadline = time.monotonic() + timeout_s
        line = shlex.join(["exec", "sh", "-c", WRAPPED, "sh", *argv])
        try:
            with self._transport.open_session(timeout=timeout_s) as channel:
                channel.settimeout(timeout_s)
                channel.exec_command(line)
                channel.shutdown_write()
                out, err = _drain(channel, deadline)
                if not channel.status_event.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                rc = channel.recv_exit_status()
        except TimeoutError:
            raise _timed_out(self.name, argv, timeout_s) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self._broke(shlex.join(argv), error) from error
        if rc < 0 and not self._transport.is_active():
            raise self._broke(shlex.join(argv), None)
        return Result(rc, _after_mark(out), _after_mark(err))

    def put(self, local: Path, remote: str) -> None:
        part = f"{remote}.part-{os.getpid()}"
        with self._sftp(f"{local} to {remote}") as sftp:
            try:
                sftp.put(str(local), part)
                sftp.chmod(part, local.stat().st_mode & 0o777)
                sftp.posix_rename(part, remote)
            except OSError:
                _forget(sftp, part)
                raise

    def get(self, remote: str, local: Path) -> None:
        part = local.with_name(f"{local.name}.part-{os.getpid()}")
        try:
            with self._sftp(f"{remote} from there to {local}") as sftp:
                sftp.get(remote, str(part))
            os.replace(part, local)
        finally:
            part.unlink(missing_ok=True)

    def close(self) -> None:
        self._transport.close()
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()

    def _sftp(self, what: str) -> _Copying:
        return _Copying(self.name, self._transport, what)

    def _broke(self, doing: str, error: BaseException | None) -> HostUnreachable:
        why = f" ({error})" if error is not None and str(error) else ""
        return HostUnreachable(
            f"The connection to {self.name} broke during `{doing}`{why}.", hint=f"Try: ssh {self.name} true"
        )


class _Copying:
    """An sftp session whose failures are told with the host and the file."""

    def __init__(self, name: str, transport: paramiko.Transport, what: str) -> None:
        self._name = name
        self._transport = transport
        self._what = what

    def __enter__(self) -> paramiko.SFTPClient:
        try:
            channel = self._transport.open_session(timeout=COMMAND_S)
            channel.settimeout(COMMAND_S)
            channel.invoke_subsystem("sftp")
            self._session = paramiko.SFTPClient(channel)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self._failed(error) from error
        return self._session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()
        if isinstance(error, (paramiko.SSHException, EOFError, OSError)):
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> CopyFailed:
        slow = f"no answer within {COMMAND_S:.0f} s" if isinstance(error, TimeoutError) else str(error)
        return CopyFailed(
            f"{self._name}: could not copy {self._what}: {slow or type(error).__name__}.",
            hint=f"Try: sftp {self._name}. A login file there that prints text, or a full disk, breaks it.",
        )


class LocalShell(_Closing):
    """This machine."""

    def __init__(self, name: str = "localhost") -> None:
        self.name = name

    def run(self, argv: Sequence[str], timeout_s: float = COMMAND_S) -> Result:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            process = subprocess.Popen(argv, **pipes, cwd=Path.home(), start_new_session=True)  # type: ignore[call-overload]
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            return Result(MISSING, err=f"{argv[0]}: {error.strerror}")
        with process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise _timed_out(self.name, argv, timeout_s) from None
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return Result(process.returncode, _text(out), _text(err))

    def put(self, local: Path, remote: str) -> None:
        self._copy(local, Path.home() / remote)

    def get(self, remote: str, local: Path) -> None:
        self._copy(Path.home() / remote, local)

    def _copy(self, source: Path, target: Path) -> None:
        import shutil

        part = target.with_name(f"{target.name}.part-{os.getpid()}")
        try:
            shutil.copyfile(source, part)
            part.chmod(source.stat().st_mode & 0o777)
            os.replace(part, target)
        except OSError as error:
            raise CopyFailed(f"{self.name}: could not copy {source} to {target}: {error.strerror}.") from error
        finally:
            part.unlink(missing_ok=True)


class RecordedShell(_Closing):
    """A host as recorded: `folder`/COMMAND.out, .err and .rc. `commands` names each argv."""

    def __init__(self, folder: Path, commands: Mapping[str, Sequence[str]]) -> None:
        self.name = folder.name
        self._folder = folder
        self._names = {tuple(argv): name for name, argv in commands.items()}

    def run(self, argv: Sequence[str], timeout_s: float = COMMAND_S) -> Result:
        """What the command said then. One that is not in the recording gives status 127 and NOT_RECORDED."""
        name = self._names.get(tuple(argv), "")
        out, err, rc = (self._folder / f"{name}.{kind}" for kind in ("out", "err", "rc"))
        if not any(path.is_file() for path in (out, err, rc)):
            return Result(MISSING, err=NOT_RECORDED)
        code = _stored(rc).strip()
        return Result(int(code) if code.lstrip("-").isdigit() else 0, _stored(out), _stored(err))

    def put(self, local: Path, remote: str) -> None:
        raise CopyFailed(f"{self.name} is a recording: nothing can be copied to it.")

    def get(self, remote: str, local: Path) -> None:
        raise CopyFailed(f"{self.name} is a recording: nothing can be copied from it.")


def _drain(channel: paramiko.Channel, deadline: float) -> tuple[bytes, bytes]:
    """Both outputs to their ends; read together, since a full window of one stops the other."""
    out, err = bytearray(), bytearray()
    ready = select.poll()
    ready.register(channel.fileno(), select.POLLIN)
    while True:
        while channel.recv_ready():
            out += channel.recv(65536)
        while channel.recv_stderr_ready():
            err += channel.recv_stderr(65536)
        if (channel.eof_received or channel.closed) and not channel.recv_ready() and not channel.recv_stderr_ready():
            return bytes(out), bytes(err)
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000) and time.monotonic() >= deadline:
            raise TimeoutError


def _after_mark(data: bytes) -> str:
    text = _text(data)
    before, mark, after = text.partition(MARK + "\n")
    return after if mark else before


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _stored(path: Path) -> str:
    return _text(path.read_bytes()) if path.is_file() else ""


def _timed_out(name: str, argv: Sequence[str], timeout_s: float) -> CommandTimedOut:
    command = shlex.join(argv)
    shown = command if len(command) <= 80 else command[:77] + "..."
    return CommandTimedOut(
        f"{name}: `{shown}` did not end within {timeout_s:.0f} s.",
        hint=f"Is {name} asleep or overloaded? ssh {name} top",
    )


def _forget(sftp: paramiko.SFTPClient, path: str) -> None:
    try:
        sftp.remove(path)
    except OSError:
        return  # it was never made, or the connection is gone with it
