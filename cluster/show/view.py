"""What the terminal shows: phases of a start, the ready block, the status table.

Views are functions of the health that the supervisor tells; on a terminal a bar moves, elsewhere plain lines appear.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from cluster.state import ClusterState

END_PHASES = ("ready", "failed")


def amount(progress: dict[str, Any]) -> str:
    """How far it is, like "138 of 538 MB" or "3 of 5"."""
    done, total = progress["done"], progress["total"]
    if progress.get("unit") != "bytes":
        return f"{done} of {total}" if total else ""
    unit, name = (1e9, "GB") if max(done, total) >= 1e10 else (1e6, "MB")
    return f"{done / unit:.0f} of {total / unit:.0f} {name}" if total else f"{done / unit:.0f} {name}"


def curl(url: str, model: str, key: str | None, *, chats: bool = True) -> str:
    """A command line to paste. `key` is the text between the quotes of its header: the key, or a shell variable.

    A model that has no chat template (`chats` False) is asked for a plain continuation.
    """
    body: dict[str, Any] = {"model": model, "temperature": 0}  # a small model rambles at its own temperature
    if chats:
        route, body["messages"] = "chat/completions", [{"role": "user", "content": "What is the capital of France?"}]
    else:
        route, body["prompt"], body["max_tokens"] = "completions", "The capital of France is", 16
    header = f' -H "Authorization: Bearer {key}"' if key else ""
    return f"curl {url}/v1/{route}{header} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def ready_text(url: str, model: str, key: str | None, *, chats: bool = True) -> str:
    """What stands on the terminal once requests are served."""
    talk = "or talk to it:\n  cluster chat\n" if chats else ""
    return f"\n{model} is ready at {url}/v1\n\nTry it:\n  {curl(url, model, key, chats=chats)}\n{talk}"


class StartView:
    """Shows a start as it goes: a context manager; call `update` with each health."""

    def __init__(
        self, url: str, key: str | None, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._key = key
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._clock = clock
        self._phase = ""
        self._since = clock()
        self._quarter = -1
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> StartView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_bar()

    def update(self, health: dict[str, Any]) -> None:
        """Show what changed since the last call."""
        phase = health["status"]
        if phase != self._phase:
            self._enter(phase, health)
        if phase not in END_PHASES:
            self._progress(health.get("progress"))

    def _enter(self, phase: str, health: dict[str, Any]) -> None:
        if self._console.is_terminal and self._phase and self._phase not in (*END_PHASES, "lost"):
            self._say(f"{self._phase:<12} {self._clock() - self._since:.1f} s")
        self._phase, self._since, self._quarter = phase, self._clock(), -1
        if phase == "ready":
            self._stop_bar()
            self._say(ready_text(self._url, health["model"], self._key, chats="chat" in health["takes"]))
        elif phase in ("failed", "lost"):
            self._stop_bar()
            self._say(f"{phase:<12} {health.get('reason', '')}")
        elif not self._console.is_terminal:
            self._say(phase)

    def _progress(self, progress: dict[str, Any] | None) -> None:
        done, total = (progress["done"], progress["total"]) if progress else (0, 0)
        text = amount(progress) if progress else ""
        name = progress["what"] if progress else self._phase
        if self._console.is_terminal:
            shown: dict[str, Any] = {"completed": done, "total": total or None, "amount": text}
            if self._task is None:
                self._task = self._bar.add_task(name, **shown)
                self._bar.start()
            self._bar.update(self._task, description=name, **shown)
        elif total and (quarter := 4 * done // total) > self._quarter:
            self._quarter = quarter
            self._say(f"{name}  {text}")

    def _stop_bar(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._bar.stop()
            self._task = None

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def status_table(state: ClusterState, health: dict[str, Any]) -> Table:
    """The running cluster, one fact a row."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")

    def row(name: str, value: object) -> None:
        table.add_row(name, Text(str(value)))

    progress = health.get("progress")
    row("status", health["status"] + (f" ({amount(progress)})" if progress else ""))
    row("model", health.get("model", state.model))
    row("API", f"{state.url}/v1" + (" (needs the API key)" if state.needs_key else ""))
    row("coordinator", f"pid {state.coordinator.pid}" + (", detached" if state.detached else ""))
    if health.get("backend"):
        row("parallel", f"{health['strategy']} over {health['backend']}, {len(health['ranks'])} ranks")
    for rank in health.get("ranks", []):
        row(f"rank {rank['rank']}", _rank_text(rank, health))
    for host, why in health.get("left_out", {}).items():
        row("left out", f"{host}: {why}")
    if health.get("context"):
        row("context", f"{health['context']} tokens")
    if requests := health.get("requests"):
        row("requests", f"{requests['running']} running, {requests['waiting']} waiting")
    if health.get("last_token_age_s") is not None:
        row("last token", f"{health['last_token_age_s']:.0f} s ago")
    if health.get("restarts"):
        row("relaunches", health["restarts"])
    if reason := state.reason or health.get("reason"):
        row("reason", reason)
    for warning in health.get("warnings", []):
        row("warning", warning)
    return table


def _rank_text(rank: dict[str, Any], health: dict[str, Any]) -> str:
    several = len(health["ranks"]) > 1
    parts = [rank["host"], f"pid {rank['pid']}"]
    if "Paravirtual" in rank.get("device", ""):
        parts.append("virtual machine")
    if health.get("strategy") == "pipeline":
        parts.append(f"layers {rank['layers'][0]} to {rank['layers'][1] - 1}")
    if rank.get("phase", "ready") != "ready":
        parts.append(rank["phase"])
    if rank.get("active_bytes"):
        parts.append(f"{rank['active_bytes'] / 1e9:.1f} GB")
    if rank.get("link") and several:
        parts.append(f"link {rank['link']}")
    if rank.get("idle_share") is not None and several:
        parts.append(f"idle {rank['idle_share']:.0%}")
    if rank.get("tokens_per_s"):
        parts.append(f"{rank['tokens_per_s']:.0f} tokens/s")
    return ", ".join(parts)


def show(renderable: object) -> None:
    """Print to stdout."""
    Console(file=sys.stdout, highlight=False).print(renderable)
