"""One sample's tokens to text, calls and counts."""

from __future__ import annotations

import pytest
from api_server import *  # noqa: F403
from hypothesis import given
from hypothesis import strategies as st

from cluster.serve.answer import Answer, Delta, ToolUse
from cluster.serve.text import Needles
from parallel import wire

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


@pytest.fixture(scope="module")
def make(chat):
    """`make(stops, tools=..., parallel=..., ...)` -> an Answer of this model."""

    def make(*stops: str, tools: bool = False, parallel: bool = True, **settings) -> Answer:
        use = ToolUse(chat.tool_format, [TOOL], parallel) if tools else None
        keep = chat.vocabulary.ids_within(stops)
        return Answer(chat.vocabulary.decoder(keep), Needles(stops), markers=chat.markers, tool_use=use, **settings)

    return make


def feed(answer: Answer, ids: list[int], finish: str = "stop", end_id: int = 0) -> list[Delta]:
    """What is new after each token; the answer may end early."""
    deltas = []
    tokens = [wire.Token(1, 0, id, top=[(id, -0.5)]) for id in ids]
    if finish == "stop":
        tokens.append(wire.Token(1, 0, end_id, "stop", [(end_id, -0.5)]))
    else:
        tokens[-1] = wire.Token(1, 0, ids[-1], finish, [(ids[-1], -0.5)])
    for token in tokens:
        ended = answer.feed(token)
        deltas.append(answer.take())
        if ended:
            break
    return deltas


def encode(chat, text: str) -> list[int]:
    return chat._encode(text, special=False)


def content(deltas: list[Delta]) -> str:
    return "".join(delta.content for delta in deltas)


def test_text_comes_token_by_token_and_the_end_token_is_no_part_of_it(chat, make):
    ids = encode(chat, "Hello the")
    answer = make()
    deltas = feed(answer, ids)
    assert [delta.content for delta in deltas] == ["Hello", " the", ""]
    assert (answer.finish, answer.tokens) == ("stop", 2)


def test_the_last_token_of_a_limited_answer_counts(chat, make):
    answer = make()
    assert content(feed(answer, encode(chat, "Hello the"), "length")) == "Hello the"
    assert (answer.finish, answer.tokens) == ("length", 2)


def test_a_stop_string_inside_one_token_cuts_there_and_that_token_does_not_count(chat, make):
    ids = encode(chat, "Hello.\n\nthe")
    assert len(ids) == 3  # ".\n\n" is one token
    answer = make("\n\n")
    deltas = feed(answer, ids)
    assert content(deltas) == "Hello."
    assert (answer.finish, answer.tokens, len(deltas)) == ("stop", 1, 2)


def test_a_stop_string_across_tokens_takes_its_own_tokens_out_of_the_count(chat, make):
    answer = make("END")
    assert content(feed(answer, encode(chat, "Hello END and"))) == "Hello "
    assert answer.tokens == 2


def test_what_could_have_been_a_stop_string_is_delivered_at_the_end(chat, make):
    answer = make("END")
    assert content(feed(answer, encode(chat, "Hello EN"))) == "Hello EN"
    assert answer.tokens == 4


def test_a_stop_string_may_name_a_control_token(chat, make):
    answer = make("<|other|>")
    assert content(feed(answer, encode(chat, "Hello<|other|>the"))) == "Hello"
    assert answer.tokens == 1


def test_a_character_whose_bytes_never_complete_is_dropped_but_its_token_counts(chat, make):
    answer = make()
    ids = encode(chat, "Helloď")[:-1]
    assert content(feed(answer, ids, "length")) == "Hello"
    assert answer.tokens == len(ids)


def test_a_half_marker_at_the_end_is_delivered(chat, make):
    answer = make(tools=True)
    assert content(feed(answer, encode(chat, "a < b and c <"))) == "a < b and c <"


def test_a_tool_call_comes_whole_and_ends_the_turn_as_such(chat, make):
    answer = make(tools=True)
    deltas = feed(answer, encode(chat, f"<think>hm</think>\n\n{CALL}"))
    (call,) = [call for delta in deltas for call in delta.calls]
    assert (call.name, call.arguments) == ("add", '{"a": 2}')
    assert content(deltas) == ""
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert answer.finish == "tool_calls"
    assert answer.reasoning_tokens > 0


def test_back_to_back_calls_are_two_and_one_when_parallel_calls_are_off(chat, make):
    ids = encode(chat, f"{CALL}\n{CALL}")
    both = feed(make(tools=True), ids)
    assert [len(delta.calls) for delta in both if delta.calls] == [1, 1]
    answer = make(tools=True, parallel=False)
    one = feed(answer, ids)
    assert [len(delta.calls) for delta in one if delta.calls] == [1]
    assert len(one) == answer.tokens < len(both)
    assert answer.finish == "tool_calls"


@pytest.mark.parametrize("text", ["<tool_call>nonsense</tool_call> after", "<tool_call>never closed"])
def test_a_call_that_does_not_parse_is_content_with_its_markers(chat, make, text):
    answer = make(tools=True)
    deltas = feed(answer, encode(chat, text))
    assert content(deltas).replace(" ", "") == text.replace(" ", "")
    assert answer.finish == "stop"


def test_a_whole_call_that_the_end_of_text_closed_is_a_call_but_a_cut_one_is_content(chat, make):
    ids = encode(chat, CALL.removesuffix("</tool_call>"))
    assert sum(len(delta.calls) for delta in feed(make(tools=True), ids)) == 1
    cut = make(tools=True)
    assert content(feed(cut, ids, "length")) == CALL.removesuffix("</tool_call>")
    assert cut.finish == "length"


def test_logprobs_come_with_the_text_they_belong_to_and_only_for_tokens_that_count(chat, make):
    ids = encode(chat, "Hello.\n\nthe")
    answer = make("\n\n", logprobs=True)
    entries = [entry for delta in feed(answer, ids) for entry in delta.logprobs]
    assert [(entry.token, entry.offset) for entry in entries] == [(ids[0], 0)]
    whole = make(logprobs=True)
    entries = [entry for delta in feed(whole, ids) for entry in delta.logprobs]
    assert [(entry.token, entry.offset) for entry in entries] == [(ids[0], 0), (ids[1], 5), (ids[2], 8)]
    assert whole.tokens == 3


def test_a_stop_string_right_after_half_a_character_does_not_count_the_token_of_its_first_byte(chat, make):
    answer = make("ď")
    assert content(feed(answer, encode(chat, "Helloďx"))) == "Hello"
    assert answer.tokens == 1


@given(st.text(st.sampled_from("ab. \nď<"), max_size=30), st.sampled_from([(), ("a.",), ("\n\n", "ď"), ("<", "b b")]))
def test_text_and_counts_fit_together_for_any_text(text, stops):
    """The tokens that count are exactly the longest run whose text lies within the text that is kept."""
    chat, make = SHARED
    ids = encode(chat, text)
    answer = make(*stops, logprobs=True)
    deltas = feed(answer, ids)
    said = content(deltas)
    assert text.startswith(said)
    counted = b"".join(chat.vocabulary.token_bytes(id) for id in ids[: answer.tokens])
    assert said.encode().startswith(counted)
    longer = b"".join(chat.vocabulary.token_bytes(id) for id in ids[: answer.tokens + 1])
    assert answer.tokens == len(ids) or not said.encode().startswith(longer)
    assert sum(len(delta.logprobs) for delta in deltas) == answer.tokens


@pytest.fixture(scope="module", autouse=True)
def _shared(chat, make):
    global SHARED
    SHARED = (chat, make)
