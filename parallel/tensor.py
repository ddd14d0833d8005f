"""Tensor parallel: may this model be cut N ways, and mlx-lm's `shard()` called the right way for its family.

A split that does not come out even is an error message in some of mlx-lm's models and silent garbage in others, so
every one is looked for here, on the built model, before `shard()` touches it. `rank.py` and `loading.py` shard,
`model_info.py` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from parallel.blueprint import build, bytes_of, family_of

SIZES = range(2, 9)  # JACCL's mesh ends at 8 ranks

# Families whose shard() gave the whole model's tokens on 2 and 3 ranks. The value is where the shard() is.
FAMILIES = dict.fromkeys(
    (
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v41",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "kimi_k25",
        "kimi_k3",
        "llama",
        "longcat_flash",
        "minimax",
        "ministral3",
        "mistral4",
        "muse_spark",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "step3p5",
    ),
    "",
) | {"mistral3": "language_model"}

HEADS = {
    "n_heads": "attention heads",
    "num_heads": "attention heads",
    "num_attention_heads": "attention heads",
    "n_kv_heads": "KV heads",
    "num_kv_heads": "KV heads",
    "num_key_value_heads": "KV heads",
    "num_k_heads": "key heads of linear attention",
    "num_v_heads": "value heads of linear attention",
    "o_groups": "output groups",
}
ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "o_b_proj")  # cut along their input
COLUMN_PARALLEL = ("gate_proj", "up_proj")  # cut along their output; those of attention follow from the heads
PARTS_OF_FEW_TOKENS = ("pre_expert_proj", "post_expert_proj")  # muse_spark cuts them in steps of up to 8 tokens
REPEATS_KV_HEADS = ("qwen3_5", "qwen3_5_moe")  # fewer KV heads than ranks are repeated


class SplitError(ValueError):
    """The model cannot be cut into that many tensor ranks; the message has every reason."""


def why_not(config: dict[str, Any], ranks: int) -> list[str]:
    """Why the model of `config` cannot run tensor-parallel on `ranks` ranks; empty when it can. Allocates nothing.

    Raises ValueError when mlx-lm has no such model.
    """
    return reasons(build(config), ranks)


def shard(model: Any, group: mx.distributed.Group) -> None:
    """Cut a whole, unevaluated model to this rank's part of `group`. Raises SplitError before anything is changed."""
    if problems := reasons(model, group.size()):
        raise SplitError("; ".join(problems))
    target(model).shard(group)


def target(model: Any) -> Any:
    """The module whose `shard()` is the right one; None where there is none."""
    path = FAMILIES.get(family_of(model), "")
    found = getattr(model, path) if path else model
    return found if hasattr(found, "shard") else None


def reasons(model: Any, ranks: int) -> list[str]:
    """As `why_not`, for a built model."""
    family = family_of(model)
    if target(model) is None:
        return [f"mlx-lm cannot cut {family} by width (it has no shard())"]
    if family not in FAMILIES:
        return [f"cutting {family} by width was never tried here"]
    if ranks not in SIZES:
        return [f"tensor parallel is for {SIZES.start} to {SIZES.stop - 1} ranks, not {ranks}"]
    return list(dict.fromkeys(_uneven(model, ranks)))  # each once, not once per layer


# ---------------------------------------------------------------- the checks


def _uneven(model: Any, ranks: int) -> Iterator[str]:
    family = family_of(model)
    yield from _vocabulary(model, family, ranks)
    for layer in model.layers:
        for path, module in layer.named_modules():
            name = path.rpartition(".")[2]
            if "Indexer" not in type(module).__name__:  # replicated, its heads too
                yield from _heads(module, ranks, repeats=family in REPEATS_KV_HEADS)
            if "weight" not in module:
                continue
            parts = isinstance(module, nn.Linear) and name in PARTS_OF_FEW_TOKENS  # packed ones stay whole
            if name in ROW_PARALLEL:
                yield from _input(path, module, ranks)
            elif name in COLUMN_PARALLEL or parts:
                yield from _even(module.weight.shape[-2], ranks, f"the output of {path}")


def _heads(module: Any, ranks: int, *, repeats: bool) -> Iterator[str]:
    for attribute, what in HEADS.items():
        count = getattr(module, attribute, None)
        if not isinstance(count, int) or count % ranks == 0:
            continue
        if repeats and what == "KV heads" and ranks % count == 0:
            continue
        yield f"{count} {what} do not divide by {ranks}"


def _input(path: str, module: Any, ranks: int) -> Iterator[str]:
    if not hasattr(module, "group_size"):
        yield from _even(module.weight.shape[-1], ranks, f"the input of {path}")
        return
    groups = module.scales.shape[-1]
    if groups % ranks:
        width = groups * module.group_size
        yield (
            f"the input of {path} is {width} wide, {groups} quantisation groups of {module.group_size}, "
            f"which do not divide by {ranks}"
        )


def _vocabulary(model: Any, family: str, ranks: int) -> Iterator[str]:
    """Only two families cut the head; the others keep it whole on every rank."""
    if family == "muse_spark":
        yield from _even(model.lm_head.weight.shape[0], ranks, "the vocabulary")
    elif family in REPEATS_KV_HEADS and "lm_head" in model.language_model:
        yield from _even(model.language_model.lm_head.weight.shape[0], ranks, "the vocabulary")


def _even(width: int, ranks: int, what: str) -> Iterator[str]:
    if width % ranks:
        yield f"{what} is {width} wide, which does not divide by {ranks}"


# ---------------------------------------------------------------- what a rank would hold


class _Ranks:
    """Looks like a distributed group to `shard()`, which asks for size and rank only."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def rank_bytes(make: Callable[[], Any], ranks: int) -> int:
    """The bytes of weights on each of `ranks` ranks, by cutting an unevaluated model that `make` builds.

    Raises SplitError with mlx-lm's own words where its `shard()` refuses what `reasons` let through.
    """
    model = make()
    apart = _take_experts(model) if family_of(model) == "muse_spark" else 0
    try:
        target(model).shard(_Ranks(ranks))
    except (ValueError, AssertionError, ZeroDivisionError, TypeError, IndexError, KeyError) as error:
        raise SplitError(f"mlx-lm's shard() refuses {ranks} ranks: {error}") from error
    return bytes_of(model.parameters()) + apart // ranks


def _take_experts(model: Any) -> int:
    """Take the experts out of muse_spark, whose shard() would evaluate them, and tell their bytes."""
    total = 0
    for layer in model.layers:
        for name in (*ROW_PARALLEL, *COLUMN_PARALLEL):
            module = layer.mlp.experts.get(name)
            if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
                total += bytes_of(module.parameters())
                setattr(layer.mlp.experts, name, nn.Module())
    return total
