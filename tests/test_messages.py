"""Messages and tools in their plain form."""

from __future__ import annotations

import pytest

from cluster.errors import BadRequest
from cluster.serve.messages import (
    merge_leading_system,
    normal_messages,
    normal_tools,
    system_into_user,
    system_to_front,
)


def test_null_and_absent_content_are_empty_text_and_the_turn_is_kept():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    for content in ({"content": None}, {}):
        (message,) = normal_messages([{"role": "assistant", **content, "tool_calls": [call], "refusal": None}])
        assert message["content"] == ""
        assert message["tool_calls"][0]["function"]["arguments"] == {"a": 2}
        assert "refusal" not in message


@pytest.mark.parametrize(("given", "seen"), [(None, {}), ("", {}), ('{"a": 1}', {"a": 1}), ("not json", "not json")])
def test_arguments_are_objects_where_they_can_be(given, seen):
    call = {"function": {"name": "f", "arguments": given}}
    (message,) = normal_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == seen


def test_text_parts_are_joined_in_order():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normal_messages([{"role": "user", "content": parts}])[0]["content"] == "ab"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", None])
def test_other_parts_are_refused_by_name(kind):
    with pytest.raises(BadRequest) as caught:
        normal_messages([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}])
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        (5, "messages"),
        ([], "messages"),
        (["x"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": 1}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function.name"),
    ],
)
def test_what_is_no_chat_is_refused_naming_the_field(messages, param):
    with pytest.raises(BadRequest) as caught:
        normal_messages(messages)
    assert caught.value.param == param


def test_developer_is_system_and_the_leading_ones_become_one():
    messages = normal_messages(
        [
            {"role": "system", "content": "a"},
            {"role": "developer", "content": "b"},
            {"role": "user", "content": "c"},
            {"role": "developer", "content": "d"},
        ]
    )
    merged = merge_leading_system(messages)
    assert [(m["role"], m["content"]) for m in merged] == [("system", "a\n\nb"), ("user", "c"), ("system", "d")]
    front = system_to_front(messages)
    assert [(m["role"], m["content"]) for m in front] == [("system", "a\n\nb\n\nd"), ("user", "c")]
    assert [(m["role"], m["content"]) for m in system_into_user(messages)] == [("user", "a\n\nb\n\nd\n\nc")]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (5, "tools"),
        ([5], "tools[0].type"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"function": {"name": "a", "parameters": 5}}], "tools[0].function.parameters"),
    ],
)
def test_what_is_no_tool_is_refused_naming_the_field(tools, param):
    with pytest.raises(BadRequest) as caught:
        normal_tools(tools)
    assert caught.value.param == param


def test_tools_have_what_templates_read_without_asking():
    (tool,) = normal_tools([{"function": {"name": "now", "description": None}}])
    assert tool["function"] == {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
