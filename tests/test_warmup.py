"""What a rank finds out about itself before it is ready: here, that chunks of a prompt give what the whole gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from parallel import warmup, wire
from parallel.engine.executor import Executor

CONTEXT = 400


class Spoiled:
    """A model whose best logit is `by` too low after a prompt that came in chunks."""

    def __init__(self, model: Any, by: float) -> None:
        self._model, self._by = model, by
        self._chunks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        logits: mx.array = self._model(tokens, **options)
        if tokens.shape[1] > 1:
            self._chunks += 1
            return logits
        chunks, self._chunks = self._chunks, 0
        best = mx.arange(logits.shape[-1]) == mx.argmax(logits, -1, keepdims=True)
        return logits - best * (self._by if chunks > 1 else 0)


@pytest.mark.parametrize(
    ("dtype", "by", "sound"),
    [
        (mx.float32, 0.0, True),
        (mx.float32, 0.3, False),
        (mx.float16, 0.3, False),
        (mx.bfloat16, 0.3, True),  # one logit may round to its neighbour, and those are 0.125 apart
        (mx.bfloat16, 8.0, False),
    ],
)
def test_the_self_check_tells_wrong_logits_from_rounded_ones(
    tiny_model: Path, dtype: mx.Dtype, by: float, sound: bool
) -> None:
    model, _ = load_model(tiny_model)
    model.set_dtype(dtype)
    spoiled, plan = Spoiled(model, by), wire.RankPlan("", "", 0, "", kv_limit_bytes=2 << 30)
    executor = Executor(spoiled)
    limits = warmup.set_limits(model, plan, CONTEXT, [warmup.probe(model, plan)], executor.links)
    if sound:
        said = warmup.self_check(executor, limits, lambda step: None, 4200)
        assert said.startswith(f"a prompt of {CONTEXT - 2} tokens, whole and in chunks: log-probabilities within ")
    else:
        with pytest.raises(warmup.SelfCheckFailed, match="in chunks of 199 than whole"):
            warmup.self_check(executor, limits, lambda step: None, 4200)
