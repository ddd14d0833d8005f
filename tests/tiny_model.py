"""Tiny random models in MLX format for tests: real config, real tokenizer, float32 weights, no download.

Their logits are arbitrary but fixed by the seed, so two runs over the same folder must agree. Imports mlx.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("e", "r"),
    ("a", "n"),
    ("an", "d"),
    ("o", "u"),
    ("Ġ", "the"),
    ("h", "i"),
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def build_tiny_model(folder: Path, *, config: dict[str, object] | None = None, seed: int = 0) -> Path:
    """Write a random model of `config` (default LLAMA; its vocab_size is filled in) to `folder` and return it.

    Weights are drawn wide (normal, deviation 0.3) so that greedy choices have a clear margin.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **(config or LLAMA),
    }
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters()))))
    model.update(tree_map(lambda a: _draw(a, next(keys)), model.parameters()))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": [2, 0], "temperature": 0.7, "top_p": 0.95})
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.get("max_position_embeddings", 4096),
        },
    )
    return folder


def _draw(like: mx.array, key: mx.array) -> mx.array:
    noise = mx.random.normal(like.shape, key=key) * 0.3
    return noise if like.ndim > 1 else 1.0 + noise * 0.1


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIALS, *alphabet, *(a + b for a, b in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
