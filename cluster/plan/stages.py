"""Cut a model's layers into pipeline stages for Macs that differ in memory and speed. Pure; knows no Macs and no model.

The slowest stage decides how fast a full pipeline runs, so it is made as fast as memory allows, exactly. Among splits
nearly as fast, the one that leaves most room for KV wins, and of those the most even one. `placement.py` calls it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

SLOWER = 1.1  # a stage may be a tenth slower than it could be, where that leaves more room for KV
MOST_ROOM = 64.0  # times the KV asked for; more room than that is as good
_STEPS = 24  # halvings when searching for the most room


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer costs its stage: `fixed` and `kv` in bytes of memory, `read` in bytes per token.

    The first layer brings the embedding with it, the last one the head.
    """

    fixed: int
    kv: int
    read: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage may live: `room` in bytes, `speed` in bytes per second."""

    room: int
    speed: float


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, stop) on place `place`, an index into the places given."""

    place: int
    start: int
    stop: int


class _Costs:
    """Sums over runs of layers, in constant time."""

    def __init__(self, layers: Sequence[Layer], scale: float) -> None:
        self.count = len(layers)
        self.memory = [0.0, *accumulate(layer.fixed + scale * layer.kv for layer in layers)]
        self.read = [0, *accumulate(layer.read for layer in layers)]

    def furthest(self, start: int, place: Place, seconds: float) -> int:
        """The largest `stop` for which layers [start, stop) fit into `place` and take at most `seconds`."""
        by_memory = bisect_right(self.memory, self.memory[start] + place.room + 0.5) - 1
        by_time = bisect_right(self.read, self.read[start] + seconds * place.speed * (1 + 1e-12)) - 1
        return max(start, min(by_memory, by_time))

    def all_furthest(self, place: Place, seconds: float) -> list[int]:
        """`furthest` from every layer."""
        return [self.furthest(start, place, seconds) for start in range(self.count)]


def fits(layers: Sequence[Layer], places: Sequence[Place], orders: Sequence[Sequence[int]] = ()) -> bool:
    """Whether `split` would find one, without looking for the best."""
    return len(places) <= len(layers) and _chain(_Costs(layers, 1.0), places, orders, float("inf")) is not None


def split(layers: Sequence[Layer], places: Sequence[Place], orders: Sequence[Sequence[int]] = ()) -> list[Stage] | None:
    """Stages in the order of the layers, one on every place, or None when memory does not allow any.

    `orders` are the sequences of places that the links allow, first layers first; empty: any order.
    """
    if not places or len(places) > len(layers):
        return None

    def chain(seconds: float, scale: float) -> list[int] | None:
        return _chain(_Costs(layers, scale), places, orders, seconds)

    fastest = _least_seconds(layers, places, lambda seconds: chain(seconds, 1.0) is not None)
    if fastest is None:
        return None
    seconds = fastest * SLOWER
    scale = _most_room(lambda scale: chain(seconds, scale) is not None)
    costs = _Costs(layers, scale)
    given = orders or [range(len(places))]  # the given order is easier to read than another one that is as good
    able = [order for order in given if _reaches(costs, places, order, seconds)]
    if not able:
        able = [order for order in [chain(seconds, scale)] if order is not None]
    return min(
        (most_even(costs, places, order, seconds) for order in able), key=lambda cut: _roughness(costs, places, cut)
    )


def least_over(layers: Sequence[Layer], places: Sequence[Place]) -> list[Stage]:
    """Where memory allows no split: the one in the given order of places whose fullest place is least over its room."""
    low, high = 0, sum(layer.fixed + layer.kv for layer in layers) + max(-min(place.room for place in places), 0)
    costs, order = _Costs(layers, 1.0), range(len(places))

    def wider(extra: int) -> list[Place]:
        return [Place(place.room + extra, place.speed) for place in places]

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _reaches(costs, wider(middle), order, float("inf")) else (middle + 1, high)
    stages = most_even(costs, wider(low), list(order), float("inf"))
    return stages


def _chain(costs: _Costs, places: Sequence[Place], orders: Sequence[Sequence[int]], seconds: float) -> list[int] | None:
    """An allowed order of the places in which they hold all layers, none slower than `seconds`."""
    if not orders:
        return _any_order(costs, places, seconds)
    return next((list(order) for order in orders if _reaches(costs, places, order, seconds)), None)


