"""From a loaded model to a running engine: measure its caches, set the limits, run it once. Called by `rank.py`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import psutil

from parallel import wire
from parallel.engine import kv, sampling
from parallel.engine.executor import Executor
from parallel.engine.loop import Engine
from parallel.engine.scheduler import SMALL_CHUNK, Limits, Scheduler

MEMORY_SHARE = 0.75  # of a machine without Metal's recommendation; the rest is the system's and other programs'
RESERVE_BYTES = 1 << 30  # activations and MLX's own buffers, beside weights and KV
CACHE_LIMIT_BYTES = 2 << 30  # freed buffers that MLX may hold back for reuse
_PROBE_TOKENS = 8


def memory_limit_bytes() -> int:
    """What MLX should use of this machine at most."""
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size") or info.get("memory_size")
    if recommended and not sampling.on_cpu():
        return int(int(recommended) * (0.95 if mx.metal.is_available() else MEMORY_SHARE))
    return int(psutil.virtual_memory().total * MEMORY_SHARE)


def measure(model: Any, plan: wire.RankPlan, context: int) -> Limits:
    """Run a few tokens to learn the caches' shape, and set every limit that `plan` leaves open. Sizes in bytes."""
    solo = kv.new_solo(model)
    mx.eval(model(mx.zeros((1, _PROBE_TOKENS), mx.int32), cache=solo), kv.arrays(solo))
    shape = kv.shape_of(solo)
    del solo
    mx.set_cache_limit(CACHE_LIMIT_BYTES)
    mx.clear_cache()
    weights = mx.get_active_memory()
    kv_bytes = plan.kv_limit_bytes or max(memory_limit_bytes() - weights - RESERVE_BYTES, shape.bytes(2 * shape.grain))
    return Limits(
        context=min(plan.context or context, context) if context else plan.context or 8192,
        slots=plan.slots,
        kv_bytes=kv_bytes,
        prefix_bytes=plan.prefix_bytes or kv_bytes // 4,
        shape=shape,
        weights_bytes=weights,
        chunk_tokens=plan.chunk_tokens,
        reuse=kv.reuse_of(model),
        batchable=kv.batchable(model),
    )


def make_engine(model: Any, limits: Limits) -> Engine:
    """An engine that has answered once, so that kernels are compiled and the pace is known."""
    engine = Engine(Scheduler(limits, needs_host=sampling.needs_host), Executor(model))
    room = min(limits.context, limits.kv_tokens) - 1
    for length in (SMALL_CHUNK // 2, 4 * SMALL_CHUNK):
        prompt = [1 + i % 7 for i in range(min(length, room - 8))]
        engine.add(wire.Submit(0, prompt, 8, sampling=wire.Sampling(temperature=0.0)))
        while not engine.idle:
            engine.step()
        engine.clear_prefixes()
    while not engine.idle:
        engine.step()
    return engine
