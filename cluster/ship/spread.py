"""Who sends which file to whom: each leaves this machine once where hosts can pass it on. Pure: no I/O, no clock.

`carry.py` asks for the next copy of a host whenever it is idle, and says how each one ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

HERE = ""  # this machine, as a source: it has every file
AT_ONCE = 2  # copies that one source sends at a time; a host receives one


@dataclass(frozen=True, slots=True)
class Copy:
    """One file from `source` to `target`."""

    name: str
    source: str
    target: str


class Spread:
    """`wanted` are the files that each host lacks, `held` those that it has; `speeds` the pairs (source, target) of
    hosts that reach each other, in Gb/s."""

    def __init__(
        self,
        wanted: Mapping[str, Sequence[str]],
        held: Mapping[str, Set[str]],
        speeds: Mapping[tuple[str, str], float],
    ) -> None:
        self._wanted = {host: list(names) for host, names in wanted.items()}
        self._held = {host: set(names) for host, names in held.items()}
        self._speeds = dict(speeds)
        self._running: list[Copy] = []

    def lacks(self, host: str) -> bool:
        """Whether something is still to come for this host."""
        return bool(self._wanted[host]) or any(copy.target == host for copy in self._running)

    def next_for(self, target: str) -> Copy | None:
        """A copy to start now; None when there is nothing left, or a source will be free or have more later.

        From another host where one has the file, over the fastest link; from here where none has it or is getting it.
        """
        best: tuple[float, Copy] | None = None
        for name in self._wanted[target]:
            sources = [host for host in self._sources(name, target) if self._free(host)]
            source = max(sources, key=lambda host: self._speeds.get((host, target), 0.0), default=None)
            if source is not None and (best is None or self._speed(source, target) > best[0]):
                best = (self._speed(source, target), Copy(name, source, target))
        if best is None:
            return None
        copy = best[1]
        self._wanted[target].remove(copy.name)
        self._running.append(copy)
        return copy

    def done(self, copy: Copy) -> None:
        """The file is there, and may be passed on."""
        self._running.remove(copy)
        self._held.setdefault(copy.target, set()).add(copy.name)

    def failed(self, copy: Copy) -> None:
        """It is not; it will be tried again, but no more over this link."""
        self._running.remove(copy)
        self._wanted[copy.target].insert(0, copy.name)
        self._speeds.pop((copy.source, copy.target), None)

    def give_up(self, target: str) -> None:
        """This host gets no more."""
        self._wanted[target] = []
        self._running = [copy for copy in self._running if copy.target != target]

    def _sources(self, name: str, target: str) -> list[str]:
        near = [source for source, other in self._speeds if other == target]
        holders = [host for host in near if name in self._held.get(host, ())]
        coming = any(copy.name == name and copy.target in near for copy in self._running)
        return holders if holders or coming else [HERE]

    def _free(self, source: str) -> bool:
        return sum(copy.source == source for copy in self._running) < AT_ONCE

    def _speed(self, source: str, target: str) -> float:
        return self._speeds.get((source, target), 0.0)
