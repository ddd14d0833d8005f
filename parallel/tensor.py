"""Tensor parallel: may this model be cut N ways, and mlx-lm's `shard()` called the right way for its family.

A split that does not come out even is an error message in some of mlx-lm's models and silent garbage in others, so
every one is looked for here, on the built model, before `shard()` touches it. `rank.py` and `loading.py` shard,
`model_info.py` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
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
        "glm_moe_dsa",
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


@dataclass(frozen=True, slots=True)
class Need:
    """A count that the number of ranks must divide; `repeats`: it may divide that number instead.

    `refusal` is a sentence with {} for the number of ranks.
    """

    count: int
    refusal: str
    repeats: bool = False

    def even(self, ranks: int) -> bool:
        return self.count % ranks == 0 or (self.repeats and ranks % self.count == 0)


def reasons(model: Any, ranks: int, known: Sequence[Need] | None = None) -> list[str]:
    """As `why_not`, for a built model. `known` are its `needs`, where the caller has them already."""
    family = family_of(model)
    if target(model) is None:
        return [f"mlx-lm cannot cut {family} by width (it has no shard())"]
    if family not in FAMILIES:
        return [f"cutting {family} by width was never tried here"]
    if ranks not in SIZES:
        return [f"tensor parallel is for {SIZES.start} to {SIZES.stop - 1} ranks, not {ranks}"]
    found = needs(model) if known is None else known
    return [need.refusal.format(ranks) for need in found if not need.even(ranks)]


# ---------------------------------------------------------------- the checks


def needs(model: Any) -> list[Need]:
    """Everything that must come out even, each once and not once per layer; heads first."""
    family = family_of(model)
    repeats = family in REPEATS_KV_HEADS
    heads: dict[Need, None] = {}
    widths: dict[Need, None] = dict.fromkeys(_vocabulary(model, family))
    for layer in model.layers:
        for path, module in layer.named_modules():
            if "Indexer" not in type(module).__name__:  # replicated, its heads too
                heads |= dict.fromkeys(_heads(module, repeats))
            widths |= dict.fromkeys(_widths(f"{path}.".lstrip("."), module))
    return [*heads, *widths]


def _heads(module: Any, repeats: bool) -> Iterator[Need]:
    for attribute, what in HEADS.items():
        count = getattr(module, attribute, None)
        if isinstance(count, int):
            yield Need(count, f"{count} {what} do not divide by {{}}", repeats and what == "KV heads")


def _widths(path: str, module: Any) -> Iterator[Need]:
    """Of the projections that are children of `module`, those that `shard()` cuts."""
    for name in ROW_PARALLEL:
        if name in module and "weight" in module[name]:
            yield _input(path + name, module[name])
    gated = COLUMN_PARALLEL if "down_proj" in module else ()  # a gate elsewhere is not cut
    whole = [name for name in PARTS_OF_FEW_TOKENS if isinstance(module.get(name), nn.Linear)]  # packed ones stay whole
    for name in (*gated, *whole):
        if name in module:
            width = int(module[name].weight.shape[-2])
            yield Need(width, f"the output of {path}{name} is {width} wide, which does not divide by {{}}")


def _input(path: str, module: Any) -> Need:
    if not hasattr(module, "group_size"):
        width = int(module.weight.shape[-1])
        return Need(width, f"the input of {path} is {width} wide, which does not divide by {{}}")
    groups, size = int(module.scales.shape[-1]), module.group_size
    wide = f"the input of {path} is {groups * size} wide, {groups} quantisation groups of {size}"
    return Need(groups, f"{wide}, which do not divide by {{}}")


def _vocabulary(model: Any, family: str) -> Iterator[Need]:
    """Only two families cut the head; the others keep it whole on every rank."""
    head = None
    if family == "muse_spark":
        head = model.lm_head
    elif family in REPEATS_KV_HEADS:
        head = model.language_model.get("lm_head")
    if head is not None:
        width = int(head.weight.shape[0])
        yield Need(width, f"a vocabulary of {width} tokens does not divide by {{}}")


# ---------------------------------------------------------------- what a rank would hold


class _Ranks:
    """Looks like a distributed group to `shard()`, which asks for size and rank only."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def rank_bytes(whole: Any, make: Callable[[], Any], sizes: Sequence[int]) -> dict[int, int]:
    """The bytes of weights on each rank, per number of ranks in `sizes`, all of which `reasons` let through.

    `shard()` is tried for the largest of them on an unevaluated twin of `whole` that `make` builds: its shapes show
    what was cut. Raises SplitError with mlx-lm's own words where it refuses.
    """
    largest = max(sizes)
    twin = make()
    experts = _take_experts(twin) if family_of(twin) == "muse_spark" else 0
    try:
        target(twin).shard(_Ranks(largest))
    except (ValueError, AssertionError, ZeroDivisionError, TypeError, IndexError, KeyError) as error:
        raise SplitError(f"mlx-lm's shard() refuses {largest} ranks: {error}") from error
    cut = {path: array.nbytes for path, array in tree_flatten(twin.parameters())}
    before = [(array.nbytes, cut[path]) for path, array in tree_flatten(whole.parameters()) if path in cut]
    # an array is whole on every rank, cut evenly, or cut into fewer parts than ranks (repeated KV heads)
    return {n: sum(max(-(-size // n), part) for size, part in before) + -(-experts // n) for n in sizes}


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
