"""The life of a cluster: resolving, launching, loading, warming, ready; when its rank is lost, relaunching or failed.

One `Supervisor` per coordinator. It is the `service` that `api.py` asks; `coordinator.py` runs it in the API's event
loop. It opens no port and prints nothing: `on_change` is called on every change, `health()` tells it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.config import ClusterConfig
from cluster.engine_client import EngineClient
from cluster.errors import EngineLost, RankFailed
from cluster.launch import RANK_COMMAND, RankProcess, free_port
from cluster.paths import Folders
from cluster.state import RankRecord
from parallel import wire

if TYPE_CHECKING:
    from cluster.chat import ChatModel
    from cluster.weights import ResolvedModel

T = TypeVar("T")
logger = logging.getLogger("cluster.supervise")
HOST = "this machine"
SHOWN_LOG_LINES = 12


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank may take, in seconds, before it counts as lost, and how often it is relaunched.

    `join_s`: from its start to the first sign of life after the Join. `beat_s`: between two signs of life.
    """

    join_s: float = 120
    beat_s: float = 10
    stop_s: float = 3
    relaunches: int = 3
    window_s: float = 600


class RelaunchBudget:
    """At most `limit` relaunches in any `window_s` seconds. Pure: time is an argument."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._times: list[float] = []

    def take(self, now: float) -> bool:
        """Count a relaunch at `now`; False when the budget is used up."""
        self._times = [t for t in self._times if now - t < self._window_s]
        if len(self._times) >= self._limit:
            return False
        self._times.append(now)
        return True


class Supervisor:
    """Keeps one rank alive. `run` is its life; cancelling that stops the rank in order."""

    def __init__(
        self,
        config: ClusterConfig,
        folders: Folders,
        *,
        resolve: Callable[..., ResolvedModel],
        load_chat: Callable[[Path], ChatModel],
        rank_command: Sequence[str] = RANK_COMMAND,
        on_change: Callable[[], None] = lambda: None,
        limits: Limits = Limits(),
    ) -> None:
        self.model = config.model or "default"
        self.created = int(time.time())
        self.chat: ChatModel | None = None
        self.engine: EngineClient | None = None
        self.ready: wire.Ready | None = None
        self.stats = wire.Stats()
        self.phase = "starting"
        self.reason = ""
        self.log_tail: list[str] = []
        self.restarts = 0
        self.ranks: list[RankRecord] = []
        self._config = config
        self._folders = folders
        self._resolve = resolve
        self._load_chat = load_chat
        self._command = rank_command
        self._on_change = on_change
        self._limits = limits
        self._progress: dict[str, Any] | None = None
        self._rank: RankProcess | None = None
        self._announced: wire.Ready | None = None
        self._was_ready = False
        self._chat_error: BaseException | None = None
        self._beat: wire.Beat | None = None
        self._heard = 0.0
        self._token_at: float | None = None

    # ------------------------------------------------------------ what others ask

    def health(self) -> dict[str, Any]:
        """The answer of /health: phase, progress, ages in seconds, and why it is not ready."""
        age = None if self._token_at is None else round(time.monotonic() - self._token_at, 1)
        warnings = [self._rank.log.error] if self._rank is not None and self._rank.log.error else []
        return {
            "status": self.phase,
            "model": self.model,
            "progress": self._progress,
            "last_token_age_s": age,
            "restarts": self.restarts,
            "reason": self.reason,
            "warnings": warnings,
            "pid": os.getpid(),
            "started": self.created,
            "context": self.ready.context if self.ready is not None else None,
            "ranks": [{"rank": r.rank, "host": r.host, "pid": r.process.pid} for r in self.ranks],
            "requests": {"waiting": self.stats.waiting, "running": self.stats.prefilling + self.stats.running},
        }

    def kill(self) -> None:
        """End the rank without grace; `run` is being cancelled and its user is in a hurry."""
        if self._rank is not None:
            self._rank.kill()

    # ------------------------------------------------------------ the life

    async def run(self) -> None:
        """Live until cancelled. Raises ClusterError when the cluster could not be started in the first place.

        A rank that is lost after the cluster was ready is relaunched within the budget of `Limits`; then the phase is
        "failed" and this waits for its cancellation, so that /health can tell.
        """
        self._enter("resolving")
        resolved = await self._in_thread(self._resolve_model)
        self.model = resolved.name
        chat = asyncio.create_task(self._load_tokenizer(resolved.folder), name="load-chat")
        budget = RelaunchBudget(self._limits.relaunches, self._limits.window_s)
        try:
            while True:
                self._enter("relaunching" if self._was_ready else "launching")
                phase, reason = await self._live(resolved.folder)
                if self._chat_error is not None:
                    raise self._chat_error
                if not self._was_ready:
                    raise self._start_failure(phase, reason)
                if not budget.take(time.monotonic()):
                    break
                self.restarts += 1
            self.reason = f"{reason}; it was relaunched {self._limits.relaunches} times in " + (
                f"{self._limits.window_s / 60:.0f} minutes and is not started again"
            )
            self._enter("failed")
            await asyncio.get_running_loop().create_future()
        finally:
            chat.cancel()

    async def _live(self, folder: Path) -> tuple[str, str]:
        """One life of the rank, from its launch until it is gone: the phase it had reached, and why it ended."""
        over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._over = over
        self._beat = self._announced = None
        self._heard = time.monotonic()
        plan = self._plan(folder)
        rank = await self._launch(plan)
        tasks = [
            asyncio.create_task(self._connect(plan), name="connect"),
            asyncio.create_task(self._watch_process(rank), name="watch-process"),
            asyncio.create_task(self._watch_beats(), name="watch-beats"),
        ]
        for task in tasks:
            task.add_done_callback(self._watcher_ended)
        try:
            reason = await over
            phase, self.reason = self.phase, f"rank 0 on {HOST}: {reason}"
            self._enter("lost")
            return phase, reason
        finally:
            await _to_the_end(self._stop_rank(rank, tasks))

    async def _launch(self, plan: wire.RankPlan) -> RankProcess:
        start = asyncio.create_task(RankProcess.start(plan, self._folders.rank_log(0), self._command))
        try:
            rank = self._rank = await _to_the_end(start)
        except asyncio.CancelledError:
            await self._stop_rank(start.result(), [])
            raise
        self.ranks = [RankRecord(0, HOST, rank.record)]
        self._on_change()  # whoever cleans up after a crash of ours must know this pid
        return rank

    async def _stop_rank(self, rank: RankProcess, watchers: list[asyncio.Task[None]]) -> None:
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        engine, self.engine, self.ready = self.engine, None, None
        if engine is not None:
            await (engine.close(self.reason) if self.reason else engine.close())
        await rank.stop(self._limits.stop_s)
        self.log_tail = rank.log.last_lines(SHOWN_LOG_LINES)
        self.ranks = []
        self._rank = None
        self.stats = wire.Stats()
        self._on_change()

    def _plan(self, folder: Path) -> wire.RankPlan:
        config = self._config
        # 0 lets the rank choose; a prefix cache of one byte holds nothing, which is what 0 asked for here
        prefix_bytes = 0 if config.prefix_memory is None else max(1, config.prefix_memory)
        return wire.RankPlan(
            model=str(folder),
            host="127.0.0.1",
            port=free_port("127.0.0.1"),
            secret_file=str(self._folders.secret),
            parent=os.getpid(),
            context=config.context or 0,
            slots=config.slots,
            kv_limit_bytes=config.kv_memory or 0,
            prefix_bytes=prefix_bytes,
            chunk_tokens=config.prefill_step_size,
            wired_limit=config.wired_limit,
        )

    # ------------------------------------------------------------ watching one life

    def _end_life(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)

    def _watcher_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._over.set_exception(error)  # our own bug: `run` ends with it

    async def _connect(self, plan: wire.RankPlan) -> None:
        """Join the rank as soon as it listens, and report when the connection ends."""
        while self.engine is None:
            try:
                self.engine = await EngineClient.connect(
                    plan.host, plan.port, Path(plan.secret_file), self._on_message, HOST
                )
            except OSError:
                await asyncio.sleep(0.05)  # it does not listen yet; _watch_process and _watch_beats bound this
            except (EngineLost, wire.WireError) as error:
                await self._end_after_process(str(error).rstrip("."))
                return
        reason = await asyncio.shield(self.engine.lost)
        await self._end_after_process(reason)

    async def _end_after_process(self, reason: str) -> None:
        """A connection ends a moment before its process does, and how the process ended says more: let it go first."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._over), 1)
        self._end_life(reason)

    async def _watch_process(self, rank: RankProcess) -> None:
        self._end_life(await rank.ended())

    async def _watch_beats(self) -> None:
        limits, tick_s = self._limits, min(0.5, self._limits.beat_s / 4)
        stall_s = max(limits.beat_s, self._config.stall_timeout)
        while True:
            before = time.monotonic()
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            if now - before > tick_s + 2:
                self._heard = now  # we were asleep ourselves (a stopped process, a closed lid): hear it out first
            silent_s = now - self._heard
            beats = self._beat is not None or self._announced is not None
            if not beats and silent_s > limits.join_s:
                self._end_life(f"it gave no sign of life for {limits.join_s:g} s while {self.phase}")
            elif beats and silent_s > limits.beat_s:
                self._end_life(f"it gave no sign of life for {limits.beat_s:g} s")
            elif self._beat is not None and self._beat.since_s > stall_s:
                self._end_life(f"its step {self._beat.step} has run for {self._beat.since_s:.0f} s without an end")

    def _on_message(self, message: wire.Message) -> None:
        self._heard = time.monotonic()
        if isinstance(message, wire.Beat):
            if message.stats.output_tokens > self.stats.output_tokens:
                self._token_at = self._heard
            self._beat, self.stats = message, message.stats
        elif isinstance(message, wire.Progress):
            phase = self.phase if message.phase == "starting" else message.phase
            unit = "bytes" if phase == "loading" else "steps"
            self._enter(phase, {"what": phase, "done": message.done, "total": message.total, "unit": unit})
        elif isinstance(message, wire.Ready):
            self._announced = message
            self._check_ready()
        elif isinstance(message, wire.Failed):
            self._end_life(message.message.rstrip("."))

    def _check_ready(self) -> None:
        if self._announced is None or self.chat is None or self.phase == "ready":
            return
        self.ready = self._announced
        self.reason = ""
        self._was_ready = True
        self._enter("ready")

    def _enter(self, phase: str, progress: dict[str, Any] | None = None) -> None:
        if phase != self.phase:
            logger.info("%s %s%s", self.model, phase, f": {self.reason}" if phase in ("lost", "failed") else "")
        self.phase = phase
        self._progress = progress
        self._on_change()

    def _start_failure(self, phase: str, reason: str) -> RankFailed:
        tail = "".join(f"\n  {line}" for line in self.log_tail)
        log = f"\nLast lines of {self._folders.rank_log(0)}:{tail}" if tail else ""
        hint = "`cluster logs` shows more."
        if "SIGKILL" in reason:
            hint = "If nobody killed it, the system ran out of memory: try a smaller --kv-memory, --context or model."
        return RankFailed(f"Rank 0 on {HOST} failed while {phase}: {reason}.{log}", hint=hint)

    # ------------------------------------------------------------ blocking work

    def _resolve_model(self) -> ResolvedModel:
        loop = self._loop

        def progress(what: str, done: int, total: int) -> None:
            note = {"what": what, "done": done, "total": total, "unit": "bytes"}
            with contextlib.suppress(RuntimeError):  # the loop has ended before this download
                loop.call_soon_threadsafe(self._fetched, note)

        return self._resolve(self._config.model, cache=self._folders.cache, progress=progress)

    def _fetched(self, note: dict[str, Any]) -> None:
        if self.phase == "resolving":
            self._enter("resolving", note)

    async def _load_tokenizer(self, folder: Path) -> None:
        try:
            self.chat = await self._in_thread(lambda: self._load_chat(folder))
            self._check_ready()
        except Exception as error:  # raised again by `run`
            self._chat_error = error
            self._end_life("the tokenizer could not be loaded")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking `work` in a daemon thread: unlike the loop's own pool, nobody waits for it after a Ctrl-C."""
        loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def body() -> None:
            outcome: tuple[T | None, BaseException | None]
            try:
                outcome = (work(), None)
            except BaseException as error:
                outcome = (None, error)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, *outcome)

        threading.Thread(target=body, name="blocking-work", daemon=True).start()
        return await future


async def _to_the_end(work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
    """Await `work` also when we are cancelled meanwhile: half a start or half a stop would leave a process behind."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
