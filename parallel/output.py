"""What a rank prints, labelled line by line, since mlx.launch mixes the output of all ranks without saying whose it is.

A small child process does it: it also forwards the last words of a rank that crashes in native code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

LINE_LIMIT = 4000  # a pipe takes less than PIPE_BUF (4096 bytes on Linux) in one piece


def label_output(rank: int) -> None:
    """From now on, every line that this process prints begins with "[rank N] ". Call before threads start."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    if os.fork() == 0:
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
