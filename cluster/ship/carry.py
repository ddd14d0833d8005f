"""The same files onto many hosts: each byte leaves this machine once where hosts can pass it on, checked, resumable.

`bring` is for anything that is many files in one folder: a model's weights (`pull.py`), wheels (`install.py`). A host
runs `arrivals.py` for it: what is there, and taking one file. Large files come over ssh, as a stream that goes on where
it broke; small ones over the connection that is open anyway. One mechanism, which needs `ssh`, `dd` and a Python there:
rsync differs from Mac to Mac and brings nothing for files that do not exist yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError, CopyFailed, FolderOccupied, NotEnoughDisk
from cluster.macs.ssh import LOCAL_NAMES, Shell, on_all, open_shell
from cluster.macs.ssh_login import settings_of
from cluster.ship import arrivals, streams
from cluster.ship.arrivals import CHUNK
from cluster.ship.spread import HERE, Copy, Spread

SMALL = 1 << 20  # bytes; a stream of its own takes longer to start than to send this
LINK_S = 15.0
ENVIRONMENT = ".local/share/cluster/env"  # in the home folder of every host; install.py puts it there
ANY_PYTHON = ("sh", "-c", f'p="$HOME/{ENVIRONMENT}/bin/python"; [ -x "$p" ] || p=python3; exec "$p" "$@"', "sh")
ARRIVALS = Path(arrivals.__file__)

Progress = Callable[[str, str, int, int], None]  # host, what happens there, bytes done, bytes in total
Routes = Mapping[tuple[str, str], tuple[str, float]]  # (from, to) -> the address to take, Gb/s


@dataclass(frozen=True, slots=True)
class File:
    """`size` in bytes and SHA-256 of a file."""

    size: int
    sum: str


@dataclass(frozen=True, slots=True)
class Errand:
    """What one host is to have: `names` of the files, and where: `job` as `arrivals.look` takes it, without files."""

    host: str
    names: tuple[str, ...]
    job: Mapping[str, Any] = field(default_factory=dict)
    python: tuple[str, ...] = ANY_PYTHON


def bring(
    errands: Sequence[Errand],
    source: Path,
    files: Mapping[str, File],
    *,
    what: str,
    routes: Routes | None = None,
    again: bool = False,
    progress: Progress = lambda host, what, done, total: None,
    note: Callable[[str], None] = lambda text: None,
    stop: threading.Event | None = None,
) -> dict[str, str]:
    """See to it that every host has its files, and return the folder that they are in there.

    `files` lie in `source` here. Nothing is copied before all hosts are known to have the room. `again` computes the
    sums of what is there even when they are recorded. Raises HostUnreachable and its kin, NotEnoughDisk,
    FolderOccupied, CopyFailed; where several hosts fail, CopyFailed tells each one. What arrived stays and counts next
    time; a host that failed does not stop the others.
    """
    carrier = _Carrier(errands, source, files, what, routes or {}, again, progress, note, stop or threading.Event())
    with contextlib.ExitStack() as stack:
        return carrier.run(stack)


class _Carrier:
    """One `bring`."""

    def __init__(
        self,
        errands: Sequence[Errand],
        source: Path,
        files: Mapping[str, File],
        what: str,
        routes: Routes,
        again: bool,
        progress: Progress,
        note: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self.errands = {errand.host: errand for errand in errands}
        self.source, self.files, self.what, self.routes = source, files, what, routes
        self.again, self.progress, self.note, self.stop = again, progress, note, stop
        self.seen: dict[str, dict[str, Any]] = {}
        self.shells: dict[str, Shell] = {}
        self.done: dict[str, int] = {}
        self.total: dict[str, int] = {}
        self.damaged: set[tuple[str, str]] = set()
        self.logins: dict[tuple[str, str], list[str]] = {}
        self.news = threading.Condition()

    def run(self, stack: contextlib.ExitStack) -> dict[str, str]:
        hosts = list(self.errands)
        for host, shell in zip(hosts, _each(hosts, open_shell, self.what), strict=True):
            self.shells[host] = stack.enter_context(shell)
        for host, seen in zip(hosts, _each(hosts, self._look, self.what), strict=True):
            self.seen[host] = seen
        self._check()
        lacking = [host for host in hosts if self.seen[host]["wrong"]]
        if lacking:
            _each(lacking, self._small, self.what)
            self._large(lacking)
            self.again = False
            for host, seen in zip(lacking, _each(lacking, self._look, self.what), strict=True):
                if seen["wrong"]:
                    raise CopyFailed(f"{host}: {', '.join(seen['wrong'])} changed while being copied.")
        return {host: str(self.seen[host]["folder"]) for host in hosts}

    # ------------------------------------------------------------ what is there

    def _look(self, host: str) -> dict[str, Any]:
        errand = self.errands[host]
        wanted = {name: (self.files[name].size, self.files[name].sum) for name in errand.names}
        job = {**errand.job, "files": wanted, "all": list(self.files), "again": self.again}
        if host in self.seen:
            job["folder"] = self.seen[host]["folder"]
        argv = streams.script(ARRIVALS, errand.python, "look", json.dumps(job))
        total = sum(size for size, _ in wanted.values())
        return streams.answer(
            host,
            streams.there(host, argv),
            told=lambda at: self.progress(host, "checking", at, total),
            stop=self.stop,
        )

    def _check(self) -> None:
        """Room and place on every host. Raises NotEnoughDisk, FolderOccupied."""
        short, occupied = [], []
        for host, seen in self.seen.items():
            size = sum(self.files[name].size for name in seen["wrong"])
            here = sum(seen["parts"].values())
            self.total[host], self.done[host] = size, here
            if size - here > seen["free"]:
                need, free = (size - here) / 1e9, seen["free"] / 1e9
                short.append(f"{host} needs {need:.2f} GB more in {seen['folder']}; the disk has {free:.2f} GB free")
            if seen["foreign"]:
                occupied.append(f"{host}: {seen['folder']} also holds {', '.join(seen['foreign'])}")
        if short:
            raise NotEnoughDisk(
                f"{self.what}: {'; '.join(short)}. Nothing was copied.",
                hint="Free some space there, or name another folder.",
            )
        if occupied:
            raise FolderOccupied(
                f"{'; '.join(occupied)}, which is no part of {self.what} and would be loaded with it.",
                hint="Remove what does not belong there, or name another folder.",
            )

    # ------------------------------------------------------------ copying

    def _small(self, host: str) -> None:
        folder = self.seen[host]["folder"]
        names = [name for name in self.seen[host]["wrong"] if self.files[name].size <= SMALL]
        if not names:
            return
        made = self.shells[host].run(["mkdir", "-p", folder])
        if not made.ok:
            raise CopyFailed(f"{host}: {folder} cannot be made: {made.err.strip()}.", hint=f"ssh {host} ls -ld ~")
        for name in names:
            if self.stop.is_set():
                raise CopyFailed(f"{host}: stopped.")
            self.shells[host].put(self.source / name, f"{folder}/{name}")
            self.done[host] += self.files[name].size
            self.progress(host, "copying", self.done[host], self.total[host])

    def _large(self, hosts: list[str]) -> None:
        wanted = {host: [name for name in self.seen[host]["wrong"] if self.files[name].size > SMALL] for host in hosts}
        held = {host: set(self.errands[host].names) - set(seen["wrong"]) for host, seen in self.seen.items()}
        spread = Spread(wanted, held, self._links(wanted, held))
        failures: list[ClusterError] = []

        def serve(host: str) -> None:
            try:
                while spread.lacks(host) and not self.stop.is_set():
                    with self.news:
                        copy = spread.next_for(host)
                        if copy is None:
                            self.news.wait(0.5)
                            continue
                    self._one(copy, spread)
            except ClusterError as error:
                with self.news:
                    failures.append(error)
                    spread.give_up(host)
                    self.news.notify_all()

        pool = ThreadPoolExecutor(max_workers=len(hosts), thread_name_prefix="carry")
        try:
            for future in [pool.submit(serve, host) for host in hosts]:
                future.result()
        finally:
            if failures or any(map(spread.lacks, hosts)):
                self.stop.set()
            pool.shutdown(wait=True)
        _raise(failures, self.what)

    def _one(self, copy: Copy, spread: Spread) -> None:
        """One copy from start to end. A link that fails is not used again; the file then comes another way."""
        host, file = copy.target, self.files[copy.name]
        before = self.done[host]
        last = part = self.seen[host]["parts"].get(copy.name, 0)
        offset = 0 if (host, copy.name) in self.damaged else part // CHUNK * CHUNK

        def told(at: int) -> None:
            nonlocal last
            last = at
            self.done[host] = before + max(at - part, 0)
            self.progress(host, copy.name, self.done[host], self.total[host])

        try:
            said = self._send(copy, file, offset, told)
        except ClusterError:
            if copy.source == HERE or self.stop.is_set():
                raise
            said = {"end": "short", "words": "the connection broke", "at": last}
        end, words, at = said.get("end"), said.get("words", ""), int(said.get("at", 0))
        with self.news:
            self.seen[host]["parts"][copy.name] = at
            self.done[host] = before + (file.size if end == "done" else at) - part
            if end == "done":
                spread.done(copy)
            elif end == "damaged" and (host, copy.name) not in self.damaged:
                self.damaged.add((host, copy.name))
                self.note(f"{host}: {words}; copying it again")
                spread.failed(copy)
            elif copy.source != HERE and end in ("short", "moved", "damaged"):
                self.note(f"{host}: {copy.name} from {copy.source}: {words}; it now comes another way")
                spread.failed(copy)
            else:
                raise _ended(host, str(end), words, self.what)
            self.news.notify_all()

    def _send(self, copy: Copy, file: File, offset: int, told: streams.Told) -> dict[str, Any]:
        """Send one file and return what the receiver said."""
        job = {"folder": self.seen[copy.target]["folder"], "name": copy.name}
        job |= {"size": file.size, "sum": file.sum, "offset": offset}
        receive = streams.script(ARRIVALS, self.errands[copy.target].python, "receive", json.dumps(job))
        folder = str(self.source) if copy.source == HERE else self.seen[copy.source]["folder"]
        read = ["dd", f"if={folder}/{copy.name}", f"bs={CHUNK}", f"skip={offset // CHUNK}"]
        if copy.source == HERE:
            feed, argv = read, streams.there(copy.target, receive)
        else:
            login = [*self.logins[copy.source, copy.target], shlex.join(receive)]
            line = f"{shlex.join(read)} 2>/dev/null | {shlex.join(login)}"
            feed, argv = [], streams.there(copy.source, ["sh", "-c", line])
        return streams.answer(copy.target, argv, feed=feed, told=told, stop=self.stop)

    # ------------------------------------------------------------ links between hosts

    def _links(self, wanted: Mapping[str, Sequence[str]], held: Mapping[str, set[str]]) -> dict[tuple[str, str], float]:
        """The pairs of hosts that have files for each other and where the first gets into the second, with speeds."""
        pairs = [
            (source, target)
            for source in self.errands
            for target in wanted
            if source != target
            and not {source, target} & set(LOCAL_NAMES)
            and (held[source] | set(wanted.get(source, ()))) & set(wanted[target])
        ]
        links = {}
        for (source, target), gets_in in zip(pairs, on_all(pairs, self._gets_in), strict=True):
            if gets_in is True:
                links[source, target] = self.routes.get((source, target), ("", 1.0))[1]
            else:
                self.note(f"{source} does not get into {target} by ssh; what it could pass on comes from here")
        return links

    def _gets_in(self, pair: tuple[str, str]) -> bool:
        source, target = pair
        for address in dict.fromkeys([self.routes.get(pair, ("", 0.0))[0], settings_of(target).hostname]):
            login = self._login(target, address) if address else []
            if login and self.shells[source].run([*login, "true"], LINK_S).ok:
                self.logins[pair] = login
                return True
        return False

    def _login(self, target: str, address: str) -> list[str]:
        """The argv with which another host runs something on this one: as the user that we are there.

        The target's host key is the one that we know it by, so nothing is asked and nobody can stand in between.
        """
        settings = settings_of(target)
        key = _known_key(settings.known_as, settings.known_hosts)
        if not key:
            return []
        options = ["-p", str(settings.port), "-l", settings.user, "-o", "HostKeyAlias=cluster-target"]
        options += ["-o", "StrictHostKeyChecking=yes", "-o", f"KnownHostsCommand=/bin/echo cluster-target {key}"]
        return [*streams.SSH, *options, "--", address]


def _each(hosts: Sequence[str], do: Callable[[str], Any], what: str) -> list[Any]:
    """`do` for each host at once. Raises what failed."""
    outcomes = on_all(hosts, do)
    _raise([outcome for outcome in outcomes if isinstance(outcome, ClusterError)], what)
    return outcomes


def _raise(failures: Sequence[ClusterError], what: str) -> None:
    if len(failures) == 1:
        raise failures[0]
    if failures:
        lines = "".join(f"\n  {failure.message}" for failure in failures)
        raise CopyFailed(f"{what}: {len(failures)} hosts failed:{lines}", hint=failures[0].hint)


def _ended(host: str, end: str, words: str, what: str) -> ClusterError:
    """What a receiver's last word means."""
    if end == "full":
        return NotEnoughDisk(
            f"{host}: the disk became full while {what} was copied ({words}).",
            hint="Free some space there; the same command goes on where this one was.",
        )
    if end == "busy":
        return CopyFailed(f"{host}: {words}.", hint="Wait for it, or end it there.")
    if end == "damaged":
        return CopyFailed(f"{host}: {words}, twice.", hint="Check the disk here and there.")
    return CopyFailed(f"{host}: {words}.", hint="The same command goes on where this one was.")


def _known_key(name: str, files: Sequence[Path]) -> str:
    """The type and key that known_hosts has for a host, "" if none."""
    for file in files:
        found = subprocess.run(["ssh-keygen", "-F", name, "-f", os.fspath(file)], capture_output=True, text=True)
        keys = [line.split()[1:3] for line in found.stdout.splitlines() if line and line[0] not in "#@"]
        if keys:
            return " ".join(next((key for key in keys if key[0] == "ssh-ed25519"), keys[0]))
    return ""
