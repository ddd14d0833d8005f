"""`cluster bench MODEL --pipeline` or `--tensor`: the engine over several ranks, timed from here without HTTP.

One command for what `mlx.launch ... mlx_lm.benchmark` measures: random prompts of one length, rows of one batch, and
each rank's idle share beside it. It starts the ranks as `cluster up` does, and ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cluster.config import ClusterConfig
from cluster.coordinator import claim, reap_leftovers
from cluster.errors import AlreadyRunning, BenchFailed
from cluster.paths import Folders
from cluster.state import ClusterState
from cluster.supervision.supervise import Supervisor
from parallel import wire

SETTLE_S = 1.5  # until the ranks' heartbeats tell of the last step
WARMUP_TOKENS = 8


class Timing(msgspec.Struct, frozen=True):
    """One trial: tokens per second as in `parallel.bench`, and the share of the time that each rank waited."""

    prompt_tps: float
    generation_tps: float
    total_tps: float
    idle: list[float]


class Work(msgspec.Struct, frozen=True):
    """What is timed: `trials` of each batch size, all rows of one prompt and one answer length in tokens."""

    prompt_tokens: int
    generation_tokens: int
    batches: list[int]
    temperature: float
    trials: int


def time_ranks(config: ClusterConfig, work: Work, say: Callable[[str], None]) -> dict[str, Any]:
    """Start the ranks that `config` means, time every batch size, end them. Raises ClusterError."""
    folders = Folders.from_environment(os.environ)
    held = claim(config, folders)
    if isinstance(held, ClusterState):
        raise AlreadyRunning(f"A cluster already runs at {held.url}.", hint="Run `cluster down` first.")
    try:
        reap_leftovers(folders)
        held.new_secret()
        return asyncio.run(_time(config, folders, work, say))
    finally:
        held.release()


async def _time(config: ClusterConfig, folders: Folders, work: Work, say: Callable[[str], None]) -> dict[str, Any]:
    from cluster.serve.chat import ChatModel
    from cluster.ship.weights import resolve

    changed = asyncio.Event()
    told, vocabulary = "", 0

    def on_change() -> None:
        nonlocal told
        if supervisor.phase != told:
            told = supervisor.phase
            say(told)
        changed.set()

    def load_chat(folder: Path) -> ChatModel:
        nonlocal vocabulary
        config = json.loads((folder / "config.json").read_text())
        vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
        return ChatModel.load(folder)

    supervisor = Supervisor(config, folders, resolve=resolve, load_chat=load_chat, on_change=on_change)
    life = asyncio.create_task(supervisor.run())
    try:
        while supervisor.phase != "ready":
            changed.clear()
            waiting = asyncio.create_task(changed.wait())
            await asyncio.wait({waiting, life}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if life.done():
                life.result()
            if supervisor.phase in ("lost", "failed"):
                raise BenchFailed(f"The ranks were lost: {supervisor.reason}.", hint="`cluster logs` shows more.")
        cases = []
        for batch in work.batches:
            case = Case(supervisor, vocabulary, work)
            await case.run(batch, WARMUP_TOKENS, seed=0)
            timings = []
            for trial in range(1, work.trials + 1):
                timings.append(await case.run(batch, work.generation_tokens, seed=trial))
                say(f"  batch {batch}, trial {trial} of {work.trials}: total tok/s {timings[-1].total_tps:.1f}")
            cases.append({"batch": batch, "trials": [msgspec.to_builtins(t) for t in timings], **_median(timings)})
        health = supervisor.health()
        return {
            "name": supervisor.model,
            "strategy": health["strategy"],
            "backend": health["backend"],
            **msgspec.structs.asdict(work),
            "ranks": health["ranks"],
            "cases": cases,
        }
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life


class Case:
    """Trials of one prompt length on a cluster that is ready."""

    def __init__(self, supervisor: Supervisor, vocabulary: int, work: Work) -> None:
        self._supervisor = supervisor
        self._vocabulary = vocabulary
        self._prompt_tokens = work.prompt_tokens
        self._sampling = wire.Sampling(temperature=work.temperature)

    async def run(self, batch: int, tokens: int, seed: int) -> Timing:
        """`batch` answers of `tokens` tokens at once, nothing stopping a row early. Raises ClusterError."""
        engine = self._supervisor.engine
        if engine is None:
            raise BenchFailed(f"The ranks were lost: {self._supervisor.reason}.", hint="`cluster logs` shows more.")
        rng = random.Random(f"{seed} {batch} {tokens}")
        await asyncio.sleep(SETTLE_S)
        busy = [stats.busy_s for _, stats in self._supervisor.rank_stats]
        begun_s = time.monotonic()
        arrivals: list[list[float]] = [[] for _ in range(batch)]

        async def row(times: list[float]) -> None:
            prompt = [rng.randrange(self._vocabulary) for _ in range(self._prompt_tokens)]
            async for event in engine.submit(wire.Submit(0, prompt, tokens, sampling=self._sampling)):
                if isinstance(event, wire.Token):
                    times.append(time.monotonic())

        await asyncio.gather(*(row(times) for times in arrivals))
        wall_s = time.monotonic() - begun_s
        await asyncio.sleep(SETTLE_S)
        idle = [
            min(1.0, max(0.0, 1 - (stats.busy_s - before) / wall_s))
            for (_, stats), before in zip(self._supervisor.rank_stats, busy, strict=True)
        ]
        all_s, first_end_s = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
        together = sum(all_s < t <= first_end_s for times in arrivals for t in times)
        steady_s = first_end_s - all_s
        return Timing(
            batch * self._prompt_tokens / (all_s - begun_s),
            together / steady_s if steady_s > 0 else 0.0,
            batch * tokens / wall_s,
            idle,
        )


def _median(timings: list[Timing]) -> dict[str, Any]:
    rates = ("prompt_tps", "generation_tps", "total_tps")
    middle: dict[str, Any] = {rate: statistics.median(getattr(t, rate) for t in timings) for rate in rates}
    return {**middle, "idle": [statistics.median(shares) for shares in zip(*(t.idle for t in timings), strict=True)]}
