"""What the terminal shows while things are brought to hosts: one bar per host; plain lines where it is no terminal.

Beside view.py and the tables the only user of rich. `cli_ship.py` hands `update` and `say` to what does the work.
"""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from cluster.show.view import amount

PACKAGES = ("installing", "fetching packages")  # counted; everything else is bytes


class ShipView:
    """A context manager; its methods may be called from any thread."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._lock = threading.Lock()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TextColumn("{task.fields[what]}"),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._quarters: dict[str, tuple[str, int]] = {}

    def __enter__(self) -> ShipView:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def update(self, host: str, what: str, done: int, total: int) -> None:
        """How far a host is."""
        told = {"done": done, "total": total, "unit": "packages" if what in PACKAGES else "bytes"}
        with self._lock:
            if self._console.is_terminal:
                if host not in self._tasks:
                    self._tasks[host] = self._bars.add_task(host, total=None, amount="", what="")
                shown = {"completed": done, "total": total or None, "amount": amount(told), "what": what}
                self._bars.update(self._tasks[host], **shown)  # type: ignore[arg-type]
                return
            before, quarter = self._quarters.get(host, ("", -1))
            kind = what if what in (*PACKAGES, "checking") else "copying"
            now = 4 * done // total if total else 0
            if (kind, now) != (before, quarter) and (kind != before or now > quarter):
                self._quarters[host] = (kind, now)
                self._print(f"{host}: {kind} {amount(told)}")

    def say(self, text: str) -> None:
        """A line above the bars."""
        with self._lock:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
