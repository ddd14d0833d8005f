"""A model folder in MLX format becomes a model in memory, with progress: all of it, some layers, or a slice of each.

Weights are lazy until they are evaluated, one after the other; what belongs to another rank never is, so it is not read
from disk. Called by `rank.py` and the benchmarks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes, load_config
from mlx_lm.utils import load_model as load_lazily

from parallel import blueprint, pipeline, tensor

Progress = Callable[[int, int], None]


def _no_progress(done: int, total: int) -> None:
    pass


def load_model(folder: Path, progress: Progress = _no_progress) -> tuple[Any, dict[str, Any]]:
    """The model in `folder` with its weights in memory, and its config.

    Weights are read a few at a time; `progress` gets (done, total) in bytes. Raises what mlx-lm raises for a
    folder that it cannot load.
    """
    model, config = load_lazily(folder, lazy=True)
    _read(model.parameters(), progress)
    model.eval()
    return model, config


def load_stage(
    folder: Path, start: int, stop: int, progress: Progress = _no_progress
) -> tuple[pipeline.Stage, dict[str, Any]]:
    """Layers [start, stop) of the model in `folder` as a pipeline stage, with only their weights in memory.

    Files in MLX format that hold nothing of this stage may be missing. Raises ValueError for a model that cannot be a
    pipeline and for weights that are missing, and what mlx-lm raises for a folder that it cannot load.
    """
    if reason := pipeline.why_not(load_config(folder)):
        raise ValueError(reason)
    model, config, absent = _load_lazily_in_part(folder)
    if absent and not _in_mlx_format(folder):
        # mlx-lm judges by all names whether and how to convert: a part may be converted otherwise than the whole
        raise ValueError(f"{folder} has only some of the model's files, which works for files in MLX format only")
    stage = pipeline.Stage(model, start, stop)
    if missing := sorted(absent & {name for name, _ in tree_flatten(stage.parameters())}):
        shown = ", ".join(missing[:3]) + (" and others" if len(missing) > 3 else "")
        raise ValueError(f"{folder} has no weights for {shown}, which layers {start} to {stop - 1} need here")
    _read(stage.parameters(), progress)
    return stage, config


def load_shard(folder: Path, group: Any, progress: Progress = _no_progress) -> tuple[Any, dict[str, Any]]:
    """This rank's slice of every layer of the model in `folder`, split over `group`, and the model's config.

    A whole tensor is in memory only until its slice is taken. Raises what `tensor.shard` raises for a model that
    cannot be split so, and what mlx-lm raises for a folder that it cannot load.
    """
    model, config = load_lazily(folder, lazy=True)
    tensor.shard(model, group)
    weights = tree_flatten(model.parameters())
    total, done = sum(array.nbytes for _, array in weights), 0
    progress(0, total)
    while weights:
        name, array = weights.pop(0)
        array = mx.contiguous(array)  # a slice along the first axis would hold on to all of what it was cut from
        mx.eval(array)
        model.update(tree_unflatten([(name, array)]))
        mx.clear_cache()  # what the whole tensor took goes back to the system
        done += array.nbytes
        progress(done, total)
    model.eval()
    return model, config


def _read(parameters: dict[str, Any], progress: Progress) -> None:
    """Evaluate `parameters` one by one."""
    weights = [array for _, array in tree_flatten(parameters)]
    total, done = sum(array.nbytes for array in weights), 0
    progress(0, total)
    for array in weights:
        mx.eval(array)
        done += array.nbytes
        progress(done, total)


def _load_lazily_in_part(folder: Path) -> tuple[Any, dict[str, Any], set[str]]:
    """The model, its config and the names of the weights that no file here has. Checks all else that mlx-lm checks."""
    absent: set[str] = set()

    def classes(config: dict[str, Any]) -> tuple[Callable[[Any], Any], Any]:
        kind, arguments = _get_classes(config)

        def build(args: Any) -> Any:
            model = kind(args)

            def load_weights(weights: list[tuple[str, mx.array]], strict: bool = True) -> Any:
                own = dict(tree_flatten(model.parameters()))
                absent.update(own.keys() - {name for name, _ in weights})
                return kind.load_weights(model, weights + [(name, own[name]) for name in absent], strict)

            model.load_weights = load_weights
            return model

        return build, arguments

    model, config = load_lazily(folder, lazy=True, get_model_classes=classes)
    del model.load_weights
    model.eval()
    return model, config, absent


def _in_mlx_format(folder: Path) -> bool:
    """Whether mlx-lm wrote the weights in `folder`."""
    headers: list[Any] = [mx.load(str(file), return_metadata=True) for file in folder.glob("model*.safetensors")]
    return all(metadata.get("format") == "mlx" for _, metadata in headers)


def context_of(folder: Path) -> int:
    """The longest context that the model was made for, from its config.json; 0 when it does not say."""
    return blueprint.context_of(json.loads((folder / "config.json").read_text()))


def wire_memory(setting: str) -> None:
    """Keep MLX memory resident: "auto" as much as Metal recommends (as mlx-lm does), "off" not."""
    if setting == "auto" and mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
