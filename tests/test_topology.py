"""Cables, meshes, rings and islands: on the recorded Macs, on the same under other names, and on made ones."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_macs import Desk, mesh, pair, ring
from recorded_macs import CLUSTERS, MACS, recorded, renamed, truth

from cluster.cabling.topology import as_plain, cliques, components, cycle, dot, topology
from cluster.macs.hosts import Host
from cluster.macs.probe import commands, probe
from cluster.macs.ssh import RecordedShell

Cables = set[tuple[frozenset[tuple[str, int, str]], int, bool]]


def true_cables(cluster: str) -> Cables:
    return {
        (
            frozenset({(c["a"], c["a_port"], c["a_dev"]), (c["b"], c["b_port"], c["b_dev"])}),
            c["gbps"],
            c["rdma_active"],
        )
        for c in truth(cluster).get("cables", [])
    }


def found_cables(hosts: tuple[Host, ...], names: dict[str, str], devices: dict[str, dict[str, str]]) -> Cables:
    found = set()
    for cable in topology(hosts).cables:
        ends = []
        for end in (cable.a, cable.b):
            name = names[hosts[end.host].name]
            ends.append((name, end.port.number, f"rdma_{devices[name][end.port.device]}"))
        found.add((frozenset(ends), cable.speed, cable.rdma))
    return found


@pytest.mark.parametrize("cluster", CLUSTERS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_cables_are_the_true_ones_whatever_the_names_and_orders(cluster: str, seed: int) -> None:
    other = renamed(recorded(cluster), seed)
    assert found_cables(other.hosts, other.old_host, other.old_device) == true_cables(cluster)


@pytest.mark.parametrize("cluster", CLUSTERS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_mesh_ring_and_subset_are_the_expected_ones(cluster: str, seed: int) -> None:
    other = renamed(recorded(cluster), seed)
    found = topology(other.hosts)
    expect = truth(cluster).get("expect", {})
    assert found.mesh == (expect.get("backend") == "jaccl")
    if expect.get("ring"):
        order = [other.old_host[other.hosts[i].name] for i in (found.ring() or ((), 0))[0]]
        assert same_ring(order, expect["ring"])
    names = [other.old_host[other.hosts[i].name] for i in found.jaccl_subset()]
    assert names == expect.get("jaccl_subset", [])


def same_ring(one: list[str], other: list[str]) -> bool:
    links = [{frozenset((ring[k - 1], ring[k])) for k in range(len(ring))} for ring in (one, other)]
    return links[0] == links[1] and len(one) == len(other)


@pytest.mark.parametrize("folder", sorted(MACS.glob("variants/*/*")), ids=lambda path: "-".join(path.parts[-2:]))
def test_every_model_shows_its_peers_in_its_own_ports(folder) -> None:
    host = probe(RecordedShell(folder, commands()), "mac")
    found = topology([host])
    expected = 2 if folder.name == "double" else int(folder.name[-1])
    assert [stranger.port.number for stranger in found.strangers] == list(range(1, expected + 1))
    thunderbolt_5 = not folder.parent.name.startswith(("m1", "m2"))
    assert bool(found.never_rdma) is not thunderbolt_5
    devices = {device.name: device.active for device in host.rdma_devices}
    assert [devices.get(stranger.port.rdma) for stranger in found.strangers] == [thunderbolt_5 or None] * expected


# ---------------------------------------------------------------- graphs


class Counted(list[set[int]]):
    """Neighbours that count how often they are asked."""

    asked = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.asked += 1
        return super().__getitem__(index)


def full(n: int) -> list[set[int]]:
    return [set(range(n)) - {i} for i in range(n)]


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_a_ring_in_a_full_mesh_is_found_without_trying_others(n: int) -> None:
    neighbours = Counted(full(n))
    assert cycle(neighbours) is not None
    assert neighbours.asked < 5 * n**3


def test_one_node_and_a_chain_are_no_ring() -> None:
    assert cycle([set()]) is None
    assert cycle([{1}, {0, 2}, {1}]) is None


def test_two_nodes_are_a_ring_over_one_link() -> None:
    assert cycle([{1}, {0}]) == (0, 1)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(3, 7).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.sampled_from(list(combinations(range(n), 2)))))
    )
)
def test_a_ring_is_found_exactly_where_one_exists(case: tuple[int, set[tuple[int, int]]]) -> None:
    n, links = case
    neighbours: list[set[int]] = [set() for _ in range(n)]
    for i, j in links:
        neighbours[i].add(j)
        neighbours[j].add(i)

    def closes(order: tuple[int, ...]) -> bool:
        return all(order[k] in neighbours[order[k - 1]] for k in range(n))

    found = cycle(neighbours)
    assert (found is not None) == any(closes((0, *rest)) for rest in permutations(range(1, n)))
    assert found is None or (closes(found) and sorted(found) == list(range(n)))


def test_components_are_sorted_groups() -> None:
    assert components([{3}, set(), {3}, {0, 2}]) == ((0, 2, 3), (1,))


def test_cliques_are_the_largest_sets_in_which_all_are_joined() -> None:
    assert sorted(cliques([{1, 2}, {0, 2}, {0, 1, 3}, {2}], [0, 1, 2, 3])) == [(0, 1, 2), (2, 3)]


# ---------------------------------------------------------------- made Macs


def test_two_cables_between_two_macs_stand_in_the_order_of_the_first_macs_ports() -> None:
    desk = Desk("a", "b").plug("a", 3, "b", 1).plug("a", 2, "b", 3)
    found = topology(desk.hosts)
    assert [(c.a.port.number, c.b.port.number) for c in found.between(1, 0)] == [(2, 3), (3, 1)]


def test_a_slow_cable_a_dock_and_a_port_that_is_down_each_say_why_rdma_does_not_work() -> None:
    desk = Desk("a", "b").plug("a", 1, "b", 1, speed=40).plug("a", 2, "b", 2, behind="Some Dock").plug("a", 3, "b", 3)
    desk.device("b", 3, state="PORT_DOWN")
    reasons = [cable.why_not for cable in topology(desk.hosts).cables]
    assert reasons == [
        "the link runs at 40 Gb/s; RDMA needs 80",
        "Some Dock is between them; RDMA needs a direct cable",
        "rdma_en4 of b is down",
    ]


def test_a_thunderbolt_4_mac_that_claims_rdma_is_not_believed() -> None:
    desk = Desk("a").add("old", "old studio", rdma_enabled=True).plug("a", 1, "old", 1, speed=40)
    found = topology(desk.hosts)
    assert "Thunderbolt 4" in found.never_rdma[1]
    assert not found.cables[0].rdma


def test_an_unknown_chip_is_judged_by_the_speed_of_its_ports() -> None:
    desk = Desk("a").add("new", "mini", chip="Apple M9 Max").add("small", "old studio", chip="Apple M9")
    assert list(topology(desk.hosts).never_rdma) == [2]


def test_a_port_whose_mac_is_not_among_the_hosts_is_a_stranger() -> None:
    found = topology([pair()["a"]])
    assert found.cables == ()
    assert [(stranger.port.number, stranger.own) for stranger in found.strangers] == [(3, False)]


def test_a_cable_from_a_mac_to_itself_joins_nothing() -> None:
    found = topology(Desk("a").plug("a", 1, "a", 2).hosts)
    assert found.cables == ()
    assert all(stranger.own for stranger in found.strangers)


def test_one_mac_given_twice_is_not_cabled_twice() -> None:
    desk = pair()
    twin = desk["a"]
    assert len(topology([*desk.hosts, twin]).cables) == 1


def test_a_cable_that_only_one_end_sees_is_known_and_not_used() -> None:
    desk = pair().port("b", 2, peers=(), connected=False)
    (cable,) = topology(desk.hosts).cables
    assert not cable.seen_by_both
    assert not cable.rdma


def test_a_mesh_of_nine_is_used_as_a_ring() -> None:
    found = topology(mesh(9, "many ports").hosts)
    assert not found.mesh
    assert found.ring() is not None


def test_a_ring_uses_as_many_cables_as_every_link_of_some_order_has() -> None:
    desk = mesh(4, first_port=1)  # one cable each; ports 4 to 6 are free
    for a, b in ((0, 1), (1, 2), (2, 3), (0, 3)):
        used = {name: sum(port.connected for port in desk[name].ports) for name in (f"m{a}", f"m{b}")}
        desk.plug(f"m{a}", used[f"m{a}"] + 1, f"m{b}", used[f"m{b}"] + 1)
    order, cables = topology(desk.hosts).ring() or ((), 0)
    assert (order, cables) == ((0, 1, 2, 3), 2)


def test_islands_are_the_groups_that_cables_join() -> None:
    desk = Desk("a", "b", "c", "d").plug("a", 1, "c", 1)
    assert topology(desk.hosts).islands == ((0, 2), (1,), (3,))


def test_the_part_with_the_most_memory_is_offered() -> None:
    desk = Desk("a", "b").add("s1", "studio").add("s2", "studio").plug("a", 1, "b", 1).plug("s1", 2, "s2", 2)
    assert topology(desk.hosts).jaccl_subset() == (2, 3)


def test_a_drawing_names_hosts_ports_and_what_does_not_work() -> None:
    text = dot(topology(ring(3).change("m1", name='m"1').device("m0", 2, state="PORT_DOWN").hosts))
    assert text.startswith("graph cluster {")
    assert text.count(" -- ") == 3
    assert text.count("style=dashed") == 1
    assert '"m\\"1\\nM4 Pro, 64 GB"' in text


def test_the_plain_form_has_names_in_place_of_indices() -> None:
    plain = as_plain(topology(ring(3).hosts))
    assert plain["ring"] == ["m0", "m1", "m2"]
    assert [plain["cables"][0][key] for key in ("a", "a_device", "b", "b_device")] == [
        "m0",
        "rdma_en2",
        "m2",
        "rdma_en3",
    ]
