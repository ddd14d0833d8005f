"""Tool calls: which of mlx-lm's parsers a model needs, and its call text turned into OpenAI tool calls.

The parser modules are loaded from mlx-lm's folder by file: importing the `mlx_lm` package itself would import mlx,
which the coordinator never holds. Text that does not parse is never lost: `calls_in` returns None and the caller
delivers it as content.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

logger = logging.getLogger("cluster.tools")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls: between `start` and `end` (an empty `end` is the end of the answer)."""

    name: str
    start: str
    end: str
    parse: Callable[[str, list[Any] | None], Any]


class ToolCall(msgspec.Struct, frozen=True):
    """One complete call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


# The strings by which a chat template shows its tool format, in the order in which they decide: a row matches when
# one of its alternatives has all its strings in the template.
_TEMPLATE_SIGNS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("minimax_m2", (("<minimax:tool_call>",),)),
    ("gemma4", (("<|tool_call>", "<tool_call|>"),)),
    ("function_gemma", (("<start_function_call>",),)),
    ("longcat", (("<longcat_tool_call>",),)),
    ("glm47", (("<arg_key>",),)),
    ("pythonic", (("<|tool_list_start|>",), ("<|tool_call_start|>",))),
    ("qwen3_coder", (("<tool_call>\\n<function=",), ("<tool_call>\n<function=",))),
    ("kimi_k2", (("<|tool_calls_section_begin|>",),)),
    ("minicpm5", (('<function name="', '<param name="'),)),
    ("mistral", (("[TOOL_CALLS]",),)),
    ("muse_spark", (("<atem:function_calls>",),)),
    ("json_tools", (("<tool_call>", "tool_call.name"),)),
)
_VOCABULARY_SIGNS = (
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    ("pythonic", ("<|tool_call_start|>", "<|tool_call_end|>")),
)


def find_format(template: str, vocabulary: dict[str, int], named: str | None = None) -> ToolFormat | None:
    """The tool format of a model: `named` in its tokenizer_config.json, else told by its template or vocabulary."""
    name = named or next(
        (name for name, ways in _TEMPLATE_SIGNS if any(all(sign in template for sign in way) for way in ways)), None
    )
    if name is None:
        name = next((name for name, tokens in _VOCABULARY_SIGNS if all(token in vocabulary for token in tokens)), None)
    return None if name is None else load_format(name)


@functools.cache
def load_format(name: str) -> ToolFormat | None:
    """mlx-lm's parser of that name; None (and a warning) when this mlx-lm has none."""
    module = mlx_lm_module("tool_parsers", name)
    if module is None:
        logger.warning("this mlx-lm has no tool parser named %s; tool calls stay text", name)
        return None
    return ToolFormat(name, module.tool_call_start, module.tool_call_end, module.parse_tool_call)


def mlx_lm_module(folder: str, name: str) -> ModuleType | None:
    """The module in file `mlx_lm/<folder>/<name>.py`, without running `mlx_lm/__init__.py`; None without that file."""
    found = importlib.util.find_spec("mlx_lm")  # of a top-level package: finds, does not import
    places = list(found.submodule_search_locations or []) if found else []
    root = next((Path(place) / folder for place in places if (Path(place) / folder / f"{name}.py").is_file()), None)
    if root is None or not name.isidentifier():
        return None
    package = f"_mlx_lm_{folder}"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(root)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{name}")


def calls_in(format: ToolFormat, text: str, tools: Sequence[dict[str, Any]]) -> list[ToolCall] | None:
    """The calls in the text between the markers, or None when it holds none that can be told apart from prose."""
    try:
        parsed = format.parse(text, list(tools))
    except Exception as error:  # other people's parsers, on text that a model made up
        logger.info("unparsable tool call (%s): %s", format.name, type(error).__name__)
        return None
    names = {str(tool["function"]["name"]) for tool in tools}
    calls = [_call(one, names) for one in (parsed if isinstance(parsed, list) else [parsed])]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _call(parsed: Any, names: set[str]) -> ToolCall | None:
    if not isinstance(parsed, dict):
        return None
    name = parsed.get("name")
    # Lenient parsers call anything "unknown", or take the first word of prose for a name.
    if not isinstance(name, str) or (name not in names and not _looks_like_a_name(name)):
        return None
    arguments = parsed.get("arguments", parsed.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    if name not in names and "raw" in arguments:
        return None
    identity = parsed.get("id")
    return ToolCall(
        identity if isinstance(identity, str) and identity else f"call_{uuid.uuid4().hex[:24]}",
        name,
        json.dumps(arguments, ensure_ascii=False, default=str),
    )


def _looks_like_a_name(name: str) -> bool:
    plain = name.replace("_", "").replace("-", "").replace(".", "")
    return len(name) <= 64 and plain.isascii() and plain.isalnum() and name != "unknown"
