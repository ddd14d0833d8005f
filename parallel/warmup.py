"""From a loaded model to a running engine: measure its caches, set the limits, run it once. Called by `rank.py`.

Every rank measures its own part; rank 0 makes one set of limits from what all found, and runs the engine, whose steps
warm up the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import psutil
from mlx.utils import tree_flatten

from parallel import wire
from parallel.engine import kv, sampling
from parallel.engine.executor import Executor
from parallel.engine.loop import Engine
from parallel.engine.scheduler import SMALL_CHUNK, Limits, Scheduler
from parallel.engine.sequence import CacheShape
from parallel.group import Links

MEMORY_SHARE = 0.75  # of a machine without Metal's recommendation; the rest is the system's and other programs'
RESERVE_BYTES = 1 << 30  # activations and MLX's own buffers, beside weights and KV
CACHE_LIMIT_BYTES = 2 << 30  # freed buffers that MLX may hold back for reuse
CHECKED_CHUNK = 1024
LARGEST_DIFFERENCE = 0.1  # in log-probability; wrong output differs by far more
ROUNDINGS = 128  # of the model's dtype, on top where they are more: 4 of a logit near 32, which is 1.0 in bfloat16
SURE_MARGIN = 0.5  # between the two best logits: above it, no rounding changes the choice
_PROBE_TOKENS = 8


class SelfCheckFailed(Exception):
    """The ranks together compute something wrong; the message says what differed."""


def memory_limit_bytes() -> int:
    """What MLX should use of this machine at most."""
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size") or info.get("memory_size")
    if recommended and not sampling.on_cpu():
        return int(int(recommended) * (0.95 if mx.metal.is_available() else MEMORY_SHARE))
    return int(psutil.virtual_memory().total * MEMORY_SHARE)


def probe(model: Any, plan: wire.RankPlan, on_this_machine: int = 1) -> wire.Fact:
    """Run a few tokens through this rank's part to learn its caches' shape, and what room is left for them.

    `on_this_machine` ranks share this machine's memory. In tensor mode all ranks must do this at the same time.
    """
    solo = kv.new_solo(model)
    fed = model.blank(1, _PROBE_TOKENS) if hasattr(model, "blank") else mx.zeros((1, _PROBE_TOKENS), mx.int32)
    logits = model(fed, cache=solo)
    mx.eval(logits, kv.arrays(solo))
    shape = kv.shape_of(solo)
    token, margin = -1, 0.0
    if plan.strategy == "tensor":
        best = sorted(enumerate(logits[0, -1].astype(mx.float32).tolist()), key=lambda pair: -pair[1])[:2]
        token, margin = best[0][0], best[0][1] - best[1][1]
    del solo, logits
    mx.set_cache_limit(CACHE_LIMIT_BYTES)
    mx.clear_cache()
    weights = mx.get_active_memory()
    room = memory_limit_bytes() // on_this_machine - weights - RESERVE_BYTES
    kv_bytes = plan.kv_limit_bytes or max(room, shape.bytes(2 * shape.grain))
    device = str(mx.device_info().get("device_name", mx.default_device()))
    return wire.Fact(shape.fixed_bytes, list(shape.layers), kv_bytes, weights, token, margin, device)


def set_limits(
    model: Any, plan: wire.RankPlan, context: int, facts: list[wire.Fact], links: Links, lookahead: bool | None = None
) -> Limits:
    """The limits for all ranks, from what each found. Raises SelfCheckFailed where they would choose other tokens.

    `lookahead` None: where it pays. A CPU computes a step while it is begun, so a second one ahead would only make
    newcomers wait for it.
    """
    if lookahead is None:
        lookahead = links.lookahead and (plan.size > 1 or not sampling.on_cpu())
    sure = {fact.token for fact in facts if fact.margin > SURE_MARGIN}
    if len(sure) > 1:
        raise SelfCheckFailed(f"after the same prompt the ranks choose different tokens: {sorted(sure)}")
    tightest, shape = _combined(facts)
    return Limits(
        context=min(plan.context or context, context) if context else plan.context or 8192,
        slots=plan.slots,
        kv_bytes=tightest.kv_bytes,
        prefix_bytes=plan.prefix_bytes or tightest.kv_bytes // 4,
        shape=shape,
        weights_bytes=tightest.weights_bytes,
        chunk_tokens=plan.chunk_tokens,
        reuse=getattr(model, "reuse", "") or kv.reuse_of(model),
        lookahead=lookahead,
        batchable=model.batchable if hasattr(model, "batchable") else kv.batchable(model),
        stages=plan.size if plan.strategy == "pipeline" else 1,
    )


def _combined(facts: list[wire.Fact]) -> tuple[wire.Fact, CacheShape]:
    """The rank whose KV fills first, and a shape that fills its limit before any rank's own limit is full.

    Per kind of layer that is the largest of the ranks' bytes, each as a share of its own limit.
    """
    shapes = [CacheShape(fact.fixed_bytes, tuple(fact.layers)) for fact in facts]
    tightest = min(zip(facts, shapes, strict=True), key=lambda pair: pair[1].longest(pair[0].kv_bytes))[0]
    scales = [tightest.kv_bytes / fact.kv_bytes for fact in facts]
    layers: dict[int, float] = {}
    for fact, scale in zip(facts, scales, strict=True):
        for per_token, window in fact.layers:
            layers[window] = max(layers.get(window, 0.0), per_token * scale)
    fixed = max(fact.fixed_bytes * scale for fact, scale in zip(facts, scales, strict=True))
    shape = CacheShape(math.ceil(fixed), tuple((math.ceil(bytes), window) for window, bytes in layers.items()))
    return tightest, shape


def engine_alone(model: Any, plan: wire.RankPlan, context: int, lookahead: bool | None = None) -> Engine:
    """A warm engine on a whole model in this process."""
    executor = Executor(model)
    facts = [probe(model, plan)]
    return make_engine(executor, set_limits(model, plan, context, facts, executor.links, lookahead))


def make_engine(executor: Executor, limits: Limits, send: Callable[[wire.Step], None] = lambda step: None) -> Engine:
    """An engine that has answered, also several at once, so that kernels are compiled and the pace is known.

    A kernel's first use takes seconds on CUDA; and prompts of unequal lengths use others than one alone.
    """
    engine = _engine(executor, limits, send)
    room = min(limits.context, limits.kv_tokens) - 1

    def request(id: int, length: int, tokens: int, temperature: float) -> wire.Submit:
        prompt = [1 + i % 7 for i in range(min(length, room - tokens))]
        return wire.Submit(id, prompt, tokens, sampling=wire.Sampling(temperature=temperature, top_p=0.95))

    for length in (SMALL_CHUNK // 2, 4 * SMALL_CHUNK):
        _answer(engine, request(0, length, 8, 0.0))
    _answer(engine, *(request(i, SMALL_CHUNK // 2 + 3 * i, 2, 0.7) for i in range(min(3, limits.slots))))
    return engine


def self_check(executor: Executor, limits: Limits, send: Callable[[wire.Step], None], tokens: int) -> str:
    """Prefill a prompt of at most `tokens` tokens whole and in chunks, compare what comes next, say what was compared.

    Raises SelfCheckFailed.
    """
    length = min(tokens, limits.context - 2, limits.kv_tokens - 2)
    part = min(CHECKED_CHUNK, length // 2)
    prompt = [1 + (i * i + i // 97) % 199 for i in range(length)]
    seen = []
    for chunk in (length, part):
        engine = _engine(executor, replace(limits, chunk_tokens=chunk), send, hurry=True)
        [token] = _answer(engine, wire.Submit(0, prompt, 1, sampling=wire.Sampling(temperature=0.0, logprobs=20)))
        assert token.top is not None
        seen.append(dict(token.top))
    difference = _apart(*seen)
    if difference > max(LARGEST_DIFFERENCE, ROUNDINGS * _rounding(executor.model)):
        raise SelfCheckFailed(
            f"a prompt of {length} tokens gives other tokens in chunks of {part} than whole: "
            f"their log-probabilities differ by {difference:.3g}"
        )
    return f"a prompt of {length} tokens, whole and in chunks: log-probabilities within {difference:.2g}"


def _apart(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference of the best tokens' log-probabilities, at least: what is missing on one side is no better
    there than the last of that side."""

    def beyond(mine: dict[int, float], theirs: dict[int, float]) -> float:
        last = min(theirs.values())
        return max(abs(mine[token] - theirs[token]) if token in theirs else mine[token] - last for token in mine)

    return max(beyond(one, other), beyond(other, one))


