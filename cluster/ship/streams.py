"""A program on another machine that answers in lines while it works, through the system's ssh.

`ssh.Shell.run` gives an answer when all is over; what takes minutes, or sends gigabytes, comes this way: its lines are
read as they come, a lost connection is noticed within seconds, and nothing of it outlives this process for long. Called
by `carry.py` and `install.py`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import CopyFailed, HostUnreachable
from cluster.macs.ssh import LOCAL_NAMES, MISSING

ALIVE_S, ALIVE_COUNT = 5, 3  # a connection without an answer for 15 s is lost
OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR", "-o", "ForwardX11=no")
SSH = ("ssh", *OPTIONS, "-o", f"ServerAliveInterval={ALIVE_S}", "-o", f"ServerAliveCountMax={ALIVE_COUNT}")
SSH_FAILED = 255

Told = Callable[[int], None]


def there(host: str, argv: Sequence[str]) -> list[str]:
    """The argv that runs `argv` on a host, in its home folder; as it is for this machine."""
    return list(argv) if host in LOCAL_NAMES else [*SSH, "--", host, shlex.join(argv)]


def script(file: Path, python: Sequence[str], *arguments: str) -> list[str]:
    """The argv that runs a file of this project, by its text, where it is not installed. No shell can misread it."""
    packed = base64.b64encode(zlib.compress(file.read_bytes(), 9)).decode()
    run = f'exec(compile(zlib.decompress(base64.b64decode("{packed}")),"{file.stem}","exec"))'
    return [*python, "-c", f"import base64,zlib;{run}", *arguments]


def answer(
    host: str,
    argv: Sequence[str],
    *,
    feed: Sequence[str] = (),
    told: Told = lambda at: None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Run `argv` and return the last line of JSON that it prints; `told` gets the "at" of the lines before.

    `feed` is a local command whose output it reads. `host` is for messages. Raises HostUnreachable when ssh fails,
    CopyFailed when the program gives no answer, or when `stop` is set meanwhile.
    """
    last: dict[str, Any] = {}
    with contextlib.ExitStack() as stack, tempfile.TemporaryFile() as errors:
        feeder = None
        if feed:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            feeder = stack.enter_context(_started(feed, **pipes))
        stdin = feeder.stdout if feeder is not None else subprocess.DEVNULL
        process = stack.enter_context(_started(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=errors))
        if feeder is not None and feeder.stdout is not None:
            feeder.stdout.close()  # the reader's end is the program's alone: when it ends, the feeder does
        assert process.stdout is not None
        for line in process.stdout:
            if stop is not None and stop.is_set():
                raise CopyFailed(f"{host}: stopped.", hint="The same command goes on where this one was.")
            if isinstance(said := _json(line), dict):
                last = said
                if isinstance(at := said.get("at"), int):
                    told(at)
        code = process.wait()
        errors.seek(0)
        words = " ".join(errors.read().decode("utf-8", "replace").split())
    if code == 0 and last:
        return last
    if code == SSH_FAILED:
        raise HostUnreachable(f"{host}: the connection failed: {words or 'ssh says nothing'}.", hint=f"ssh {host} true")
    if code == MISSING:
        raise CopyFailed(f"{host} has no Python that runs without asking: {words}.", hint=f"cluster install {host}")
    raise CopyFailed(f"{host}: no answer (exit code {code}): {words or 'it says nothing'}.", hint=f"ssh {host} df -h")


@contextlib.contextmanager
def _started(argv: Sequence[str], **pipes: Any) -> Any:
    """A process in a group of its own, so that Ctrl-C reaches us alone; ended with all it started when we leave."""
    with subprocess.Popen(argv, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None  # what the login shell's own files print
