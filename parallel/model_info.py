"""`python -m parallel.model_info FOLDER_OR_CONFIG`: what a planner must know of a model, as JSON on stdout.

Sizes come from the headers of the weights where those are in the folder, else from config.json alone; nothing is
evaluated. The coordinator, which never holds mlx, runs it as a child process
(`cluster/plan/model_info.py`). Exit code 3 and one line on stderr when mlx-lm cannot build the model.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load_model as load_lazily

from parallel import pipeline, tensor, wire
from parallel.blueprint import build, bytes_of, context_of, dtype_of, family_of, layer_prefix, part
from parallel.engine import kv
from parallel.engine.sequence import CacheShape

EXIT_UNKNOWN = 3
PROBE_TOKENS = 8
WINDOW_TOKENS = 256  # at which caches that are not plain hold their window in full
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_topk", "top_k_experts")
EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embedding|embed)\.")
HEADS = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
WIRE_DTYPE_BYTES = {"muse_spark": 4}  # its residual stream is float32 whatever the weights are


def describe(source: Path) -> wire.ModelInfo:
    """The facts of the model in a folder, or of a config.json by itself. Raises ValueError, OSError."""
    config = read_config(source)
    measured = source.is_dir() and has_weights(source)

    def make() -> Any:
        return load_lazily(source, lazy=True)[0] if measured else build(config)

    model = make()
    parameters = dict(tree_flatten(model.parameters()))
    prefix = layer_prefix(model)
    outside = [(path, array.nbytes) for path, array in parameters.items() if not path.startswith(prefix)]
    embedding = sum(size for path, size in outside if EMBEDDINGS.search(path))
    head = sum(size for path, size in outside if HEADS.search(path))
    family, dtype = family_of(model), dtype_of(config)
    hidden = int(part(config, "hidden_size", "n_embd", "d_model", "dim") or 0)
    return wire.ModelInfo(
        model_type=config["model_type"],
        family=family,
        dtype=dtype,
        layers=layers_of(model),
        embedding=embedding,
        head=head,
        outside=sum(size for _, size in outside) - embedding - head,
        tied=head == 0,
        hidden=hidden,
        vocabulary=int(part(config, "vocab_size") or 0),
        widest=widest_of(model),
        wire=hidden * WIRE_DTYPE_BYTES.get(family, 4 if dtype == "float32" else 2),
        context=context_of(config),
        tensor=tensor_sizes(model, make),
        pipeline=pipeline.why_not(config),
        measured=measured,
        parameters=parameters_of(model),
    )


def has_weights(folder: Path) -> bool:
    """Whether the folder has all the weight files that its index names, or some where it has no index."""
    present = {path.name for path in folder.glob("model*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return bool(present)
    return set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()) <= present


def read_config(source: Path) -> dict[str, Any]:
    """config.json of a folder, or the file itself; with the quantisation that some exports keep in a file beside it."""
    path = source / "config.json" if source.is_dir() else source
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object")
    beside = path.parent / "hf_quant_config.json"
    if beside.exists() and not part(config, "quantization", "quantization_config"):
        config["quantization_config"] = {"quant_method": "modelopt", **json.loads(beside.read_text(encoding="utf-8"))}
    return config


def tensor_sizes(model: Any, make: Callable[[], Any]) -> list[wire.TensorSize]:
    """For 2 to 8 ranks, whether tensor parallel is possible, and what each rank then holds."""
    known = tensor.needs(model)
    refused = {ranks: tensor.reasons(model, ranks, known) for ranks in tensor.SIZES}
    able = [ranks for ranks, problems in refused.items() if not problems]
    try:
        held = tensor.rank_bytes(model, make, able) if able else {}
    except tensor.SplitError as error:
        held, refused = {}, {ranks: problems or [str(error)] for ranks, problems in refused.items()}
    return [wire.TensorSize(ranks, problems, held.get(ranks, 0)) for ranks, problems in refused.items()]


# ---------------------------------------------------------------- layers


def layers_of(model: Any) -> list[wire.LayerInfo]:
    """Weights and KV of each layer, in order."""
    caches = cache_of(model, PROBE_TOKENS)
    result = []
    if all(map(_grows_plainly, caches)):
        shapes = [kv.shape_of([cache]) for cache in caches]
    else:
        pairs = zip(cache_of(model, WINDOW_TOKENS), cache_of(model, 2 * WINDOW_TOKENS), strict=True)
        shapes = [_slope(once.nbytes, twice.nbytes) for once, twice in pairs]
    for number, layer in enumerate(model.layers):
        weights = bytes_of(layer.parameters())
        experts, share = experts_of(layer)
        shape = shapes[number] if number < len(shapes) else CacheShape(0, ())  # shares the KV of another layer
        result.append(
            wire.LayerInfo(
                weights=weights,
                active=weights - round(experts * (1 - share)),
                kv=list(shape.layers),
                fixed=shape.fixed_bytes,
                kv_heads=kv_heads_of(layer),
            )
        )
    return result


def _slope(once: int, twice: int) -> CacheShape:
    """The shape of a cache that holds `once` bytes for WINDOW_TOKENS tokens and `twice` for twice as many."""
    per_token = (twice - once) // WINDOW_TOKENS
    return CacheShape(once - WINDOW_TOKENS * per_token, ((per_token, 0),))


def _grows_plainly(cache: Any) -> bool:
    """Whether a cache is keys and values, or a state that does not grow, or a list of such."""
    parts = cache.caches if isinstance(cache, CacheList) else [cache]
    return all(hasattr(part, "keys") or isinstance(part, ArraysCache) for part in parts)


def cache_of(model: Any, tokens: int) -> kv.Solo:
    """Caches of so many tokens, unevaluated: their shapes tell the bytes."""
    solo = kv.new_solo(model)
    try:
        model(mx.zeros((1, tokens), mx.int32), cache=solo)
    except RuntimeError as error:
        if "metal_kernel" not in str(error):
            raise
        _fill(model, solo, tokens)
    return solo


def _fill(model: Any, solo: kv.Solo, tokens: int) -> None:
    """What a forward would put into the caches of a model whose kernels need Metal: plain keys and values."""
    for layer, cache in zip(model.layers, solo, strict=True):
        attention = layer.self_attn
        shape = (1, attention.n_kv_heads, tokens, attention.head_dim)
        dtype = attention.o_proj.weight.dtype
        kept = mx.zeros(shape, dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16)
        cache.update_and_fetch(kept, kept)


def experts_of(layer: Any) -> tuple[int, float]:
    """(bytes of all routed experts of a layer, the share of them that one token reads)."""
    total = experts = chosen = 0
    for _, module in layer.named_modules():
        for attribute in CHOSEN_EXPERTS:
            for owner in (module, getattr(module, "args", None), getattr(module, "config", None)):
                if isinstance(count := getattr(owner, attribute, None), int):
                    chosen = max(chosen, count)
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            total += bytes_of(module.parameters())
            experts = module.num_experts
    return total, min(1.0, chosen / experts) if chosen and experts else 1.0


def kv_heads_of(layer: Any) -> int:
    """Into how many parts tensor parallel may cut this layer's cache: its KV heads; 0 for a latent (MLA) cache."""
    found = 0
    for _, module in layer.named_modules():
        if getattr(module, "kv_lora_rank", None):
            return 0
        for attribute in ("n_kv_heads", "num_kv_heads", "num_key_value_heads", "num_k_heads"):
            found = found or getattr(module, attribute, None) or 0
    return int(found)


