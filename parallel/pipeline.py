"""A pipeline stage: a run of an mlx-lm model's layers, fed with hidden states instead of tokens.

mlx-lm's model files differ in how they find masks, positions and layer kinds: by index, by position in the list, by
attributes of layers. So a stage keeps the whole model's structure and its code. Layers that belong to others lose their
weights and pass their input on, and each foreign cache entry is a local one of the same kind, so that what the model
reads off it is true. Only the first local layer is told to take what came from the stage before.

Nothing here communicates. Called by `loading.py`, which evaluates what is left, and by the executor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes

from parallel.blueprint import inner_of
from parallel.engine import kv

TESTED = frozenset(
    [
        "deepseek_v3",
        "deepseek_v32",
        "gemma3",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "kimi_k25",
        "llama",
        "llama4",
        "longcat_flash",
        "minimax",
        "ministral3",
        "mistral3",
        "mistral4",
        "mixtral",
        "muse_glimmer",
        "muse_spark",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
        "step3p5",
    ]
)
SEVERAL_TENSORS = frozenset({"kimi_k3", "deepseek_v41"})


def why_not(config: dict[str, Any]) -> str:
    """Why a model with this config.json cannot run as a pipeline, and what works instead; "" when it can."""
    try:
        model_class, _ = _get_classes(config)
    except (ValueError, KeyError):
        return f"mlx-lm has no model file for {config.get('model_type', 'a model without a model_type')}"
    family = _family(model_class)
    if family in SEVERAL_TENSORS:
        reason = f"{family} hands several tensors from layer to layer, and a pipeline stage hands on one"
    elif family not in TESTED:
        reason = f"pipeline stages of {family} models have not been tested"
    elif family in ("gemma4", "gemma4_text"):
        reason = _gemma4_why_not(config)
    else:
        reason = ""
    instead = "tensor parallel or a single machine" if hasattr(model_class, "shard") else "a single machine"
    return f"{reason}; use {instead}" if reason else ""


def _gemma4_why_not(config: dict[str, Any]) -> str:
    """The small variants give every layer something beside the hidden states."""
    text = importlib.import_module("mlx_lm.models.gemma4_text").ModelArgs.from_dict(config.get("text_config") or config)
    if text.hidden_size_per_layer_input:
        return "this gemma4 variant feeds every layer with embeddings of the tokens"
    if text.num_kv_shared_layers:
        return "this gemma4 variant shares KV between layers"
    return ""


@dataclass(slots=True)
class _Passage:
    """What enters and leaves during one call: the first local layer and the place of the norm reach it from inside."""

    entering: mx.array | None = None
    leaving: mx.array | None = None
    seen: tuple[int, mx.Dtype] | None = None


class Stage:
    """Layers [start, stop) of `model`, which becomes the stage's: it is changed and cannot be used otherwise after.

    `first` and `last` tell the ends. `boundary` is the width and dtype of what enters per token (of a first stage:
    one int32 id). `reuse` and `batchable` are what `kv.reuse_of` and `kv.batchable` say about the whole model, so that
    every stage says the same. One call at a time, from the thread that owns the arrays.
    """

    def __init__(self, model: Any, start: int, stop: int) -> None:
        inner, head = inner_of(model), getattr(getattr(model, "language_model", model), "lm_head", None)
        if not 0 <= start < stop <= len(inner.layers):
            raise ValueError(f"layers {start} to {stop - 1} of a model with {len(inner.layers)} layers")
        self.first, self.last = start == 0, stop == len(inner.layers)
        self._model, self._inner, self._passage = model, inner, _Passage()
        # muse_spark fuses the next layer's norm into each layer, so foreign layers cannot stay in its list
        self._narrow = _family(type(inner)) == "muse_spark"
        whole = make_prompt_cache(model)
        self.reuse = kv.reuse_of(SimpleNamespace(make_cache=lambda: whole))
        self.batchable = kv.batchable(SimpleNamespace(make_cache=lambda: whole))
        self._local = slice(None) if self._narrow else slice(start, stop)
        self._sources = _sources(whole, start, stop)
        self._idle = whole

        self.boundary: tuple[int, mx.Dtype] = (1, mx.int32)
        if not self.first:
            self._enter_at(inner.layers[start])
            inner(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))  # builds a graph; nothing is evaluated
            assert self._passage.seen is not None
            self.boundary = self._passage.seen
        self._drop_the_rest(start, stop, head)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Token ids [B, L] (first) or hidden states [B, L, W] in; hidden states, or logits [B, L, V] (last) out.

        `cache` is a list as `make_cache` makes, or batched caches merged from such lists.
        """
        caches = cache if self._narrow else self._spread(cache)
        passage = self._passage
        tokens = inputs
        if not self.first:
            passage.entering, tokens = inputs, mx.zeros(inputs.shape[:2], mx.int32)
        try:
            out: mx.array = (self._model if self.last else self._inner)(tokens, cache=caches)
            if self.last:
                return out
            assert passage.leaving is not None
            return passage.leaving
        finally:
            passage.entering = passage.leaving = None

    def make_cache(self) -> list[Any]:
        """Empty caches for one sequence, one per local layer."""
        return list(make_prompt_cache(self._model)[self._local])

    def parameters(self) -> dict[str, Any]:
        """The weights that this stage needs, by the names they have in the whole model."""
        return dict(self._model.parameters())

    def blank(self, rows: int, length: int) -> mx.array:
        """Zeros of the shape and dtype that enter this stage, to try it out."""
        width, dtype = self.boundary
        return mx.zeros((rows, length) if self.first else (rows, length, width), dtype)

    def _spread(self, cache: list[Any]) -> list[Any]:
        """As many entries as the whole model has: each foreign one is a local one that tells the same position."""
        return [self._idle[i] if source < 0 else cache[source] for i, source in enumerate(self._sources)]

    def _enter_at(self, layer: nn.Module) -> None:
        """From now on `layer` takes what came from the stage before, whatever the model's code gives it."""
        passage, run = self._passage, type(layer).__call__
        pre_norm = importlib.import_module(type(layer).__module__).pre_norm if self._narrow else None

        def enter(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            if passage.entering is None:
                passage.seen = (x.shape[-1], x.dtype)
            else:
                x = passage.entering
                if pre_norm is not None:
                    # as the layer before would have made it, fused: not the layer's own norm, which rounds earlier
                    norm = self.input_layernorm
                    kwargs["attn_input"] = pre_norm(x, norm, dtype=norm.weight.dtype)
            return run(self, x, *args, **kwargs)

        _recast(layer, "Entering", enter)

    def _drop_the_rest(self, start: int, stop: int, head: nn.Module | None) -> None:
        """Let go of every weight that belongs to other stages, and cut the model's code short there."""
        inner, passage = self._inner, self._passage
        text = {id(module) for part in (inner, head) if part is not None for module in part.modules()}
        _forget(module for module in self._model.modules() if id(module) not in text)  # vision towers
        for layer in inner.layers[:start] + inner.layers[stop:]:
            _forget(layer.modules())
            _recast(layer, "Foreign", _passed_on_as_triple if _family(type(inner)) == "gemma4_text" else _passed_on)
        if self._narrow:
            inner.start_idx, inner.end_idx = start, stop
        if not self.first:

            def nothing(self: Any, tokens: mx.array) -> mx.array:
                assert passage.entering is not None
                return mx.zeros_like(passage.entering)

            _recast(inner.embed_tokens, "Unused", nothing)
            if not (self.last and head is None):  # where there is no head of its own, logits come from the embedding
                _forget(inner.embed_tokens.modules())
        if not self.last:

            def leave(self: Any, x: mx.array) -> mx.array:
                passage.leaving = x
                return x

            _recast(inner.norm, "Leaving", leave)
            _forget(inner.norm.modules())
            if head is not None:
                _forget(head.modules())


def _family(kind: type) -> str:
    """The mlx-lm model file that a class is from."""
    return kind.__module__.rpartition(".")[2]


def _sources(whole: list[Any], start: int, stop: int) -> list[int]:
    """For each layer's cache, the place among the local ones of the one to use; -1: none fits, its mask is not used.

    Where no local cache is of the same kind, plain and sliding ones stand in for each other: ministral3 reads the
    position off the first layer's, whatever kind that is.
    """
    kinds, local = [type(cache) for cache in whole], range(start, stop)

    def source(i: int) -> int:
        if i in local:
            return i - start
        same = [j for j in local if kinds[j] is kinds[i]]
        like = [j for j in local if {kinds[i], kinds[j]} <= {KVCache, RotatingKVCache}]
        return (same or like or [start - 1])[0] - start

    return [source(i) for i in range(len(whole))]


def _passed_on(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
    return x


def _passed_on_as_triple(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> tuple[mx.array, None, None]:
    return x, None, None


def _recast(module: nn.Module, name: str, call: Callable[..., Any]) -> None:
    """Give `module` another call and leave everything else about it as it is, its type's ancestry included."""
    kind = type(module)
    module.__class__ = type(f"{name}{kind.__name__}", (kind,), {"__call__": call, "__module__": kind.__module__})


def _forget(modules: Iterable[nn.Module]) -> None:
    """Let go of the arrays in `modules`; their other attributes stay."""
    for module in modules:
        for name in [name for name, value in module.items() if isinstance(value, mx.array)]:
            del module[name]
