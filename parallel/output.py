"""What a rank prints, labelled line by line, since mlx.launch mixes the output of all ranks without saying whose it is.

A small child process does it: it also forwards the last words of a rank that crashes in native code.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time

DRAIN_S = 1.0  # for the last words to get out, where something else still holds this process's output open
LINE_LIMIT = 4000  # a pipe takes less than PIPE_BUF (4096 bytes on Linux) in one piece


def label_output(rank: int) -> None:
    """From now on, every line that this process prints begins with "[rank N] ". Call before threads start.

    At its end this process waits until its last words are out: mlx.launch stops reading once it is gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    if (labeller := os.fork()) == 0:
        os.close(writing)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it ends when the rank's last words are out
        with contextlib.suppress(OSError):
            _copy(reading, f"[rank {rank}] ".encode())
        os._exit(0)
    os.close(reading)
    for stream in (1, 2):
        os.dup2(writing, stream)
    os.close(writing)
    atexit.register(_drain, labeller)


def _drain(labeller: int) -> None:
    """Close the output and wait for the end of the process that copies it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    end = time.monotonic() + DRAIN_S
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(labeller, os.WNOHANG) == (0, 0) and time.monotonic() < end:
            time.sleep(0.005)


def _copy(source: int, label: bytes) -> None:
    rest = b""
    while part := os.read(source, 1 << 16):
        *lines, rest = (rest + part).split(b"\n")
        while len(rest) > LINE_LIMIT:
            lines.append(rest[:LINE_LIMIT])
            rest = rest[LINE_LIMIT:]
        for line in lines:
            _write(label, line)
    if rest:
        _write(label, rest)


def _write(label: bytes, line: bytes) -> None:
    """`line`, in pieces that are labelled each and go out whole."""
    for start in range(0, max(1, len(line)), LINE_LIMIT):
        os.write(1, label + line[start : start + LINE_LIMIT] + b"\n")
