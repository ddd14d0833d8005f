"""Reasoning, content and tool blocks told apart by their markers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.serve.markers import Markers, Splitter, find_markers
from cluster.serve.tools import load_format

THINK = Markers("<think>", "</think>")
TOOLS = load_format("json_tools")


def split(text: str, *, sizes: list[int] | None = None, markers: Markers = THINK, tools=TOOLS, reasoning=False):
    """All pieces, neighbours of one kind joined."""
    splitter, pieces, at = Splitter(markers, tools, reasoning=reasoning), [], 0
    for size in [*(sizes or []), *([1] * len(text))]:
        if piece := text[at : at + size]:
            pieces += splitter.push(piece)
        at += size
    pieces += splitter.close()
    joined: list[tuple[str, str]] = []
    for kind, piece in pieces:
        if joined and joined[-1][0] == kind and kind in ("content", "reasoning"):
            joined[-1] = (kind, joined[-1][1] + piece)
        else:
            joined.append((kind, piece))
    return joined


def test_reasoning_is_split_from_content_and_the_space_after_a_marker_is_layout():
    assert split("<think>\nhm\n</think>\n\nParis") == [("reasoning", "hm\n"), ("content", "Paris")]


def test_reasoning_that_the_template_opened_needs_no_start_marker():
    assert split("hm</think>Paris", reasoning=True) == [("reasoning", "hm"), ("content", "Paris")]


def test_a_tool_block_after_reasoning_leaves_no_content():
    assert split("<think>a</think>\n\n<tool_call>{}</tool_call>") == [("reasoning", "a"), ("tool", "{}")]


def test_two_blocks_are_two_pieces_and_the_line_break_between_them_is_nothing():
    assert split("<tool_call>1</tool_call>\n<tool_call>2</tool_call>") == [("tool", "1"), ("tool", "2")]


def test_white_space_before_a_first_tool_block_is_nothing_but_before_content_it_stays():
    assert split("\n<tool_call>1</tool_call>") == [("tool", "1")]
    assert split("\n  text") == [("content", "\n  text")]
    assert split(" \n") == [("content", " \n")]


def test_a_block_that_the_answer_ends_in_is_told_as_open():
    assert split("go <tool_call>{1") == [("content", "go "), ("open tool", "{1")]


def test_the_start_of_a_marker_at_the_very_end_is_delivered():
    assert split("a < b and c <") == [("content", "a < b and c <")]
    assert split("x</thin", reasoning=True) == [("reasoning", "x</thin")]


def test_a_marker_that_content_mentions_stays_content():
    text = "The tag <think> opens; </think> closes."
    assert split(text) == [("content", text)]
    assert split(text, sizes=[100]) == [("content", text)]


def test_without_tools_their_markers_are_content():
    assert split("<tool_call>1</tool_call>", tools=None) == [("content", "<tool_call>1</tool_call>")]


def test_text_that_cannot_be_a_marker_passes_at_once():
    splitter = Splitter(THINK, TOOLS, reasoning=False)
    assert splitter.push("Hello") == [("content", "Hello")]
    assert splitter.push(" <") == [("content", " ")]
    assert splitter.push("b") == [("content", "<b")]


def test_markers_that_are_never_text_disappear():
    harmony = find_markers({"<|channel|>": 1, "<|message|>": 2})
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Paris"
    assert split(text, markers=harmony, tools=None) == [("reasoning", "hm"), ("content", "Paris")]


@pytest.mark.parametrize(
    "tokens", [["<think>", "</think>"], ["<|channel>", "<channel|>"], ["<|think:start|>", "<|think:end|>"]]
)
def test_thinking_markers_are_told_by_the_vocabulary(tokens):
    markers = find_markers(dict.fromkeys(tokens, 1))
    assert markers.think_start.startswith(tokens[0])
    assert markers.think_end == tokens[1]
    assert find_markers({"a": 1}) == Markers()


PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "a", "<", " ", "\n", "b<t"]), max_size=12
)


@given(PARTS, st.lists(st.integers(1, 9), max_size=20))
def test_the_pieces_do_not_depend_on_how_the_text_arrives(parts, sizes):
    text = "".join(parts)
    assert split(text, sizes=sizes) == split(text)
