"""The group's start and the check of its links, with a group that is played; real ones are in tests/ring."""

from __future__ import annotations

import signal
from typing import Any

import mlx.core as mx
import pytest

from parallel import group
from parallel.group import LinkBroken, Links, check_links, clean_environment, connect

EVERYTHING = {
    "MLX_RANK": "0",
    "MLX_WORLD_SIZE": "2",
    "MLX_HOSTFILE": "f",
    "MLX_RING_VERBOSE": "1",
    "MLX_IBV_DEVICES": "f",
    "MLX_IBV_COORDINATOR": "a:1",
    "MLX_JACCL_COORDINATOR": "a:1",
    "MLX_JACCL_RING": "0",
    "JACCL_RANK": "5",
    "JACCL_COORDINATOR": "b:1",
    "MLX_METAL_FAST_SYNCH": "1",
    "HOME": "/home/x",
}


@pytest.mark.parametrize(
    ("backend", "kept"),
    [
        ("ring", {"MLX_HOSTFILE", "MLX_RING_VERBOSE"}),
        ("jaccl", {"MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"}),
        ("jaccl-ring", {"MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING"}),
        ("nccl", {"MLX_WORLD_SIZE"}),
    ],
)
def test_only_the_variables_of_the_backend_stay_and_what_is_no_choice_of_one(backend: str, kept: set[str]) -> None:
    environment = dict(EVERYTHING)
    clean_environment(backend, environment)
    assert set(environment) == kept | {"MLX_RANK", "MLX_METAL_FAST_SYNCH", "HOME"}


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self._of = rank, size

    def rank(self) -> int:
        return self._of[0]

    def size(self) -> int:
        return self._of[1]


def test_joining_is_strict_names_the_backend_and_its_alarm_is_off_after(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def init(**options: Any) -> Group:
        seen.update(options, alarm_s=signal.getitimer(signal.ITIMER_REAL)[0])
        return Group(1, 3)

    monkeypatch.setattr(mx.distributed, "init", init)
    assert connect("jaccl-ring", 1, 3).size() == 3
    assert (seen["strict"], seen["backend"]) == (True, "jaccl")
    assert 0 < seen["alarm_s"] <= group.CONNECT_S
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("found", [(0, 1), (1, 2), (0, 3)])
def test_another_group_than_the_plan_says_is_refused(monkeypatch: pytest.MonkeyPatch, found: tuple[int, int]) -> None:
    monkeypatch.setattr(mx.distributed, "init", lambda **options: Group(*found))
    with pytest.raises(LinkBroken, match=f"this is rank 1 of 3, but ring made it {found[0]} of {found[1]}"):
        connect("ring", 1, 3)


class Wire:
    """MLX's communication as rank `rank` of `size` sees it; `total` is what sums give, `spoil` changes what arrives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, total: int, spoil: Any = lambda sent: sent) -> None:
        self.rank, self.spoil = rank, spoil
        self.pairs: list[tuple[int, int]] = []
        monkeypatch.setattr(mx.distributed, "all_sum", lambda array, group: mx.array(total))
        monkeypatch.setattr(mx.distributed, "send", self.send)
        monkeypatch.setattr(mx.distributed, "recv", self.recv)
        monkeypatch.setattr(mx.distributed, "all_gather", self.all_gather)

    def send(self, array: mx.array, target: int, group: Group) -> mx.array:
        self.pairs.append((self.rank, target))
        assert array.nbytes >= 1 << 20
        return array

    def recv(self, shape: tuple[int, ...], dtype: mx.Dtype, source: int, group: Group) -> mx.array:
        self.pairs.append((source, self.rank))
        return self.spoil(mx.arange(shape[0], dtype=dtype) * (2 * source + 3) + self.rank)

    def all_gather(self, array: mx.array, group: Group) -> mx.array:
        each = [mx.arange(array.size, dtype=array.dtype) * (2 * source + 3) + source for source in range(group.size())]
        assert mx.array_equal(each[self.rank], array) and array.nbytes >= 1 << 20
        return self.spoil(mx.concatenate(each))


@pytest.mark.parametrize(
    ("backend", "size", "pairs"),
    [
        ("ring", 2, [(0, 1), (1, 0)]),
        ("ring", 4, [(0, 1), (1, 0), (1, 2), (2, 1)]),
        ("jaccl", 4, [(0, 1), (1, 0), (1, 2), (2, 1), (1, 3), (3, 1)]),
    ],
)
def test_a_pattern_goes_both_ways_over_every_link_that_the_backend_has(
    monkeypatch: pytest.MonkeyPatch, backend: str, size: int, pairs: list[tuple[int, int]]
) -> None:
    wire = Wire(monkeypatch, 1, (1 << size) - 1)
    check_links(Group(1, size), backend)
    assert wire.pairs == pairs


def test_both_ends_of_every_pair_issue_the_same_operations_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for rank in range(4):
        wire = Wire(monkeypatch, rank, 15)
        check_links(Group(rank, 4), "jaccl")
        ends.append(wire.pairs)
    for a in range(4):
        for b in range(a):
            assert [p for p in ends[a] if set(p) == {a, b}] == [p for p in ends[b] if set(p) == {a, b}] != []


def test_a_rank_that_took_no_part_in_the_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    Wire(monkeypatch, 1, 0b011)
    with pytest.raises(LinkBroken, match="gave 11 in binary"):
        check_links(Group(1, 3), "ring")


@pytest.mark.parametrize("spoil", [lambda sent: sent + 1, lambda sent: mx.concatenate([sent[:4096], sent[:-4096]])])
def test_data_that_arrives_changed_or_shifted_names_both_ranks(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    Wire(monkeypatch, 1, 0b111, spoil)
    with pytest.raises(LinkBroken, match="what rank 0 sent did not arrive at rank 1"):
        check_links(Group(1, 3), "ring")


def test_over_nccl_which_cannot_send_every_pattern_goes_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, 1, 0b11)
    check_links(Group(1, 2), "nccl")
    assert wire.pairs == []
    Wire(monkeypatch, 1, 0b11, lambda sent: mx.concatenate([sent[: sent.size // 2]] * 2))
    with pytest.raises(LinkBroken, match="what rank 1 sent did not arrive at rank 1"):
        check_links(Group(1, 2), "nccl")


def test_without_other_ranks_nothing_is_sent_and_the_choice_is_ones_own() -> None:
    links, tokens = Links(), mx.array([4, 5])
    assert links.first and links.last and links.samples and links.lookahead
    assert links.share(tokens, mx.zeros((2, 9))) is tokens
    links.arrive(mx.ones(3))
    assert links.waited_s >= 0