def parameters_of(model: Any) -> int:
    """How many weights the model has, packed ones unpacked; scales and biases of packing do not count."""
    total = 0
    for module in model.modules():
        for name, value in module.items():
            if isinstance(value, mx.array) and not (hasattr(module, "bits") and name in ("scales", "biases")):
                total += value.size * 32 // module.bits if name == "weight" and hasattr(module, "bits") else value.size
    return int(total)


def widest_of(model: Any) -> int:
    """The widest activation of one token inside a layer, in elements; experts count as often as they are chosen."""
    widest = 0
    layer = max(model.layers, key=lambda one: bytes_of(one.parameters()))
    for _, module in layer.named_modules():
        if "weight" in module and module.weight.ndim == 2:
            widest = max(widest, module.weight.shape[0])
        elif isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            chosen = max(1, round(experts_of(layer)[1] * module.num_experts))
            widest = max(widest, module.output_dims * chosen)
    return int(widest)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m parallel.model_info", description="A model's sizes, as JSON.")
    parser.add_argument("source", type=Path, help="a folder with a config.json, or such a file")
    parser.add_argument("--ranks", type=int, help="exit with code 3 unless tensor parallel on this many is possible")
    args = parser.parse_args(argv)
    try:
        info = describe(args.source)
    except (ValueError, OSError, NotImplementedError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(EXIT_UNKNOWN)
    print(msgspec.json.encode(info).decode())
    if args.ranks and (problems := info.why_not_tensor(args.ranks)):
        print("; ".join(problems), file=sys.stderr)
        sys.exit(EXIT_UNKNOWN)


if __name__ == "__main__":
    main()
