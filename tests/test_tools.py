"""Tool formats and their parsers."""

from __future__ import annotations

import json

import pytest

from cluster.serve.tools import calls_in, find_format, load_format, mlx_lm_module


def tool(name: str, **properties: str) -> dict:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


def parse(format: str, text: str, *tools: dict) -> list[tuple[str, dict]] | None:
    calls = calls_in(load_format(format), text, tools)
    return None if calls is None else [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<minimax:tool_call>", "minimax_m2"),
        ("<|tool_call> <tool_call|>", "gemma4"),
        ("<start_function_call>", "function_gemma"),
        ("<longcat_tool_call>", "longcat"),
        ("<tool_call> <arg_key> tool_call.name", "glm47"),
        ("<|tool_list_start|>", "pythonic"),
        ("<tool_call>\\n<function=x> tool_call.name", "qwen3_coder"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ('<function name=" <param name="', "minicpm5"),
        ("[TOOL_CALLS]", "mistral"),
        ("<atem:function_calls>", "muse_spark"),
        ("<tool_call> tool_call.name", "json_tools"),
    ],
)
def test_the_template_tells_the_format(template, name):
    assert find_format(template, {}).name == name


def test_the_vocabulary_tells_it_when_the_template_does_not():
    assert find_format("", {"<|tool_call_start|>": 1, "<|tool_call_end|>": 2}).name == "pythonic"
    assert find_format("no tools here", {"a": 1}) is None


def test_the_tokenizers_own_word_goes_first_and_its_relative_imports_work():
    found = find_format("<tool_call> tool_call.name", {}, "laguna")
    assert (found.name, found.start) == ("laguna", "<tool_call>")


def test_a_format_that_this_mlx_lm_lacks_is_no_format():
    assert find_format("", {}, "from_the_future") is None
    assert mlx_lm_module("tool_parsers", "../server") is None


def test_a_glm_call_becomes_a_structured_call():
    text = "glob\n<arg_key>pattern</arg_key><arg_value>**/x.md</arg_value>"
    assert parse("glm47", text, tool("glob", pattern="string")) == [("glob", {"pattern": "**/x.md"})]


def test_a_qwen_coder_object_in_python_quotes_is_an_object():
    text = "<function=save>\n<parameter=data>\n{'key': 'value'}\n</parameter>\n</function>"
    assert parse("qwen3_coder", text, tool("save", data="object")) == [("save", {"data": {"key": "value"}})]


def test_a_call_without_arguments_has_an_empty_object():
    assert parse("json_tools", '{"name": "now"}', tool("now")) == [("now", {})]
    assert parse("json_tools", '{"name": "now", "arguments": ""}', tool("now")) == [("now", {})]


def test_several_calls_in_one_block_stay_several():
    text = '[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": "{}"}]'
    assert parse("mistral", text, tool("a"), tool("b")) == [("a", {"x": 1}), ("b", {})]


@pytest.mark.parametrize(
    "text", ["not json", "{}", "[]", '{"name": 5}', '{"name": "a", "arguments": [1]}', '"text"', "null"]
)
def test_what_is_no_call_is_none(text):
    assert parse("json_tools", text, tool("a")) is None


def test_prose_that_a_lenient_parser_calls_unknown_is_none():
    assert parse("glm47", "I am not sure what to call", tool("glob")) is None


def test_a_parser_that_breaks_on_the_text_is_none():
    assert parse("longcat", "no such markup", tool("a")) is None


def test_ids_are_the_models_own_where_it_gives_them_and_unique_else():
    kimi = load_format("kimi_k2")
    text = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 2}<|tool_call_end|>'
    assert calls_in(kimi, text, [tool("add")])[0].id == "functions.add:0"
    first, second = (calls_in(load_format("json_tools"), '{"name": "a"}', [tool("a")])[0].id for _ in range(2))
    assert first != second
