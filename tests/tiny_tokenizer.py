"""A byte-level BPE tokenizer of a few hundred tokens, as a model folder without weights. Built here, no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|other|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("e", "r"),
    ("a", "n"),
    ("l", "l"),
    ("H", "e"),
    ("He", "ll"),
    ("Hell", "o"),
    ("Ċ", "Ċ"),
    (".", "ĊĊ"),
]

# The shape of Qwen's templates: system anywhere, tools, tool calls, an optional opened reasoning block.
TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer <tool_call>{"name": tool_call.name, "arguments": {}}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}
<tool_call>{{ tool_call.function.name }}:
{%- for key, value in tool_call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if reasoning_effort %}<|im_start|>effort {{ reasoning_effort }}<|im_end|>
{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


def build_tokenizer_folder(
    folder: Path,
    *,
    template: str | None = TEMPLATE,
    generation: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    added: list[str] = PLAIN,
) -> Path:
    """Write tokenizer.json and its companions into `folder`. `extra` goes into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(left + right for left, right in MERGES)]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **(extra or {})}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama", "vocab_size": len(words) + 8}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
