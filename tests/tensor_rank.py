"""One rank of a tensor-parallel trial over MLX's ring, `python tests/tensor_rank.py NAME...`; test_tensor.py starts it.

For each architecture: the whole model, and its shard, run the same greedy generation. Rank 0 prints a JSON line with
how far their logits part, whether the tokens are equal, and the bytes of its shard.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mlx.core as mx
from architectures import build
from mlx_lm.models.cache import make_prompt_cache

from parallel import tensor
from parallel.blueprint import bytes_of

PROMPT = [1 + 7 * i % 250 for i in range(23)]  # longer than the tiny sliding windows
CHUNK, NEW = 7, 6


def generate(model: Any) -> tuple[list[int], mx.array]:
    """Greedy tokens, and the logits of every one of them."""
    cache, tokens, logits = make_prompt_cache(model), [], []
    for start in range(0, len(PROMPT), CHUNK):
        out = model(mx.array([PROMPT[start : start + CHUNK]]), cache=cache)[:, -1]
        mx.eval(out)
    for _ in range(NEW):
        logits.append(out.astype(mx.float32))
        tokens.append(int(mx.argmax(out, axis=-1).item()))
        out = model(mx.array([[tokens[-1]]]), cache=cache)[:, -1]
        mx.eval(out)
    return tokens, mx.concatenate(logits)


def main() -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    for name in sys.argv[1:]:
        whole_tokens, whole = generate(build(name))
        shard = build(name)
        tensor.shard(shard, group)
        tokens, logits = generate(shard)
        if group.rank() == 0:
            parted = mx.abs(logits - whole).max().item()
            found = {"name": name, "parted": parted, "equal": tokens == whole_tokens}
            print(json.dumps(found | {"bytes": bytes_of(shard.parameters())}), flush=True)


if __name__ == "__main__":
    main()
