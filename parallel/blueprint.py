"""An mlx-lm model with the shapes, dtypes and quantisation that config.json describes, and no memory behind them.

MLX arrays are lazy: an unevaluated parameter knows its shape and bytes and occupies nothing, so 671B parameters are
built in a fraction of a second. Nothing here evaluates. `tensor.py`, `pipeline.py` and `model_info.py` call it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions", "model_max_length")


def build(config: dict[str, Any]) -> Any:
    """The model of `config`, unevaluated. Raises ValueError when mlx-lm has no such model, or it does not fit."""
    config = copy.deepcopy(config)  # some of mlx-lm's argument classes write into it
    if "model_file" in config:
        raise ValueError("the model brings a program of its own (model_file), which is not run")
    if not isinstance(config.get("model_type"), str):
        raise ValueError("config.json names no model_type")
    model_class, arguments_class = utils._get_classes(config)
    try:
        model = model_class(arguments_class.from_dict(config))
    except (KeyError, TypeError, AttributeError, IndexError, AssertionError) as error:
        raise ValueError(f"mlx-lm cannot build {config['model_type']} from it: {error!r}") from error
    _cast(model, DTYPES[dtype_of(config)])
    if quantisation := quantisation_of(config):
        _quantise(model, quantisation)
    return model


def family_of(model: Any) -> str:
    """The name of mlx-lm's file that the model is in: "llama" also for a Mistral."""
    return type(model).__module__.rpartition(".")[2]


def inner_of(model: Any) -> Any:
    """The module that holds the layers, the embedding and the final norm."""
    for path in (("language_model", "model"), ("model", "language_model"), ("model",)):
        found = model
        for name in path:
            found = getattr(found, name, None)
        if found is not None and hasattr(found, "layers"):
            return found
    return model


def layer_prefix(model: Any) -> str:
    """Where the layers are among the parameters' names: "model.layers."."""
    first = next(layer for layer in model.layers if layer is not None)
    for path, module in model.named_modules():
        if module is first:
            return str(path).rpartition(".")[0] + "."
    raise ValueError(f"{family_of(model)} keeps its layers where they are not found")


def bytes_of(parameters: Any) -> int:
    """The bytes of all arrays in a tree, evaluated or not."""
    return sum(array.nbytes for _, array in tree_flatten(parameters))


def part(config: dict[str, Any], *names: str) -> Any:
    """The first of `names` that the config, or its text_config, has; None if neither does."""
    for section in (config, config.get("text_config") or {}):
        for name in names:
            if section.get(name) is not None:
                return section[name]
    return None


def dtype_of(config: dict[str, Any]) -> str:
    """The dtype that unquantised weights are stored in, "bfloat16" where the config does not say."""
    name = str(part(config, "torch_dtype", "dtype") or "bfloat16").removeprefix("torch.")
    return name if name in DTYPES else "bfloat16"


def context_of(config: dict[str, Any]) -> int:
    """The longest context that the model was made for, in tokens; 0 when the config does not say."""
    for section in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            if isinstance(section.get(key), int):
                return int(section[key])
    return 0


# ---------------------------------------------------------------- dtype and quantisation


def _cast(model: Any, dtype: mx.Dtype) -> None:
    """Float parameters become `dtype`, but those that mlx-lm keeps as they are when it converts."""
    wanted: Callable[[str], bool] = getattr(model, "cast_predicate", None) or (lambda path: True)

    def cast(path: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if wanted(path) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def quantisation_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """How weights are packed in memory: group_size, bits, mode, and the paths that mlx-lm's key names; None if not.

    Formats that mlx-lm unpacks when it loads (most fp8) count as unpacked. `ignore` lists what a foreign format leaves
    out, `foreign` is true for formats that never pack an embedding.
    """
    if quantisation := config.get("quantization"):
        return {"mode": "affine", **quantisation}
    foreign = part(config, "quantization_config")
    if not foreign:
        return None
    method = foreign.get("quant_method")
    ignore = {"foreign": True, "ignore": foreign.get("ignore") or foreign.get("modules_to_not_convert") or []}
    if method is None and "bits" in foreign:
        return {"mode": "affine", **foreign}
    if method == "mxfp4":
        return {"group_size": 32, "bits": 4, "mode": "mxfp4", **ignore}
    blocks = list(foreign.get("weight_block_size") or ())
    if method == "mxfp8" or (method == "fp8" and foreign.get("scale_fmt") == "ue8m0" and blocks == [32, 32]):
        return {"group_size": 32, "bits": 8, "mode": "mxfp8", **ignore}
    if method == "compressed-tensors":
        return {**utils._compressed_tensors_quantization(foreign), **ignore}
    if method == "modelopt":
        settings = foreign.get("quantization", foreign)
        left_out = settings.get("exclude_modules") or settings.get("ignore") or []
        nvfp4 = {"group_size": settings.get("group_size", 16), "bits": 4, "mode": "nvfp4"}
        return {**nvfp4, "foreign": True, "ignore": left_out}
    if method in ("awq", "gptq"):
        return {"group_size": foreign["group_size"], "bits": foreign["bits"], "mode": "affine", **ignore}
    return None


def _quantise(model: Any, quantisation: dict[str, Any]) -> None:
    group_size, bits, mode = quantisation["group_size"], quantisation["bits"], quantisation.get("mode", "affine")
    usual: Callable[[str, Any], Any] | None = getattr(model, "quant_predicate", None)
    left_out = [str(name) for name in quantisation.get("ignore", ())]

    def wanted(path: str, module: Any) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        if path in quantisation:
            own: bool | dict[str, Any] = quantisation[path]
            return own
        if module.weight.shape[-1] % group_size or any(_matches(path, name) for name in left_out):
            return False
        if quantisation.get("foreign"):
            return not isinstance(module, nn.Embedding) and (usual is None or bool(usual(path, module)))
        return True if usual is None else usual(path, module)

    nn.quantize(model, group_size, bits, mode=mode, class_predicate=wanted)


def _matches(path: str, name: str) -> bool:
    if name.startswith("re:"):
        return re.search(name[3:], path) is not None
    return fnmatch(path, name) or path.endswith(name)
