"""A random llama in MLX format whose weights are in several files of some megabytes, one per layer. Imports mlx."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from tiny_model import LLAMA, build_tiny_model

LAYERS = 4
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": LAYERS}


def shard(layer: int) -> str:
    """The file that a layer is in; the embedding is in the first one, norm and head are in the last."""
    return f"model-{layer + 1:05}-of-{LAYERS:05}.safetensors"


def build_sharded_model(folder: Path, *, tied: bool = False, format_: str = "mlx") -> Path:
    """Write it to `folder` and return that."""
    build_tiny_model(folder, config={**LLAMA, **SIZES, "tie_word_embeddings": tied})
    whole = folder / "model.safetensors"
    files: dict[str, dict[str, mx.array]] = {}
    for name, array in mx.load(str(whole)).items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0 if "embed" in name else LAYERS - 1
        files.setdefault(shard(layer), {})[name] = array
    for file, arrays in files.items():
        mx.save_safetensors(str(folder / file), arrays, metadata={"format": format_})
    index = {"weight_map": {name: file for file, arrays in files.items() for name in arrays}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole.unlink()
    return folder
