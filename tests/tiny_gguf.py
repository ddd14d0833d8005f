"""A small quantised llama as a GGUF file, written from the format's description, with the values it stands for."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, "th", "the", "Ġthe"]
F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(content: Any) -> bytes:
    match content:
        case bool():
            return struct.pack("<I?", 7, content)
        case int():
            return struct.pack("<II", 4, content)
        case float():
            return struct.pack("<If", 6, content)
        case str():
            return struct.pack("<I", 8) + string(content)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(content)) + b"".join(map(string, content))
        case [int(), *_]:
            return struct.pack("<IIQ", 9, 5, len(content)) + struct.pack(f"<{len(content)}i", *content)
    raise TypeError(content)


def write_gguf(path: Path, meta: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> Path:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(meta))
    head += b"".join(string(key) + value(content) for key, content in meta.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        data += bytes(-len(data) % 32)
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += content
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def blocks_of_q4_1(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[bytes, np.ndarray]:
    """Random blocks and the values they stand for: scale times nibble plus minimum; low nibbles are elements 0-15."""
    out, values = b"", []
    for _ in range(shape[0] * shape[1] // 32):
        scale, minimum = rng.normal(0, 0.05, 2).astype(np.float16)
        nibbles = rng.integers(0, 16, 32)
        out += scale.tobytes() + minimum.tobytes() + bytes(int(a | b << 4) for a, b in zip(nibbles[:16], nibbles[16:]))  # noqa: B905
        values.append(np.float32(scale) * nibbles.astype(np.float32) + np.float32(minimum))
    return out, np.concatenate(values).reshape(shape)


def blocks_of_q8_0(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[bytes, np.ndarray]:
    """Random blocks and the values they stand for: scale times a signed byte."""
    out, values = b"", []
    for _ in range(shape[0] * shape[1] // 32):
        scale = np.float16(rng.normal(0, 0.02))
        bytes_ = rng.integers(-127, 128, 32).astype(np.int8)
        out += scale.tobytes() + bytes_.tobytes()
        values.append(np.float32(scale) * bytes_.astype(np.float32))
    return out, np.concatenate(values).reshape(shape)


META: dict[str, Any] = {
    "general.architecture": "llama",
    "general.license": "apache-2.0",
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.block_count": LAYERS,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.context_length": 512,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(TOKENS) - 3)],
    "tokenizer.ggml.merges": ["t h", "th e", "Ġ the"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


def shapes() -> Iterable[tuple[str, tuple[int, int]]]:
    head = HIDDEN // HEADS
    for i in range(LAYERS):
        yield f"blk.{i}.attn_q.weight", (HIDDEN, HIDDEN)
        yield f"blk.{i}.attn_k.weight", (KV_HEADS * head, HIDDEN)
        yield f"blk.{i}.attn_v.weight", (KV_HEADS * head, HIDDEN)
        yield f"blk.{i}.attn_output.weight", (HIDDEN, HIDDEN)
        yield f"blk.{i}.ffn_gate.weight", (INNER, HIDDEN)
        yield f"blk.{i}.ffn_up.weight", (INNER, HIDDEN)
        yield f"blk.{i}.ffn_down.weight", (HIDDEN, INNER)


def tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write the model to `path`; the float32 value of each tensor, under GGUF's names."""
    rng = np.random.default_rng(7)
    tensors, values = {}, {}
    for name, shape in shapes():
        content, values[name] = blocks_of_q4_1(rng, shape)
        tensors[name] = (Q4_1, shape, content)
    content, values["token_embd.weight"] = blocks_of_q8_0(rng, (len(TOKENS), HIDDEN))
    tensors["token_embd.weight"] = (Q8_0, (len(TOKENS), HIDDEN), content)
    norms = [f"blk.{i}.{kind}_norm.weight" for i in range(LAYERS) for kind in ("attn", "ffn")]
    for name in [*norms, "output_norm.weight"]:
        values[name] = rng.normal(1, 0.1, HIDDEN).astype(np.float32)
        tensors[name] = (F32, (HIDDEN,), values[name].tobytes())
    write_gguf(path, META, tensors)
    return values
