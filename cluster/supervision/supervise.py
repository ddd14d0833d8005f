"""The life of a cluster: resolving, launching, joining to ready; when a rank is lost, relaunching or failed.

One `Supervisor` per coordinator. It is the `service` that `api.py` asks; `coordinator.py` runs it in the API's event
loop. It opens no port and prints nothing: `on_change` is called on every change, `health()` tells it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cluster.cabling import hostfile
from cluster.config import ClusterConfig
from cluster.errors import BadSetting, ClusterError, EngineLost, RankFailed
from cluster.paths import Folders
from cluster.plan import model_info
from cluster.serve.engine_client import EngineClient
from cluster.state import RankRecord
from cluster.supervision.arrange import LOOPBACK, THIS_MACHINE, Arrangement, arrange, local_hostfile
from cluster.supervision.background import in_thread, to_the_end
from cluster.supervision.deploy import Deployment, answering, deploy, owner, with_others, with_secret
from cluster.supervision.launch import RANK_COMMAND, RankProcess, free_port
from cluster.supervision.mlx_launch import LaunchedRanks, synch_variables
from cluster.supervision.watch import STALLED, Limits, RelaunchBudget, Watch
from parallel import wire

if TYPE_CHECKING:
    from cluster.serve.chat import ChatModel
    from cluster.ship.weights import ResolvedModel

logger = logging.getLogger("cluster.supervise")
SHOWN_LOG_LINES = 12
LIMITS = Limits()
CLOSED = "its connection closed"  # as rank 0 says it of the others, and the connection to rank 0 of itself
# Tensor output is known to go wrong past 2,000 to 4,000 tokens in some versions, so the first check is longer. It takes
# minutes on a slow machine; where a lost host forces other ranks, with the same versions, users are waiting.
CHECK_TOKENS = 4200
CHECK_AGAIN_TOKENS = 512
LEAKED_BYTES = 4 << 30  # less may be the system's own


class Supervisor:
    """Keeps the ranks of one cluster alive. `run` is its life; cancelling that stops the rank in order."""

    def __init__(
        self,
        config: ClusterConfig,
        folders: Folders,
        *,
        resolve: Callable[..., ResolvedModel],
        load_chat: Callable[[Path], ChatModel],
        rank_command: Sequence[str] = RANK_COMMAND,
        on_change: Callable[[], None] = lambda: None,
        limits: Limits = LIMITS,
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
        self._processes: RankProcess | LaunchedRanks | None = None
        self._arrangement: Arrangement | None = None
        self._deployment: Deployment | None = None
        self._passed: set[tuple[str, tuple[wire.RankSpec, ...]]] = set()  # layouts that have been ready
        self._returned: set[str] = set()  # hosts that were left out and answer again
        self.warnings: list[str] = []  # what the last ranks left on their hosts
        self._watch = Watch([], limits, config.stall_timeout)
        self._was_ready = False
        self._launch_id = ""
        self._chat_error: BaseException | None = None
        self._token_at: float | None = None

    # ------------------------------------------------------------ what others ask

    def health(self) -> dict[str, Any]:
        """The answer of /health: phase, progress, ages in seconds, and why it is not ready."""
        age = None if self._token_at is None else round(time.monotonic() - self._token_at, 1)
        return {
            "status": self.phase,
            "model": self.model,
            "progress": self._progress,
            "last_token_age_s": age,
            "restarts": self.restarts,
            "reason": self.reason,
            "warnings": self.warnings + (self._processes.errors if self._processes is not None else []),
            "left_out": self._left_out(),
            "returned": sorted(self._returned),
            "pid": os.getpid(),
            "started": self.created,
            "context": self.ready.context if self.ready is not None else None,
            "takes": self.chat.takes if self.chat is not None else [],
            "strategy": self._arrangement.strategy if self._arrangement is not None else "single",
            "backend": self._arrangement.backend if self._arrangement is not None else "",
            "ranks": [self._rank_health(r) for r in self.ranks if r.rank >= 0],
            "requests": {"waiting": self.stats.waiting, "running": self.stats.prefilling + self.stats.running},
        }

    def _rank_health(self, record: RankRecord) -> dict[str, Any]:
        facts: dict[str, Any] = {"rank": record.rank, "host": record.host, "pid": record.process.pid}
        if self._arrangement is not None:
            spec = self._arrangement.ranks[record.rank]
            facts["layers"] = [spec.start, spec.stop]
            facts["link"] = self._arrangement.link(record.rank)
        if self.ready is not None and record.rank < len(self.ready.facts):
            facts["device"] = self.ready.facts[record.rank].device
        return facts | self._watch.facts(record.rank)

    @property
    def rank_stats(self) -> list[tuple[str, wire.Stats]]:
        """Host and latest numbers of each rank, for metrics."""
        return [(seen.host, seen.beat.stats if seen.beat is not None else wire.Stats()) for seen in self._watch.ranks]

    def _left_out(self) -> dict[str, str]:
        """Hosts that were asked for and have no rank, each with the reason."""
        if (deployment := self._deployment) is None:
            return {}
        return {**deployment.unused, **deployment.away} | {
            host: "it is back; `cluster up` takes it in" for host in self._returned
        }

    @property
    def launch(self) -> tuple[str, list[str]]:
        """The id of the running launch, and the other hosts on which its ranks are."""
        hosts = list(self._deployment.sites.hosts) if self._deployment is not None else []
        return self._launch_id, hosts

    def take_in(self) -> None:
        """Start anew with hosts that have come back; open requests get an error."""
        if self._returned and self.phase == "ready":
            self.restarts -= 1  # asked for, so it does not count against the budget
            self._end_life(f"hosts come back: {', '.join(sorted(self._returned))}")

    def kill(self) -> None:
        """End the ranks without grace; `run` is being cancelled and its user is in a hurry."""
        if self._processes is not None:
            self._processes.kill()

    # ------------------------------------------------------------ the life

    async def run(self) -> None:
        """Live until cancelled. Raises ClusterError when the cluster could not be started in the first place.

        A rank that is lost after the cluster was ready is relaunched within the budget of `Limits`; then the phase is
        "failed" and this waits for its cancellation, so that /health can tell.
        """
        self._enter("resolving")
        loop = asyncio.get_running_loop()
        resolved = await in_thread(lambda: self._resolve_model(loop))
        self.model = resolved.name
        alone, memory = self._config, psutil.virtual_memory().total
        self._config = await in_thread(lambda: with_others(alone, resolved.name, resolved.folder, memory))
        if not self._remote:
            self._arrangement = await in_thread(lambda: self._arrange(resolved.folder))
        chat = asyncio.create_task(self._load_tokenizer(resolved.folder), name="load-chat")
        budget = RelaunchBudget(self._limits.relaunches, self._limits.window_s)
        try:
            while True:
                try:
                    if self._remote:
                        await self._deploy(resolved)
                    self._enter("relaunching" if self._was_ready else "launching")
                    phase = await self._live(resolved.folder)
                except ClusterError as error:
                    if not self._was_ready or not self._remote:
                        raise
                    self.reason = f"{self.reason}; and then: {error.message}"
                    break
                if self._chat_error is not None:
                    raise self._chat_error
                if not self._was_ready:
                    raise self._start_failure(phase, self.reason)
                if not budget.take(time.monotonic()):
                    self.reason = f"{self.reason}; it was relaunched {self._limits.relaunches} times in " + (
                        f"{self._limits.window_s / 60:.0f} minutes and is not started again"
                    )
                    break
                self.restarts += 1
            self._enter("failed")
            await asyncio.get_running_loop().create_future()
        finally:
            chat.cancel()

    async def _live(self, folder: Path) -> str:
        """One life of the ranks, from their launch until one is gone: the phase they had reached; `reason` says why."""
        over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._over = over
        plan = self._plan(folder)
        if (deployment := self._deployment) is not None:
            plan = await in_thread(lambda: with_secret(plan, deployment, self._folders))
        hosts = [plan.of(rank).host for rank in range(plan.size)]
        self._watch = Watch(hosts, self._limits, self._config.stall_timeout)
        processes = await self._launch(plan)
        tasks = [
            asyncio.create_task(self._connect(plan), name="connect"),
            asyncio.create_task(self._watch_process(processes), name="watch-process"),
            asyncio.create_task(self._watch_beats(), name="watch-beats"),
        ]
        if deployment is not None and deployment.away:
            tasks.append(asyncio.create_task(self._watch_away(set(deployment.away)), name="watch-away"))
        for task in tasks:
            task.add_done_callback(self._watcher_ended)
        try:
            self.reason = await over
            phase = self.phase
            self._blame_fast_synch()
            self._enter("lost")
            return phase
        finally:
            await to_the_end(self._stop_ranks(processes, tasks))

    async def _launch(self, plan: wire.RankPlan) -> RankProcess | LaunchedRanks:
        start: asyncio.Task[RankProcess] | asyncio.Task[LaunchedRanks]
        if self._arrangement is None:
            start = asyncio.create_task(RankProcess.start(plan, self._folders.rank_log(0), self._command))
        else:
            start = asyncio.create_task(
                LaunchedRanks.start(
                    plan,
                    self._arrangement,
                    self._folders,
                    fast_synch="off" if self._synch_off else self._config.fast_synch,
                    command=self._command,
                    deployment=self._deployment,
                )
            )
        try:
            processes: RankProcess | LaunchedRanks = await to_the_end(start)
        except asyncio.CancelledError:
            await self._stop_ranks(start.result(), [])
            raise
        self._processes = processes
        self._record()
        return processes

    def _blame_fast_synch(self) -> None:
        """After a stall with MLX_METAL_FAST_SYNCH on: off from now on, for this user's clusters."""
        switched_on = self._arrangement is not None and any(
            variable.endswith("=1") for variable in synch_variables(self._arrangement, self._config.fast_synch)
        )
        if STALLED in self.reason and switched_on and not self._synch_off:
            self.reason += "; MLX_METAL_FAST_SYNCH was on and is off from now on"
            with contextlib.suppress(OSError):
                self._folders.fast_synch_off.touch()

    @property
    def _synch_off(self) -> bool:
        return self._config.fast_synch == "auto" and self._folders.fast_synch_off.exists()

    def _record(self) -> None:
        """Whoever cleans up after a crash of ours must know these processes."""
        if self._processes is not None:
            self.ranks = [
                RankRecord(rank, self._watch.ranks[rank].host if rank >= 0 else THIS_MACHINE, process)
                for rank, process in sorted(self._processes.processes.items())
            ]
        self._on_change()

    async def _stop_ranks(self, processes: RankProcess | LaunchedRanks, watchers: list[asyncio.Task[None]]) -> None:
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        engine, self.engine, self.ready = self.engine, None, None
        if engine is not None:
            await (engine.close(self.reason) if self.reason else engine.close())
        await processes.stop(self._limits.stop_s, self._limits.last_words_s if self.reason else 0)
        self.log_tail = processes.last_lines(SHOWN_LOG_LINES)
        if isinstance(processes, LaunchedRanks):
            if self.reason:
                self.reason = self._with_exit(self.reason, processes.exits)
            self.warnings = self._not_given_back(processes.reports)
        self.ranks = []
        self._processes = None
        self.stats = wire.Stats()
        self._on_change()

    def _not_given_back(self, reports: Mapping[str, wire.Reaped | ClusterError]) -> list[str]:
        """Hosts that must be rebooted: a rank does not end there, or memory did not come back."""
        before = self._deployment.available if self._deployment is not None else {}
        told = []
        for host, report in reports.items():
            if isinstance(report, ClusterError):
                told.append(f"{host} could not be asked whether its ranks have ended: {report.message}")
            elif report.stuck:
                pids = ", ".join(map(str, report.stuck))
                told.append(f"reboot {host}: processes {pids} do not end, not even by SIGKILL")
            elif before.get(host, 0) - report.available_bytes > LEAKED_BYTES:
                missing = (before[host] - report.available_bytes) / 1e9
                told.append(f"reboot {host} if nothing else uses it: {missing:.1f} GB of memory did not come back")
        for warning in told:
            logger.warning("%s", warning)
        return told

    @property
    def _remote(self) -> bool:
        """Whether ranks run on hosts that must be looked at first."""
        config = self._config
        return bool(config.hosts) or (config.hostfile is not None and not hostfile.read(Path(config.hostfile)).local)

    async def _deploy(self, resolved: ResolvedModel) -> None:
        """Look at the hosts and prepare them for the next launch."""
        loop = asyncio.get_running_loop()

        def say(phase: str, done: int, total: int) -> None:
            note = {"what": phase, "done": done, "total": total, "unit": "bytes"} if total else None
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._enter, phase, note)

        first = not self._was_ready
        self._deployment = await in_thread(
            lambda: deploy(self._config, self._folders, resolved.name, resolved.folder, first=first, say=say)
        )
        self._arrangement = self._deployment.arrangement
        self._returned = set()
        for note in (*self._deployment.notes, *(f"{h} is left out: {why}" for h, why in self._left_out().items())):
            logger.info("%s", note)

    async def _watch_away(self, away: set[str]) -> None:
        """Notice when a host that could not be reached answers again."""
        while away:
            await asyncio.sleep(self._limits.look_again_s)
            for host in await in_thread(lambda: answering(sorted(away))):
                logger.info("%s is back; `cluster up` takes it in", host)
                self._returned.add(host)
                away.discard(host)

    def _arrange(self, folder: Path) -> Arrangement | None:
        """How the model is spread, or None for one rank. Blocks; raises ClusterError."""
        config = self._config
        if config.hostfile is not None:
            if config.local is not None:
                raise BadSetting("--local and --hostfile both say where the ranks are; give one of them.")
            hosts = hostfile.read(Path(config.hostfile))
        else:
            hosts = local_hostfile(config.local or 1)
        if len(hosts.hosts) == 1:
            if config.split or config.parallel != "auto":
                raise BadSetting("--parallel and --split are for several ranks; add --local N or --hostfile F.")
            return None
        return arrange(config, hosts, model_info.read(folder))

    def _plan(self, folder: Path) -> wire.RankPlan:
        config = self._config
        # 0 lets the rank choose; a prefix cache of one byte holds nothing, which is what 0 asked for here
        prefix_bytes = 0 if config.prefix_memory is None else max(1, config.prefix_memory)
        arrangement, deployment = self._arrangement, self._deployment
        self._launch_id = secrets.token_hex(8)
        return wire.RankPlan(
            model=str(folder),
            host=deployment.address if deployment is not None else LOOPBACK,
            port=deployment.port if deployment is not None else free_port(LOOPBACK),
            secret_file=str(self._folders.secret),
            parent=os.getpid() if deployment is None else 0,
            owner=owner(self._folders),
            context=config.context or 0,
            slots=config.slots,
            kv_limit_bytes=config.kv_memory or 0,
            prefix_bytes=prefix_bytes,
            chunk_tokens=config.prefill_step_size,
            wired_limit=config.wired_limit,
            launch=self._launch_id,
            strategy=arrangement.strategy if arrangement is not None else "single",
            backend=arrangement.backend if arrangement is not None else "",
            ranks=list(arrangement.ranks) if arrangement is not None else [],
            check_tokens=self._check_tokens(),
        )

    def _check_tokens(self) -> int:
        """How long a prompt the next launch checks itself with: 0 where the same ranks have passed before."""
        arrangement = self._arrangement
        if not self._config.self_check or arrangement is None or arrangement.layout in self._passed:
            return 0
        return CHECK_AGAIN_TOKENS if self._passed else CHECK_TOKENS

    # ------------------------------------------------------------ watching one life

    def _end_life(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)

    def _watcher_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._over.set_exception(error)  # our own bug: `run` ends with it

    async def _connect(self, plan: wire.RankPlan) -> None:
        """Join rank 0 as soon as it listens, and report when the connection ends."""
        host = plan.of(0).host
        while self.engine is None:
            try:
                self.engine = await EngineClient.connect(
                    plan.host, plan.port, Path(plan.of(0).secret_file), self._on_message, host
                )
            except OSError:
                await asyncio.sleep(0.05)  # it does not listen yet; _watch_process and _watch_beats bound this
            except (EngineLost, wire.WireError) as error:
                await self._end_after_process(self._watch.of(0, str(error).rstrip(".")))
                return
        reason = await asyncio.shield(self.engine.lost)
        await self._end_after_process(self._watch.of(0, reason))

    async def _end_after_process(self, reason: str) -> None:
        """A connection ends a moment before its process does, and how the process ended says more: let it go first."""
        if self._arrangement is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._over), 1)
        self._end_life(reason)

    async def _watch_process(self, processes: RankProcess | LaunchedRanks) -> None:
        how = await processes.ended()
        if isinstance(processes, LaunchedRanks):  # it ends because ranks do, and they or rank 0 say why a little later
            await asyncio.sleep(1)
            self._end_life(self._watch.hung_up or how)
        else:
            self._end_life(self._watch.of(0, how))

    async def _watch_beats(self) -> None:
        tick_s = min(0.5, self._limits.beat_s / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(tick_s)
            if time.monotonic() - before > tick_s + 2:
                self._watch.hear_them_first()
            if reason := self._watch.trouble():
                self._end_life(reason)

    def _with_exit(self, reason: str, exits: dict[int, str]) -> str:
        """`reason` with how the process ended, where the end of its connection was all that is known.

        mlx.launch ends the others by SIGTERM, and their sessions, when one ends; then that one is named.
        """
        lost = next((rank for rank in exits if reason == self._watch.of(rank, CLOSED)), None)
        by_itself = next((rank for rank, how in exits.items() if "SIGTERM" not in how), None)
        ended_by_launcher = reason == self._watch.hung_up or (lost is not None and "SIGTERM" in exits[lost])
        if by_itself is not None and ended_by_launcher:
            reason = self._watch.of(by_itself, f"its process {exits[by_itself]}")
        elif lost is not None:
            reason = f"{reason} and its process {exits[lost]}"
        else:
            return reason
        logger.info("%s lost: %s", self.model, reason)
        return reason

    def _on_message(self, message: wire.Message) -> None:
        rank = getattr(message, "rank", 0)
        if not 0 <= rank < len(self._watch.ranks):
            return
        self._watch.heard(rank, message)
        if isinstance(message, wire.Beat) and rank == 0:
            if message.stats.output_tokens > self.stats.output_tokens:
                self._token_at = time.monotonic()
            self.stats = message.stats
        elif isinstance(message, wire.Progress):
            phase, done, total = self._watch.progress()
            if phase not in ("launching", "starting", "ready"):
                what = {"what": phase, "done": done, "total": total, "unit": "bytes"} if total else None
                self._enter(phase, what)
        elif isinstance(message, wire.Joined) and self._processes is not None:
            self._processes.joined(message)
            self._record()
        elif isinstance(message, wire.Ready):
            self._check_ready()
        elif isinstance(message, wire.Lost):
            self._end_life(self._watch.of(rank, message.reason))
        elif isinstance(message, wire.Failed):
            self._end_life(self._watch.of(rank, message.message.rstrip(".")))

    def _check_ready(self) -> None:
        if self._watch.announced is None or self.chat is None or self.phase == "ready":
            return
        self.ready = self._watch.announced
        self.reason = ""
        self._was_ready = True
        if self._arrangement is not None:
            self._passed.add(self._arrangement.layout)
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
        if self._arrangement is not None and tail:
            log = f"\nLast lines in {self._folders.logs}:{tail}"
        hint = "`cluster logs` shows more."
        if "SIGKILL" in reason or "Unable to allocate" in reason:
            hint = "Unless somebody killed it, the memory ran out: try a smaller --kv-memory, --context or model."
        return RankFailed(f"The start failed while {phase}: {reason}.{log}", hint=hint)

    # ------------------------------------------------------------ blocking work

    def _resolve_model(self, loop: asyncio.AbstractEventLoop) -> ResolvedModel:
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
            self.chat = await in_thread(lambda: self._load_chat(folder))
            self._check_ready()
        except Exception as error:  # raised again by `run`
            self._chat_error = error
            self._end_life("the tokenizer could not be loaded")
