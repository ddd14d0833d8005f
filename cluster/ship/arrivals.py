"""Files on a host: which of them are there and right, and one that arrives on stdin. Called by `carry.py`.

Standard library only and Python 3.9: this very file is also sent to the python3 of other hosts over ssh. It answers in
lines of JSON: {"at": bytes} while it works, and a last one with the result. Whoever reads them may go away: the next
line then ends the process, so nothing is left behind there.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CHUNK = 1 << 20
TELL_S = 0.5
IDLE_S = 20.0  # without a byte on stdin: whoever sent is gone
LOCK_S = 25.0  # longer than an abandoned process takes to notice
WEIGHTS = re.compile(r"model.*\.safetensors")
# Where other programs keep models: LM Studio, and the cache of the Hugging Face Hub.
ELSEWHERE = ("~/.lmstudio/models/{name}", "~/.cache/lm-studio/models/{name}")
HUB = "~/.cache/huggingface/hub/models--{name}/snapshots/*"

Told = Callable[[int], None]


def _quiet(done: int) -> None:
    pass


def cache_folder() -> str:
    """This project's cache on this machine, as paths.py has it where CLUSTER_HOME is not set."""
    if sys.platform == "darwin":
        return os.path.expanduser("~/Library/Caches/cluster")
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cluster")


# ---------------------------------------------------------------- sums


class Sums:
    """SHA-256 of files, computed once as long as size and time of change stay. `record` is where they are kept."""

    def __init__(self, record: str) -> None:
        self._record = record
        self._known: dict[str, Any] = self._read()

    def of(self, path: str, *, again: bool = False, told: Told = _quiet) -> str:
        """The sum of a file; `told` gets the bytes read so far. `again`: whatever is recorded. Raises OSError."""
        path = os.path.realpath(path)
        seen = os.stat(path)
        size, changed, known = self._known.get(path, (None, None, ""))
        if (size, changed) == (seen.st_size, seen.st_mtime_ns) and not again:
            told(seen.st_size)
            return str(known)
        digest, done = hashlib.sha256(), 0
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                done += len(chunk)
                told(done)
        self.keep(path, digest.hexdigest(), seen)
        return digest.hexdigest()

    def keep(self, path: str, known: str, seen: os.stat_result) -> None:
        """Record a sum. Two processes may do so at once."""
        os.makedirs(os.path.dirname(self._record), exist_ok=True)
        with locked(self._record + ".lock", LOCK_S):
            kept = {name: entry for name, entry in self._read().items() if os.path.exists(name)}
            self._known = {**kept, os.path.realpath(path): (seen.st_size, seen.st_mtime_ns, known)}
            part = f"{self._record}.{os.getpid()}"
            with open(part, "w") as file:
                json.dump(self._known, file)
            os.replace(part, self._record)

    def _read(self) -> dict[str, Any]:
        try:
            with open(self._record) as file:
                kept = json.load(file)
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}


class Busy(Exception):
    """Another process holds the lock."""


