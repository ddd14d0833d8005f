"""A model folder in MLX format becomes a model in memory, with progress. Called by `rank.py` and the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_lazily

Progress = Callable[[int, int], None]


def load_model(folder: Path, progress: Progress = lambda done, total: None) -> tuple[Any, dict[str, Any]]:
    """The model in `folder` with its weights in memory, and its config.

    Weights are read a few at a time; `progress` gets (done, total) in bytes. Raises what mlx-lm raises for a
    folder that it cannot load.
    """
    model, config = load_lazily(folder, lazy=True)
    weights = [array for _, array in tree_flatten(model.parameters())]
    total, done = sum(array.nbytes for array in weights), 0
    progress(0, total)
    for array in weights:
        mx.eval(array)
        done += array.nbytes
        progress(done, total)
    model.eval()
    return model, config


def context_of(folder: Path) -> int:
    """The longest context that the model was made for, from its config.json; 0 when it does not say."""
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions", "model_max_length"):
            if isinstance(part.get(key), int):
                return int(part[key])
    return 0


def wire_memory(setting: str) -> None:
    """Keep MLX memory resident: "auto" as much as Metal recommends (as mlx-lm does), "off" not."""
    if setting == "auto" and mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
