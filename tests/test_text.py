"""Tokens to text and the search for strings in growing text."""

from __future__ import annotations

import pytest
from api_server import *  # noqa: F403
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cluster.serve.chat import ChatModel
from cluster.serve.text import Needles, SlowDecoder, StopScanner, StreamDecoder, Vocabulary


def ids_of(chat: ChatModel, text: str) -> list[int]:
    return chat._encode(text, special=False)


def sentencepiece_like() -> Vocabulary:
    words = ["<unk>", "<s>", "</s>", "\u2581Paris", "\u2581is", "<0xC4>", "<0x8F>", "s"]
    backend = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>"))


def test_a_character_in_byte_tokens_comes_once_and_whole(chat):
    decoder = chat.vocabulary.decoder()
    first, second = ids_of(chat, "ď")
    assert (decoder.push(first), decoder.pending) == ("", True)
    assert (decoder.push(second), decoder.pending) == ("ď", False)


@given(st.text(max_size=60))
def test_any_text_decodes_token_by_token_to_itself(text):
    from cluster.serve.text import BytesDecoder

    vocabulary = VOCABULARY
    decoder = vocabulary.decoder(vocabulary.special)
    assert isinstance(decoder, BytesDecoder)
    encodable = text.encode("utf-8", "ignore").decode()
    ids = vocabulary.backend.encode(encodable, add_special_tokens=False).ids
    assert "".join(decoder.push(id) for id in ids) == encodable


def test_control_tokens_are_no_text_unless_they_are_asked_for(chat):
    end = ids_of(chat, "<|other|>")[0]
    assert chat.vocabulary.decoder().push(end) == ""
    keep = chat.vocabulary.ids_within(["a<|other|>b"])
    assert chat.vocabulary.decoder(keep).push(end) == "<|other|>"


def test_sentencepiece_space_is_dropped_from_a_chat_answer_and_kept_in_a_continuation():
    vocabulary = sentencepiece_like()
    chat, text = vocabulary.decoder(), vocabulary.decoder(strip=False)
    assert [chat.push(3), chat.push(4)] == ["Paris", " is"]
    assert [text.push(3), text.push(4)] == [" Paris", " is"]


def test_byte_fallback_tokens_join_into_a_character():
    decoder = sentencepiece_like().decoder()
    assert [decoder.push(5), decoder.push(6)] == ["", "ď"]


def test_a_token_that_is_part_of_a_character_is_named_by_its_bytes():
    vocabulary = sentencepiece_like()
    assert vocabulary.token_bytes(5) == b"\xc4"
    assert vocabulary.token_text(5) == "bytes:\\xc4"
    assert vocabulary.token_text(3) == " Paris"
    assert vocabulary.token_bytes(99) == b""


def test_the_librarys_stream_and_the_slow_window_agree_with_the_bytes(chat, tokenizer_folder):
    text = "Hello the ď \U0001f600 end"
    ids = ids_of(chat, text)
    stream = StreamDecoder(chat.vocabulary.backend, frozenset())
    slow = SlowDecoder(PreTrainedTokenizerFast.from_pretrained(tokenizer_folder), frozenset())
    assert "".join(map(stream.push, ids)) == text
    pieces = [slow.push(id) for id in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_earliest_needle_wins_and_the_longest_of_those_that_begin_together():
    needles = Needles(["END", "E", "the"])
    assert needles.find("see the END") == (4, "the")
    assert needles.find("an END") == (3, "END")
    assert needles.find("none") is None


def test_only_what_could_become_a_stop_string_is_held_back():
    scanner = StopScanner(Needles(["\n\nUser:", "STOP"]))
    assert scanner.push("Hello") == ("Hello", False)
    assert scanner.push(" S") == (" ", False)
    assert scanner.push("T") == ("", False)
    assert scanner.push("ay\n") == ("STay", False)
    assert scanner.push("\nUse") == ("", False)
    assert scanner.flush() == "\n\nUse"


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=40),
)
def test_a_stop_string_is_found_at_the_same_place_however_the_text_is_cut(text, stops, cuts):
    found = Needles(stops).find(text)
    expected = text if found is None else text[: found[0]]
    scanner, out, hit, at = StopScanner(Needles(stops)), "", False, 0
    for size in [*cuts, *([1] * len(text))]:
        piece, at = text[at : at + size], at + size
        if piece and not hit:
            passed, hit = scanner.push(piece)
            out += passed
    out += "" if hit else scanner.flush()
    # A stop string that begins earlier but ends later than another loses only when the other is complete first.
    assert hit == (found is not None)
    assert text.startswith(out)
    assert len(out) >= len(expected)
    assert not any(stop in out for stop in stops)


@pytest.fixture(scope="module", autouse=True)
def _vocabulary(chat):
    global VOCABULARY
    VOCABULARY = chat.vocabulary
