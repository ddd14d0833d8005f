"""Log files: written by the coordinator for itself and its ranks, read by `cluster logs`.

A full disk must not take the cluster down: a line that cannot be written is kept in memory, the reason in `error`.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.errors import FolderUnusable

LIMIT_BYTES = 20_000_000
KEPT_LINES = 40


class LogFile:
    """An open log. The file of an earlier run is kept as `NAME.1`, and so is one that grows over `limit_bytes`."""

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        """Raises FolderUnusable."""
        self.path = path
        self.error = ""
        self._limit = limit_bytes
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._partial = b""
        try:
            self._open()
        except OSError as error:
            raise FolderUnusable(
                f"The log {path} cannot be written: {error.strerror or error}.",
                hint="Free some space or make the folder writable, or set CLUSTER_HOME to another folder.",
            ) from error

    def _open(self) -> None:
        if self.path.exists():
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the log
        self.path.chmod(0o600)

    def write(self, content: bytes) -> None:
        """Append `content`; never raises, see `error`."""
        *lines, rest = (self._partial + content).split(b"\n")
        self._kept.extend(lines)
        self._partial = rest[-4096:]
        try:
            if self._file.tell() > self._limit:
                self._file.close()
                self._open()
            self._file.write(content)
            self.error = ""
        except (OSError, ValueError) as error:  # ValueError: a rotation failed half way and left the file closed
            self.error = f"{self.path} is not written: {getattr(error, 'strerror', None) or error}"

    def last_lines(self, count: int) -> list[str]:
        """The last lines written, also those that the disk did not take; at most KEPT_LINES."""
        lines = [*self._kept, self._partial] if self._partial else list(self._kept)
        return [line.decode(errors="replace").rstrip() for line in lines[-count:]]

    def close(self) -> None:
        """Close the file; `last_lines` still answers."""
        self._file.close()


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a file; none when it does not exist."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=count)]
    except FileNotFoundError:
        return []


def follow(path: Path, goes_on: Callable[[], bool]) -> Iterator[list[str]]:
    """What is written to `path` from now on, in groups of lines, also over a rotation. Ends when `goes_on()` is false.

    Never waits: yields an empty list when nothing came, so that several files can be followed in turn.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, encoding="utf-8", errors="replace")) if path.exists() else None
        if file is not None:
            file.seek(0, os.SEEK_END)
        last = False
        while not last:
            last = not goes_on()
            lines = file.read().splitlines() if file is not None else []
            if path.exists() and (file is None or path.stat().st_ino != os.fstat(file.fileno()).st_ino):
                stack.close()
                file = stack.enter_context(open(path, encoding="utf-8", errors="replace"))
                lines += file.read().splitlines()
            yield lines
