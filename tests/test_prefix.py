"""The prefix index: what is found, what is dropped, and that a look-up reads the prompt once."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from parallel.engine import prefix
from parallel.engine.prefix import BLOCK, PrefixIndex


def test_the_longest_shared_start_is_found() -> None:
    index = PrefixIndex()
    index.add(1, list(range(40)), 10)
    index.add(2, list(range(60)), 10)
    assert index.match([*range(50), 99]) == (2, 50)


def test_a_match_leaves_one_token_to_feed() -> None:
    index = PrefixIndex()
    index.add(1, list(range(40)), 10)
    assert index.match(list(range(40))) == (1, 39)


def test_less_than_a_block_is_no_match() -> None:
    index = PrefixIndex()
    index.add(1, list(range(40)), 10)
    assert index.match([*range(BLOCK - 1), 99, 98]) == (-1, 0)


def test_whole_entries_match_only_prompts_that_start_with_all_of_them() -> None:
    index = PrefixIndex(whole=True)
    index.add(1, list(range(40)), 10)
    index.add(2, list(range(20)), 10)
    assert index.match([*range(50)]) == (1, 40)
    assert index.match([*range(30), 99]) == (2, 20)
    assert index.match([*range(18), 99]) == (-1, 0)


def test_the_least_recently_used_go_first() -> None:
    index = PrefixIndex()
    for id in (1, 2, 3):
        index.add(id, [id] * 20, 10)
    index.match([1] * 20)
    assert index.evict(20) == [2]
    assert index.bytes == 20
    assert index.match([2] * 20) == (-1, 0)


def test_a_removed_entry_is_gone_and_removing_it_again_does_nothing() -> None:
    index = PrefixIndex()
    index.add(1, list(range(40)), 10)
    index.remove(1)
    index.remove(1)
    assert (len(index), index.bytes, index.match(list(range(40)))) == (0, 0, (-1, 0))


def test_a_hash_collision_costs_time_and_not_correctness(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(prefix, "_chain", lambda tokens: tuple(range(len(tokens) // BLOCK)))
    index = PrefixIndex()
    index.add(1, [1] * 40, 10)
    assert index.match([2] * 40) == (-1, 0)


def test_a_lookup_hashes_each_token_of_a_long_prompt_once(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    index = PrefixIndex()
    for id in range(50):
        index.add(id, [*range(1000), id, *range(100_000)], 10)
    seen = []
    chain = prefix._chain
    compared = []
    common = prefix._common
    monkeypatch.setattr(prefix, "_chain", lambda tokens: seen.append(len(tokens)) or chain(tokens))
    monkeypatch.setattr(prefix, "_common", lambda a, b: compared.append(1) or common(a, b))
    assert index.match([*range(1000), 77, *range(130_000)])[1] == 1000
    assert seen == [131_001]
    assert len(compared) <= 16


@given(st.lists(st.integers(0, 2), max_size=80), st.lists(st.integers(0, 2), max_size=80))
def test_common_is_the_number_of_equal_leading_tokens(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert prefix._common(array("q", a), array("q", b)) == expected
