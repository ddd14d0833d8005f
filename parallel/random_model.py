"""`python -m parallel.random_model OUT --shape llama-8b --dtype bfloat16 --tokenizer FOLDER`: a model for timing only.

Writes a folder in MLX format: config.json, random weights in shards, and a tokenizer whose vocabulary is padded to the
model's, so that every token id has a text. The text is nonsense; sizes, dtypes and speed are those of the real shape.
Run by people (docs/benchmarks.md) and by tests; nothing at run time imports it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

SHARD_BYTES = 4 << 30
DEVIATION = 0.02  # what most models are initialised with; keeps activations finite in bfloat16
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-tiny": _llama(64, 128, 2, 4, 2, 50000),
    "llama-1b": _llama(2048, 8192, 16, 32, 8, 128256),
    "llama-8b": _llama(4096, 14336, 32, 32, 8, 128256),
}


def write_random_model(
    out: Path,
    config: dict[str, Any],
    dtype: mx.Dtype,
    tokenizer: Path,
    *,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the model to `out` and return its weights' size in bytes.

    `tokenizer` is a folder with a tokenizer.json of at most `config["vocab_size"]` tokens. Norms are one, all else is
    normal with deviation 0.02. Weights are made one shard at a time, so memory holds one shard. Raises ValueError.
    """
    out.mkdir(parents=True, exist_ok=True)
    _copy_tokenizer(tokenizer, out, config["vocab_size"])
    name = str(dtype).removeprefix("mlx.core.")
    (out / "config.json").write_text(json.dumps({**config, "torch_dtype": name}, indent=2) + "\n")

    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    shapes = [(path, array.shape) for path, array in tree_flatten(model.parameters())]  # lazy: nothing is made yet
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    room = shard_bytes
    for path, shape in shapes:
        size = dtype.size
        for length in shape:
            size *= length
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append((path, shape))
        room -= size

    key = mx.random.key(seed)
    where: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        weights = {}
        for path, shape in shard:
            key, drawn = mx.random.split(key)
            weights[path] = _draw(shape, dtype, drawn)
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        mx.save_safetensors(str(out / file), weights, metadata={"format": "mlx"})
        where |= dict.fromkeys(weights, file)
        total += sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def _draw(shape: tuple[int, ...], dtype: mx.Dtype, key: mx.array) -> mx.array:
    if len(shape) == 1:
        return mx.ones(shape, dtype)
    return (mx.random.normal(shape, dtype=mx.float32, key=key) * DEVIATION).astype(dtype)


def _copy_tokenizer(source: Path, out: Path, vocabulary: int) -> None:
    spec = json.loads((source / "tokenizer.json").read_text())
    words = spec["model"]["vocab"]
    if not isinstance(words, dict):
        raise ValueError(
            f"{source}/tokenizer.json is not a BPE or word-piece tokenizer; its vocabulary cannot be padded."
        )
    taken = {*words.values(), *(token["id"] for token in spec.get("added_tokens", []))}
    if max(taken) >= vocabulary:
        raise ValueError(f"The tokenizer in {source} has {max(taken) + 1} tokens, the model's shape only {vocabulary}.")
    # "Ġ" is a byte-level tokenizer's space. No merge leads to these words, so text never encodes to them.
    words |= {f"Ġfiller{i}": i for i in range(vocabulary) if i not in taken}
    (out / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False))
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, out / name)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m parallel.random_model", description="Write a random model.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--layers", type=int, help="fewer or more layers than the shape has")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="folder with a tokenizer.json, e.g. the demo model's"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = dict(SHAPES[args.shape])
    if args.layers:
        config["num_hidden_layers"] = args.layers
    size = write_random_model(args.out, config, getattr(mx, args.dtype), args.tokenizer, seed=args.seed)
    print(f"{args.out}: {size / 1e9:.2f} GB of random {args.dtype} weights")


if __name__ == "__main__":
    main()
