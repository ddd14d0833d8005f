"""How often a seeded request gives the same tokens alone and in a batch; no test, since in bfloat16 that is a rate.

python tests/seeded_rate.py MODEL-FOLDER --dtype bfloat16 --requests 32 --tokens 32 --temperature 0.7 0

docs/benchmarks.md has figures.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import mlx.core as mx
from engine_run import Said, engine_for

from parallel import wire
from parallel.engine.loop import Engine
from parallel.loading import load_model


def tokens_of(engine: Engine, requests: list[wire.Submit]) -> dict[int, list[int]]:
    said = Said()
    for request in requests:
        engine.add(request)
    while not engine.idle:
        said.take(engine.step())
    return {id: [token for token, _ in tokens] for (id, _), tokens in said.tokens.items()}


def rate(engine: Engine, vocabulary: int, count: int, tokens: int, temperature: float, batch: int) -> str:
    """`count` requests with prompts of 8 to 64 random ids, each alone and among `batch` others."""
    rng = random.Random(7)
    requests = [
        wire.Submit(
            id,
            [rng.randrange(vocabulary) for _ in range(rng.randint(8, 64))],
            tokens,
            1,
            wire.Sampling(temperature=temperature, seed=id),
        )
        for id in range(1, count + 1)
    ]
    alone = {id: said for request in requests for id, said in tokens_of(engine, [request]).items()}
    together: dict[int, list[int]] = {}
    for first in range(0, count, batch):
        together |= tokens_of(engine, requests[first : first + batch])
    same = sum(alone[id] == together[id] for id in alone)
    agreed = [next((i for i in range(tokens) if alone[id][i] != together[id][i]), tokens) for id in alone]
    return (
        f"temperature {temperature:g}, batches of {batch}: {same} of {count} requests the same over {tokens} tokens; "
        f"{sum(agreed) / (count * tokens):.1%} of all tokens stand before the first difference"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7, 0.0])
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    model, config = load_model(args.model)
    model.set_dtype(getattr(mx, args.dtype))
    # Nothing fits into one byte, so no prefix is reused: each run computes its prompts itself.
    engine = engine_for(model, context=1024, slots=args.batch, prefix_bytes=1)
    for temperature in args.temperature:
        print(rate(engine, config["vocab_size"], args.requests, args.tokens, temperature, args.batch), flush=True)


if __name__ == "__main__":
    main()