@contextmanager
def locked(path: str, wait_s: float) -> Iterator[None]:
    """Hold a lock file; the system lets go of it when this process ends. Raises Busy after `wait_s` seconds."""
    end = time.monotonic() + wait_s
    with open(path, "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise Busy from None
                time.sleep(0.1)
        yield


# ---------------------------------------------------------------- what is there


def look(job: dict[str, Any], told: Told = _quiet) -> dict[str, Any]:
    """Where files go on this machine and which of them are there.

    Job: `files` name -> [size, sum], `name` of the folder, `models` the folder it goes into ("" the cache), or `folder`
    itself; `also` are more folders that may hold the files. A folder that has them all, wherever, is taken as it is.
    Answer: `folder`; `free` bytes of its disk; `wrong`: files that are missing or differ; `parts`: bytes of each that
    have arrived before; `foreign`: weights that are no part of this model, though they are in its folder.
    """
    sums = Sums(os.path.join(cache_folder(), "sums.json"))
    files, again = job["files"], bool(job.get("again"))
    own = job.get("folder") or os.path.join(job.get("models") or os.path.join(cache_folder(), "models"), job["name"])
    own = os.path.abspath(os.path.expanduser(own))
    places = [own, *_elsewhere(job.get("name", ""), job.get("also", []))]
    complete = [place for place in places if all(_size(place, name) == size for name, (size, _) in files.items())]
    for place in complete:
        wrong = wrong_in(place, files, sums, again, told)
        if not wrong or place == own:
            break
    else:
        place, wrong = own, wrong_in(own, files, sums, again, told)
    existing = place
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    parts = {name: min(max(_size(place, part_of(name)), 0), files[name][0]) for name in wrong}
    known = set(job.get("all", files))
    foreign = [name for name in _names(place) if WEIGHTS.fullmatch(name) and name not in known]
    free = shutil.disk_usage(existing).free
    return {"folder": place, "free": free, "wrong": wrong, "parts": parts, "foreign": foreign if place == own else []}


def wrong_in(place: str, files: dict[str, Any], sums: Sums, again: bool, told: Told) -> list[str]:
    """The files that are missing in a folder or differ from what they should be."""
    wrong, before = [], 0

    def so_far(at: int) -> None:
        told(before + at)

    for name, (size, wanted) in files.items():
        same = _size(place, name) == size
        if same:
            same = sums.of(os.path.join(place, name), again=again, told=so_far) == wanted
            before += size
        if not same:
            wrong.append(name)
    return wrong


def part_of(name: str) -> str:
    """The name under which a file arrives: no program takes it for the whole."""
    return f".{name}.part"


def _elsewhere(name: str, also: list[str]) -> list[str]:
    found = list(also)
    if name:
        found += [os.path.expanduser(pattern.format(name=name)) for pattern in ELSEWHERE]
        found += sorted(glob.glob(os.path.expanduser(HUB.format(name=name.replace("/", "--")))))
    return found


def _size(folder: str, name: str) -> int:
    try:
        return os.stat(os.path.join(folder, name)).st_size
    except OSError:
        return -1


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# ---------------------------------------------------------------- arriving


class Progress:
    """Tells in a line every half second how far it is. When nobody listens any more, the process ends."""

    def __init__(self) -> None:
        self.at = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
        self._thread.start()

    def told(self, done: int) -> None:
        self.at = done

    def last(self, answer: dict[str, Any]) -> None:
        """The result, as the last line."""
        self._end.set()
        self._thread.join()
        print(json.dumps(answer), flush=True)

    def _tell(self) -> None:
        while not self._end.wait(TELL_S):
            try:
                print(json.dumps({"at": self.at}), flush=True)
            except OSError:
                os._exit(1)


def receive(job: dict[str, Any], source: int, told: Told = _quiet) -> dict[str, Any]:
    """Take a file from descriptor `source`, from byte `offset` on; in place under its name once its sum is right.

    Answer: `end`, one of done, short (it broke off; what came is kept), damaged (thrown away), moved (less is here than
    `offset`), full (the disk), busy (another process receives it), failed; and `words`, `at`.
    """
    folder, name = job["folder"], job["name"]
    path, part = os.path.join(folder, name), os.path.join(folder, part_of(name))
    try:
        os.makedirs(folder, exist_ok=True)
        with locked(part, LOCK_S):
            return _receive(job, source, path, part, told)
    except Busy:
        return {"end": "busy", "words": f"another process is copying {path}"}
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return {"end": "full" if full else "failed", "words": f"{path}: {error.strerror or error}"}


def _receive(job: dict[str, Any], source: int, path: str, part: str, told: Told) -> dict[str, Any]:
    size, wanted, offset = job["size"], job["sum"], job["offset"]
    digest, at = hashlib.sha256(), 0
    with open(part, "r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < offset:
            return {"end": "moved", "words": f"{part} is shorter than {offset} bytes"}
        file.truncate(offset)
        while at < offset and (chunk := file.read(min(CHUNK, offset - at))):
            digest.update(chunk)
            at += len(chunk)
        while at < size:
            ready, _, _ = select.select([source], [], [], IDLE_S)
            chunk = os.read(source, min(CHUNK, size - at)) if ready else b""
            if not chunk:
                why = "the sender ended" if ready else f"no byte came for {IDLE_S:.0f} s"
                return {"end": "short", "at": at, "words": f"{why} at byte {at} of {size}"}
            _write(file.fileno(), chunk)
            digest.update(chunk)
            at += len(chunk)
            told(at)
        os.fsync(file.fileno())
        if digest.hexdigest() != wanted:
            os.unlink(part)
            return {"end": "damaged", "words": f"{path} arrived with another SHA-256"}
        os.replace(part, path)
        Sums(os.path.join(cache_folder(), "sums.json")).keep(path, wanted, os.stat(path))
    return {"end": "done", "at": at}


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main(argv: list[str]) -> None:
    """`look JOB` or `receive JOB`."""
    job, progress = json.loads(argv[2]), Progress()
    answer = look(job, progress.told) if argv[1] == "look" else receive(job, 0, progress.told)
    progress.last(answer)


if __name__ == "__main__":
    main(sys.argv)