def _any_order(costs: _Costs, places: Sequence[Place], seconds: float) -> list[int] | None:
    """An order in which all places together hold all layers, each with one at least.

    For every set of places, the layers that it can end at are kept, as the bits of a number. Alike places are taken in
    their order, since swapping them changes nothing.
    """
    far = {place: costs.all_furthest(place, seconds) for place in set(places)}
    before = [
        sum(1 << other for other in range(number) if places[other] == place) for number, place in enumerate(places)
    ]
    everyone = (1 << len(places)) - 1
    ends = [1] + [0] * everyone
    for used in range(everyone):
        for number, place in enumerate(places):
            if ends[used] and not used >> number & 1 and used & before[number] == before[number]:
                ends[used | 1 << number] |= _onward(ends[used], far[place])
    if not ends[everyone] >> costs.count & 1:
        return None
    order, used, stop = [], everyone, costs.count
    while used:
        number, start = next(
            (number, start)
            for number, place in enumerate(places)
            if used >> number & 1
            for start in range(stop - 1, -1, -1)
            if ends[used ^ 1 << number] >> start & 1 and far[place][start] >= stop
        )
        order.append(number)
        used, stop = used ^ 1 << number, start
    return order[::-1]


def _reaches(costs: _Costs, places: Sequence[Place], order: Sequence[int], seconds: float) -> bool:
    """Whether places in this order, each with at least one layer, hold all layers."""
    ends = 1
    for place in order:
        ends = _onward(ends, costs.all_furthest(places[place], seconds))
    return bool(ends >> costs.count & 1)


def _onward(starts: int, far: Sequence[int]) -> int:
    """Where a stage can end that begins at any of `starts` (bits) and goes no further than `far` from each."""
    stops = 0
    for start, furthest in enumerate(far):
        if starts >> start & 1 and furthest > start:
            stops |= ((1 << (furthest - start)) - 1) << (start + 1)
    return stops


def _least_seconds(layers: Sequence[Layer], places: Sequence[Place], possible: Callable[[float], bool]) -> float | None:
    """The shortest time of the slowest stage, by search over every time that a run of layers takes on any place."""
    read = _Costs(layers, 0.0).read
    runs = {stop - start for start in read for stop in read if stop > start} | {0}
    times = sorted({run / speed for run in runs for speed in {place.speed for place in places}})
    if not possible(times[-1]):
        return None
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(times[middle]) else (middle + 1, high)
    return times[low]


def _most_room(possible: Callable[[float], bool]) -> float:
    """The largest multiple of the KV asked for, from 1 on, that fits."""
    if possible(MOST_ROOM):
        return MOST_ROOM
    low, high = 1.0, MOST_ROOM
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def _roughness(costs: _Costs, places: Sequence[Place], cut: Sequence[Stage]) -> float:
    """The least when all stages take the same time: the sum of read squared over speed."""
    return sum((costs.read[stage.stop] - costs.read[stage.start]) ** 2 / places[stage.place].speed for stage in cut)


def most_even(costs: _Costs, places: Sequence[Place], order: Sequence[int], seconds: float) -> list[Stage]:
    """Of all cuts in this order within memory and time, the one with the least `_roughness`."""
    never = float("inf")
    best = [0.0] + [never] * costs.count  # layers placed -> cost
    cuts: list[list[int]] = []
    for place in (places[number] for number in order):
        new, cut = [never] * (costs.count + 1), [0] * (costs.count + 1)
        for start, cost in enumerate(best):
            if cost == never:
                continue
            for stop in range(start + 1, costs.furthest(start, place, seconds) + 1):
                total = cost + (costs.read[stop] - costs.read[start]) ** 2 / place.speed
                if total < new[stop]:
                    new[stop], cut[stop] = total, start
        best = new
        cuts.append(cut)
    assert best[-1] < never, "the caller made sure that it fits"
    stages, stop = [], costs.count
    for number, cut in zip(reversed(order), reversed(cuts), strict=True):
        stages.append(Stage(number, cut[stop], stop))
        stop = cut[stop]
    return stages[::-1]
