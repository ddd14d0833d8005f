"""Tiny random models of every architecture that is tested, in float32: models/tiny_configs.json made real.

Sliding windows are 8 tokens wide and sparse attention keeps 8, so a prompt of some 20 tokens crosses them. Imports mlx.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models/tiny_configs.json").read_text())
Weights = list[tuple[str, mx.array]]


def config_of(name: str) -> dict[str, Any]:
    """A copy of the config called `name` (see `NAMES`), to change at will."""
    if name in WRAPPED:
        inside = copy.deepcopy(CONFIGS[WRAPPED[name]])
        return {"model_type": name.partition(".")[0], "text_config": inside, "vocab_size": inside["vocab_size"]}
    if name == "glm_moe_dsa":
        changed = {"model_type": name, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
        return copy.deepcopy(CONFIGS["deepseek_v32"]) | changed
    return copy.deepcopy(CONFIGS[name])


# Files of mlx-lm that wrap another one, by the config that goes inside.
WRAPPED = {
    "gemma3": "gemma3_text",
    "gemma4.31B": "gemma4_text.31B",
    "mistral3.llama": "llama",
    "mistral3.mistral4": "mistral4",
}
NAMES = (*CONFIGS, *WRAPPED, "glm_moe_dsa")


def build(name: str, *, seed: int = 0) -> Any:
    """A model of the config `name` with the random weights of `seed`."""
    model = blank(config_of(name))
    model.update(tree_unflatten(_weights(name, seed)))
    return model


def blank(config: dict[str, Any]) -> Any:
    """A model of `config` as mlx-lm builds it, unevaluated."""
    file = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    if config["model_type"] == "muse_spark" and not mx.metal.is_available():
        replace_metal_kernels(file)
    model = file.Model(file.ModelArgs.from_dict(copy.deepcopy(config)))
    model.eval()
    return model


@functools.lru_cache(maxsize=4)
def _weights(name: str, seed: int) -> Weights:
    mx.random.seed(seed)  # for what layers draw themselves when they are built
    weights = draw(blank(config_of(name)), seed)
    mx.eval([array for _, array in weights])
    return weights


def draw(model: Any, seed: int) -> Weights:
    """Random float32 weights for `model`: what it starts with plus noise, so that nothing stays zero or one."""
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(weights))
    return [(name, _noisy(array, key)) for (name, array), key in zip(weights, keys, strict=True)]


def _noisy(array: mx.array, key: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array.astype(mx.float32) + 0.05 * mx.random.normal(array.shape, key=key)


# ---------------------------------------------------------------- muse_spark's kernels, in plain operations

# What each of mlx_lm/kernels documents, rounding where it rounds. They stand in where there is no Metal.


def replace_metal_kernels(file: Any) -> None:
    """Give mlx-lm's muse_spark reference functions instead of its Metal kernels."""
    kernels = (expert_routing, norm_add_norm, post_expert_norm_combine, pre_norm, qk_norm, qk_norm_rope)
    for kernel in (*kernels, rms_norm_sigmoid_gate):
        setattr(file, kernel.__name__, kernel)


def _rms(x: mx.array, eps: float) -> mx.array:
    """The float32 factor that brings the last axis of `x` to a root mean square of 1."""
    return mx.rsqrt(x.astype(mx.float32).square().mean(-1, keepdims=True) + eps)


def expert_routing(
    logits: mx.array, expert_bias: mx.array, *, top_k: int, multiplier: float, score_eps: float, route_scale: float
) -> list[mx.array]:
    """The experts of the `top_k` largest biased scores and their weights, which are unbiased and sum to the scale."""
    scores = mx.sigmoid(logits * multiplier)
    experts = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, experts, axis=-1)
    weights = weights / (weights.sum(-1, keepdims=True) + score_eps) * route_scale
    return [experts.astype(mx.uint32), weights.astype(mx.float32)]


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any,
) -> tuple[mx.array, mx.array | None]:
    """Norm the branch, add it to the float32 stream by the gates, and norm the sum for what comes next."""
    dtype = branch.dtype
    if post_weight is not None:
        branch = (post_weight.astype(dtype) * branch).astype(dtype)
    branch = (branch.astype(mx.float32) * _rms(branch, post_eps)).astype(dtype)
    stream = alpha.astype(mx.float32) * stream + beta.astype(mx.float32) * branch.astype(mx.float32)
    return stream, None if next_norm is None else pre_norm(stream, next_norm, dtype=dtype)


def pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    """The float32 stream normed, rounded once."""
    return (stream * _rms(stream, norm.eps) * norm.weight.astype(mx.float32)).astype(dtype)


def post_expert_norm_combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    """Norm each expert's output [..., K, D], scaled at its input, and add them in order, rounding every time."""
    dtype = experts.dtype
    scaled = experts.astype(mx.float32) * norm_weight.astype(mx.float32)
    parts = scaled * _rms(scaled, eps) * weights.astype(dtype).astype(mx.float32)[..., None]
    total = mx.zeros(parts[..., 0, :].shape, dtype)
    for k in range(experts.shape[-2]):
        total = (total.astype(mx.float32) + parts[..., k, :]).astype(dtype)
    return total


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    """Queries and keys [..., heads, dim] out of [..., qkvg], normed per head; queries are scaled after rounding."""
    both = qkvg[..., : (n_heads + n_kv_heads) * head_dim].reshape(*qkvg.shape[:-1], -1, head_dim)
    both = (both.astype(mx.float32) * _rms(both, eps)).astype(qkvg.dtype)
    queries = (both[..., :n_heads, :].astype(mx.float32) * query_scale).astype(qkvg.dtype)
    return [queries, both[..., n_heads:, :]]


def qk_norm_rope(
    qkvg: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    query_scale: float,
    rope_base: float,
    offset: int | mx.array,
) -> list[mx.array]:
    """As `qk_norm`, then rotated as neighbouring pairs from position `offset` on (one for all rows, or one each)."""

    def rotated(x: mx.array) -> mx.array:
        turned = mx.fast.rope(x.swapaxes(1, 2), head_dim, traditional=True, base=rope_base, scale=1.0, offset=offset)
        return turned.swapaxes(1, 2)

    sizes = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    return [rotated(x) for x in qk_norm(qkvg, **sizes, eps=eps, query_scale=query_scale)]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """Attention output [B, H, L, D], normed per head, times the sigmoid of the gate [B, L, H * D]; rounded once."""
    normed = (x.astype(mx.float32) * _rms(x, eps)).swapaxes(1, 2).reshape(gate.shape)
    return (normed * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)
