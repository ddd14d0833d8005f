"""One rank of an engine over several models in turn: `python engine_ranks.py CASES PLAN`, started by mlx.launch.

A case is [config, strategy, layers per rank, prefill chunk]. Ranks join as those of a cluster do; rank 0 runs a random
mix (joins, leaves, cancels, n > 1, shared prefixes, sampling with seeds) on all of them and compares every answer with
what the whole model says alone. It prints a JSON line per case, with what was wrong.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from architectures import _weights, build
from engine_run import Said, differences, random_mix, run_mix

from parallel import pipeline, tensor, warmup, wire
from parallel import rank as ranks
from parallel.control import Control, plan_digest
from parallel.engine.executor import Executor
from parallel.engine.loop import Engine
from parallel.follower import Follower
from parallel.group import ShardLinks, StageLinks, check_links, clean_environment, connect

CONTEXT, VOCABULARY, LONGEST = 512, 250, 60
END_OF_CASE = -1


class OneCase:
    """A follower's connection that seems to end where a case does."""

    def __init__(self, star: Follower) -> None:
        self._star = star
        self.steps = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._star, name)

    def empty(self) -> bool:
        return self._star.steps.empty()

    def get(self) -> wire.Step | None:
        step = self._star.steps.get()
        return None if step is None or step.id == END_OF_CASE else step


def part_of(case: list[Any], group: Any) -> tuple[Any, Any]:
    """This rank's model and links."""
    name, strategy, split, _ = case
    model = build(name)
    if strategy == "tensor":
        tensor.shard(model, group)
        _weights.cache_clear()  # mlx-lm divides some biases in place, in arrays that the whole model would share
        return model, ShardLinks(group)
    stop = sum(split[group.rank() :])  # rank 0 has the last layers
    stage = pipeline.Stage(model, stop - split[group.rank()], stop)
    return stage, StageLinks(group, stage.boundary)


def lead(case: list[Any], plan: wire.RankPlan, executor: Executor, control: Control) -> dict[str, Any]:
    """Rank 0's part of a case; what it found."""
    facts = control.meet("measured", warmup.probe(executor.model, plan, plan.size))
    limits = warmup.set_limits(executor.model, plan, CONTEXT, facts, executor.links)
    limits = replace(limits, slots=8, chunk_tokens=case[3])
    engine = warmup.make_engine(executor, limits, control.send_step)
    whole, rng = build(case[0]), random.Random(case[3])
    requests = random_mix(rng, VOCABULARY, LONGEST, count=8, tokens=8)
    said, cancelled = run_mix(engine, requests, rng)
    wrong = [w for request in requests if request.id not in cancelled for w in differences(whole, request, said)]
    seeded = [wire.Submit(100 + i, [7, 8, 9 + i], 9, 2, wire.Sampling(1.0, top_p=0.9, seed=i)) for i in range(3)]
    alone = warmup.engine_alone(whole, wire.RankPlan("", "", 0, "", kv_limit_bytes=2 << 30), CONTEXT)
    if tokens(engine, seeded) != tokens(alone, seeded):
        wrong.append("seeds give other tokens than on one rank")
    stats = engine.stats()
    engine.clear_prefixes()
    tokens(engine, [])
    control.send_step(wire.Step(END_OF_CASE))
    left = [engine.stats().prefix_entries, stats.running, stats.waiting, stats.prefilling, stats.buckets]
    return {"case": case, "wrong": wrong, "hits": stats.prefix_hit_tokens, "reuse": limits.reuse, "left": left}


def tokens(engine: Engine, requests: list[wire.Submit]) -> list[list[int]]:
    """What the engine says to all `requests` at once."""
    said = Said()
    for request in requests:
        engine.add(request)
    while not engine.idle:
        said.take(engine.step())
    return [[token for token, _ in answer] for _, answer in sorted(said.tokens.items())]


def main(cases: list[list[Any]], text: str) -> None:
    rank = int(os.environ["MLX_RANK"])
    plan = msgspec.json.decode(text, type=wire.RankPlan)
    star: Control | Follower
    if rank:
        star = Follower(plan, rank, plan_digest(text))
    else:
        star = Control(plan.host, plan.port, Path(plan.secret_file), size=plan.size, digest=plan_digest(text))
    clean_environment("ring", os.environ)
    star.meet("connect", wire.Fact())
    group = connect("ring", rank, plan.size)
    check_links(group, "ring")
    mx.random.seed(0)
    for case in cases:
        mine = msgspec.structs.replace(plan, strategy=case[1])
        executor = Executor(*part_of(case, group))
        star.meet("loaded", wire.Fact())
        if isinstance(star, Control):
            print(json.dumps(lead(case, mine, executor, star)), flush=True)
        else:
            star.meet("measured", warmup.probe(executor.model, mine, plan.size))
            ranks.obey(executor, OneCase(star))  # type: ignore[arg-type]
    if isinstance(star, Control):
        star.dismiss()
        star.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
