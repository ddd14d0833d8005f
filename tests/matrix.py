"""What is tried of every architecture, as data for tests and as a page: `python tests/matrix.py > docs/models.md`.

What the table says about batching, prefix reuse and splits is asked of the same functions that decide it at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from architectures import NAMES, blank, config_of

from parallel import pipeline, tensor
from parallel.engine import kv

# The architectures that must work as a pipeline, and what else does. A name is a config of architectures.py.
REQUIRED = tuple(
    [
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "minimax",
        "ministral3",
        "mistral3",
        "mistral4",
        "kimi_k25",
        "muse_spark",
        "muse_glimmer",
        "gemma3_text",
        "mixtral",
        "step3p5",
        "longcat_flash",
    ]
)
FURTHER = ("gemma3", "gemma4.31B", "gemma4_text.31B", "glm_moe_dsa", "llama4", "mistral3.llama", "mistral3.mistral4")
REFUSED = tuple(name for name in NAMES if name not in REQUIRED + FURTHER)

# Layers per stage, of six; a model with more gives the rest to its last stage. The pattern of layer kinds is S S F or
# S F: (2, 1, 3) has a stage that holds one kind only, and its mask and position are then read off another kind's cache.
QUICK = (((3, 3), 7), ((2, 1, 3), 3))
FULL = tuple(
    (split, chunk)
    for split, chunks in {
        (3, 3): (1, 8, 64),
        (1, 5): (7,),
        (5, 1): (7,),
        (2, 2, 2): (1, 7, 8),
        (1, 3, 2): (7, 16),
        (4, 1, 1): (5,),
        (1, 1, 1, 1, 1, 1): (7,),
    }.items()
    for chunk in chunks
)
TOLERANCE = 1e-3  # of a logit; wrong wiring gives 0.01 to 9
TENSOR_RANKS = (2, 3)


def cases(trials: tuple[tuple[tuple[int, ...], int], ...]) -> list[tuple[str, tuple[int, ...], int]]:
    """(name, layers per stage, prefill chunk in tokens) for every architecture that can be a pipeline."""
    return [(name, split, chunk) for name in REQUIRED + FURTHER for split, chunk in trials]


def ranges(split: tuple[int, ...], layers: int) -> Iterator[tuple[int, int]]:
    """The [start, stop) of each stage."""
    start = 0
    for i, count in enumerate(split):
        stop = layers if i == len(split) - 1 else start + count
        yield start, stop
        start = stop


# ---------------------------------------------------------------- docs/models.md


def document() -> str:
    """docs/models.md."""
    rows = [_row(name) for name in sorted(NAMES)]
    head = ("config", "pipeline", "tensor", "unequal rows in a batch", "prefix reuse")
    table = [head, tuple("-" * len(title) for title in head), *rows]
    return TEXT.format(
        table="\n".join(f"| {' | '.join(row)} |" for row in table),
        quick=_told(QUICK),
        full=_told(FULL),
        tolerance=TOLERANCE,
        count=len(REQUIRED + FURTHER),
        ranks=" and ".join(str(ranks) for ranks in TENSOR_RANKS),
    )


def _row(name: str) -> tuple[str, ...]:
    config = config_of(name)
    model = blank(config)
    reason = pipeline.why_not(config)
    return (
        f"`{name}`",
        f"no: {reason.partition(';')[0]}" if reason else "yes",
        _tensor(config, model),
        "yes" if kv.batchable(model) else "no: one row per step",
        {"any": "any prefix", "boundary": "where it was saved", "off": "no"}[kv.reuse_of(model)],
    )


def _tensor(config: dict[str, Any], model: Any) -> str:
    refused = {ranks: tensor.reasons(model, ranks) for ranks in TENSOR_RANKS}
    if works := [str(ranks) for ranks, reasons in refused.items() if not reasons]:
        return f"yes (this config: {', '.join(works)} ranks)"
    return f"no: {refused[TENSOR_RANKS[0]][0]}"


def _told(trials: tuple[tuple[tuple[int, ...], int], ...]) -> str:
    return "; ".join(f"{'+'.join(map(str, split))} layers in chunks of {chunk}" for split, chunk in trials)


TEXT = """# Models

Which architectures run split over several machines, and what was tried. Generated from the test matrix by
`python tests/matrix.py > docs/models.md`; a test keeps it current. An architecture is a model file of mlx-lm 0.32.2; a
model's `model_type` in config.json names it. One that is not listed runs on a single machine only.

{table}

- **Pipeline**: each machine holds a run of layers. `--split` may be uneven; every stage needs at least one layer.
- **Tensor**: each machine holds a slice of every layer. For how many ranks a model divides depends on its sizes (heads,
  KV heads, widths, quantisation groups): `cluster up` checks them and says which one is in the way. The table tells it
  for the tiny config of the test.
- **Unequal rows in a batch**: whether sequences of different lengths can decode in one step.
- **Prefix reuse**: whether a cached prompt is reused at any point, or only where its KV was saved (models with
  sliding windows or recurrent layers, whose state cannot be cut back).

## What was tried

On Linux with MLX's CPU backend, float32, random weights in the tiny configs of `tests/models/tiny_configs.json` (six
layers, sliding windows of 8 tokens), stages chained in one process. For each of the {count} configs with a pipeline:
prompts of 5 to 23 tokens prefilled in chunks, one of them from a saved prefix; two interleaved micro-batches of
unequal rows; one row joins, one leaves, the micro-batches merge. Every row's greedy tokens equal those of the whole
model run alone on its prompt in one piece, and every logit agrees within {tolerance}.

- By default (`make test`): {quick}.
- `make test-slow` as well: {full}.
- A model with more than six layers gives the rest to its last stage. llama4 and prefix reuse: what its caches cannot do
  is left out.
- Tensor on {ranks} ranks is tried by `tests/test_tensor.py`.

- 4-bit weights as stages: llama and qwen3_moe, equal to the whole 4-bit model.

Not tried: Metal, real checkpoints as stages, images. **muse_spark's Metal kernels were not run**: they
have no CPU fallback, so the tests replace them by plain operations that follow their documentation. What is shown is
that stages wire the model right, not that the kernels compute right. Its hidden states travel as float32 whatever the
weights' dtype is.

deepseek_v41 rounds what it caches to fp8 and fp4. A prompt prefilled in other chunks gives sums that differ in their
last bit, and now and then one of them is rounded to the next fp8 value: logits then differ by a few thousandths, in
mlx-lm alone as here. With its fp8 rounding switched off the difference was 0.000004.
"""

if __name__ == "__main__":
    print(document(), end="")
