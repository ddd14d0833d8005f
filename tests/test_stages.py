from __future__ import annotations

from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.plan.stages import SLOWER, Layer, Place, least_over, split

LAYERS = st.lists(
    st.builds(Layer, fixed=st.integers(1, 40), kv=st.integers(0, 10), read=st.integers(1, 30)), min_size=2, max_size=7
)
PLACES = st.lists(
    st.builds(Place, room=st.integers(0, 120), speed=st.sampled_from([1.0, 2.0, 5.0])), min_size=2, max_size=4
)


def uniform(count: int, *, fixed: int = 10, kv: int = 1) -> list[Layer]:
    return [Layer(fixed, kv, fixed)] * count


def counts(stages) -> list[int]:
    return [stage.stop - stage.start for stage in stages]


def every_split(layers, places):
    """All orders of the places and all cuts, as (place, start, stop) lists."""
    for order in permutations(range(len(places))):
        for cuts in combinations(range(1, len(layers)), len(places) - 1):
            bounds = [0, *cuts, len(layers)]
            yield [(place, bounds[i], bounds[i + 1]) for i, place in enumerate(order)]


def needs(layers, start, stop) -> int:
    return sum(layer.fixed + layer.kv for layer in layers[start:stop])


def slowest(layers, places, cut) -> float:
    return max(sum(layer.read for layer in layers[start:stop]) / places[place].speed for place, start, stop in cut)


@settings(max_examples=300, deadline=None)
@given(LAYERS, PLACES)
def test_a_split_exists_exactly_when_brute_force_finds_one_and_is_nearly_as_fast(layers, places):
    able = [
        cut
        for cut in every_split(layers, places)
        if all(needs(layers, start, stop) <= places[place].room for place, start, stop in cut)
    ]
    found = split(layers, places)
    assert (found is None) == (not able)
    if found is not None:
        best = min(slowest(layers, places, cut) for cut in able)
        mine = [(stage.place, stage.start, stage.stop) for stage in found]
        assert slowest(layers, places, mine) <= best * SLOWER * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(LAYERS, PLACES)
def test_every_layer_is_on_one_stage_in_order_every_place_is_used_once_and_nothing_is_over_its_room(layers, places):
    found = split(layers, places)
    if found is None:
        return
    assert [stage.start for stage in found] == [0, *(stage.stop for stage in found[:-1])]
    assert found[-1].stop == len(layers)
    assert sorted(stage.place for stage in found) == list(range(len(places)))
    assert all(stage.stop > stage.start for stage in found)
    assert all(needs(layers, stage.start, stage.stop) <= places[stage.place].room for stage in found)


@settings(max_examples=100, deadline=None)
@given(LAYERS, PLACES, st.data())
def test_a_given_order_is_kept(layers, places, data):
    order = data.draw(st.permutations(range(len(places))))
    found = split(layers, places, [order])
    if found is not None:
        assert [stage.place for stage in found] == list(order)


@settings(max_examples=100, deadline=None)
@given(LAYERS, st.data())
def test_the_split_of_what_does_not_fit_is_over_by_as_little_as_possible(layers, data):
    places = data.draw(st.lists(st.builds(Place, st.integers(-20, 20), st.just(1.0)), min_size=1, max_size=len(layers)))
    found = least_over(layers, places)
    worst = max(needs(layers, stage.start, stage.stop) - places[stage.place].room for stage in found)
    in_order = [
        cut for cut in every_split(layers, places) if [place for place, _, _ in cut] == list(range(len(places)))
    ]
    assert max(worst, 0) == max(
        0, min(max(needs(layers, a, b) - places[place].room for place, a, b in cut) for cut in in_order)
    )


def test_alike_places_share_evenly():
    assert sorted(counts(split(uniform(61), [Place(10**4, 1.0)] * 4))) == [15, 15, 15, 16]


def test_the_place_with_more_room_takes_more_layers_where_that_costs_little_speed():
    found = split(uniform(60, kv=5), [Place(2000, 1.0), Place(400, 1.0)] * 2)
    by_place = {stage.place: stage.stop - stage.start for stage in found}
    assert by_place[0] == by_place[2] > by_place[1] == by_place[3]
    assert max(by_place.values()) <= 15 * SLOWER


def test_a_place_with_twice_the_bandwidth_takes_about_twice_the_layers():
    found = split(uniform(60, kv=0), [Place(10**4, 2.0), Place(10**4, 1.0)])
    by_place = {stage.place: stage.stop - stage.start for stage in found}
    assert by_place == {0: 40, 1: 20}


def test_a_heavy_head_makes_the_last_stage_shorter():
    layers = [*uniform(39), Layer(60, 1, 60)]
    assert counts(split(layers, [Place(10**4, 1.0)] * 2))[1] < 20


def test_memory_that_binds_moves_layers_to_where_there_is_room():
    found = split(uniform(10, kv=0), [Place(30, 9.0), Place(70, 1.0)])
    assert {stage.place: stage.stop - stage.start for stage in found} == {0: 3, 1: 7}


def test_more_places_than_layers_are_refused():
    assert split(uniform(2), [Place(10**4, 1.0)] * 3) is None


def test_eight_different_places_and_130_layers_are_split_without_trying_every_order():
    places = [Place(400 + 10 * i, 1.0 + 0.1 * i) for i in range(8)]
    found = split(uniform(130), places)
    assert sum(counts(found)) == 130