def _rounding(model: Any) -> float:
    """The relative error of one operation in the coarsest dtype that the model computes in."""
    kinds = {array.dtype for _, array in tree_flatten(model.parameters()) if mx.issubdtype(array.dtype, mx.floating)}
    return max(float(mx.finfo(kind).eps) for kind in kinds)


def _engine(executor: Executor, limits: Limits, send: Callable[[wire.Step], None], hurry: bool = False) -> Engine:
    scheduler = Scheduler(limits, needs_host=sampling.needs_host)
    if hurry:
        scheduler.pace.token_s = 1e-9  # chunks as long as `limits` allow, however slow
    return Engine(scheduler, executor, depth=limits.depth, ahead=1 if limits.stages > 1 else 2, send=send)


def _answer(engine: Engine, *requests: wire.Submit) -> list[wire.Token]:
    """What the engine says to `requests`, all at once, and no prefix entry left of them."""
    tokens: list[wire.Token] = []
    for request in requests:
        engine.add(request)
    while not engine.idle:
        for message in engine.step():
            if isinstance(message, wire.Tokens):
                tokens += message.rows
            elif isinstance(message, wire.RequestFailed):
                raise SelfCheckFailed(f"the first steps failed: {message.message}")
    engine.clear_prefixes()
    while not engine.idle:
        engine.step()
    return tokens
