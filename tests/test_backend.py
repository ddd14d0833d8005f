"""From cables to a hostfile: on the recorded Macs, on the same under other names, and on made ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_macs import Desk, mesh, pair, readdressed, ring
from mlx_launch import accepted_by_mlx
from recorded_macs import CLUSTERS, recorded, renamed, truth

from cluster.cabling.backend import Joined, best_backend, compare, join
from cluster.cabling.hostfile import check, write
from cluster.cabling.topology import topology
from cluster.errors import NoHostfile
from cluster.macs.hosts import Address

JOINABLE = [cluster for cluster in CLUSTERS if truth(cluster).get("expect", {}).get("backend")]


def joined(desk: Desk, **wishes: object) -> Joined:
    return join(topology(desk.hosts), **wishes)  # type: ignore[arg-type]


def matrix(found: Joined) -> list[list[object]]:
    """The devices as they stand in the file."""
    return [
        [devices[0] if devices and len(devices) == 1 else list(devices) if devices else None for devices in entry.rdma]
        for entry in found.hostfile.hosts
    ]


# ---------------------------------------------------------------- the recorded Macs


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_backend_is_the_expected_one(cluster: str) -> None:
    assert best_backend(topology(recorded(cluster))) == truth(cluster).get("expect", {}).get("backend")


@pytest.mark.parametrize("cluster", ["mesh2", "mesh4-double"])
def test_the_matrix_of_devices_is_the_expected_one(cluster: str) -> None:
    assert matrix(join(topology(recorded(cluster)))) == truth(cluster)["expect"]["rdma"]


@pytest.mark.parametrize("cluster", JOINABLE)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_under_any_names_the_same_cables_are_named_alike_at_both_ends(cluster: str, seed: int) -> None:
    other = renamed(recorded(cluster), seed)
    found = join(topology(other.hosts))
    assert found.hostfile.backend == truth(cluster)["expect"]["backend"]
    assert check(found.hostfile) == []

    def old(name: str, device: str) -> tuple[str, str]:
        host = other.old_host[name]
        return host, f"rdma_{other.old_device[host][device[5:]]}"

    cables = {frozenset({(c["a"], c["a_dev"]), (c["b"], c["b_dev"])}) for c in truth(cluster)["cables"]}
    hosts = found.hostfile.hosts
    used = {
        frozenset({old(hosts[i].ssh, here), old(hosts[j].ssh, there)})
        for i, j in combinations(range(len(hosts)), 2)
        if hosts[i].rdma and hosts[i].rdma[j]
        for here, there in zip(hosts[i].rdma[j] or (), hosts[j].rdma[i] or (), strict=True)
    }
    assert used == (cables if found.hostfile.backend != "ring" else set())


@pytest.mark.parametrize("cluster", JOINABLE)
def test_what_is_written_is_taken_by_mlx_and_fits_the_facts(cluster: str, tmp_path: Path) -> None:
    found = join(topology(recorded(cluster)))
    write(found.hostfile, tmp_path / "hosts.json")
    assert accepted_by_mlx(tmp_path / "hosts.json") == ""
    assert compare(found.hostfile, topology(recorded(cluster))) == []


@pytest.mark.parametrize("cluster", JOINABLE)
def test_the_ranks_meet_on_the_lan(cluster: str) -> None:
    lan = {host["name"]: host["lan_ip"] for host in truth(cluster)["hosts"]}
    found = join(topology(recorded(cluster)))
    assert [entry.ips for entry in found.hostfile.hosts] == [(lan[entry.ssh],) for entry in found.hostfile.hosts]


def test_where_rdma_could_work_and_does_not_nothing_is_chosen_quietly() -> None:
    with pytest.raises(NoHostfile) as caught:
        join(topology(recorded("broken")))
    assert "st-2 has RDMA disabled" in caught.value.message
    assert "no cable: st-3 - st-4" in caught.value.message
    assert join(topology(recorded("broken")), backend="ring").hostfile.backend == "ring"


def test_the_part_that_can_use_rdma_is_offered_and_what_is_left_out_is_said() -> None:
    found = join(topology(recorded("mixed")))
    assert found.subset == ("ultra", "max")
    assert "left out: old (64 GB)" in found.notes[-1]


@pytest.mark.parametrize("cluster", ["single", "vm1"])
def test_one_mac_has_no_hostfile(cluster: str) -> None:
    with pytest.raises(NoHostfile, match="at least 2"):
        join(topology(recorded(cluster)))


# ---------------------------------------------------------------- choices


def test_a_guest_among_macs_makes_it_the_tcp_ring() -> None:
    guest = recorded("vm1")[0]
    hosts = [*pair().hosts, replace(guest, addresses=(Address("en0", "10.0.1.99", 24),))]
    found = join(topology(hosts))
    assert (found.hostfile.backend, found.subset) == ("ring", ("a", "b"))


def test_macs_without_any_cable_use_the_tcp_ring() -> None:
    assert joined(Desk("a", "b")).hostfile.backend == "ring"


def test_the_order_of_the_plan_is_the_order_of_the_ranks() -> None:
    found = joined(mesh(3), order=(2, 0, 1))
    assert [entry.ssh for entry in found.hostfile.hosts] == ["m2", "m0", "m1"]
    assert check(found.hostfile) == []


def test_a_ring_that_cannot_follow_the_plan_starts_with_its_first_and_says_so() -> None:
    found = joined(ring(5), order=(3, 0, 1, 2, 4))
    assert [entry.ssh for entry in found.hostfile.hosts] == ["m3", "m4", "m0", "m1", "m2"]
    assert "does not follow the order" in found.notes[0]


def test_a_ring_follows_the_plan_where_cables_do() -> None:
    found = joined(ring(4), order=(2, 1, 0, 3))
    assert [entry.ssh for entry in found.hostfile.hosts] == ["m2", "m1", "m0", "m3"]
    assert found.notes == ()


def uneven() -> Desk:
    """A mesh of four with a second cable on the links of a ring through all."""
    desk = mesh(4)
    for a, b in ((0, 1), (1, 2), (2, 3), (0, 3)):
        used = {i: sum(port.connected for port in desk[f"m{i}"].ports) for i in (a, b)}
        desk.plug(f"m{a}", used[a] + 1, f"m{b}", used[b] + 1)
    return desk


def test_uneven_cables_make_an_even_mesh_and_the_doubled_ring_is_offered() -> None:
    found = joined(uneven())
    assert {len(devices) for entry in found.hostfile.hosts for devices in entry.rdma if devices} == {1}
    assert "uses 1 on each" in found.notes[0]
    assert "`--backend jaccl-ring` would use 2 on each, in the order m0, m1, m2, m3" in found.notes[1]


def test_the_doubled_ring_uses_both_cables_of_every_link() -> None:
    found = joined(uneven(), backend="jaccl-ring")
    counts = [[len(devices or ()) for devices in entry.rdma] for entry in found.hostfile.hosts]
    assert counts == [[0, 2, 0, 2], [2, 0, 2, 0], [0, 2, 0, 2], [2, 0, 2, 0]]


def test_a_backend_that_cannot_be_had_says_for_whom() -> None:
    with pytest.raises(NoHostfile, match="m0 - m2, m1 - m3"):
        joined(ring(4), backend="jaccl")
    with pytest.raises(NoHostfile, match="no cable"):
        joined(Desk("a", "b", "c").plug("a", 1, "b", 1), backend="jaccl-ring")
    with pytest.raises(NoHostfile, match="at most 8"):
        joined(mesh(9, "many ports"), backend="jaccl")


def test_a_mac_without_a_lan_address_is_named() -> None:
    desk = pair().change("b", addresses=(Address("lo0", "127.0.0.1", 8), Address("utun3", "100.71.2.3", 32)))
    with pytest.raises(NoHostfile, match="b: no IPv4 address on Ethernet or Wi-Fi"):
        joined(desk)


def test_a_vpn_is_never_where_ranks_meet() -> None:
    desk = pair()
    addresses = (Address("utun4", "100.71.2.3", 32), Address("en3", "169.254.9.9", 16), Address("en0", "10.0.1.7", 24))
    assert joined(desk.change("a", addresses=addresses)).hostfile.hosts[0].ips == ("10.0.1.7",)


def test_link_local_is_used_where_there_is_nothing_else_and_noted() -> None:
    desk = pair()
    for name, ip in (("a", "169.254.1.1"), ("b", "169.254.1.2")):
        desk.change(name, addresses=(Address("en0", ip, 16),))
    found = joined(desk)
    assert found.hostfile.hosts[0].ips == ("169.254.1.1",)
    assert "link-local" in found.notes[0]


def test_the_tcp_ring_goes_over_cables_whose_ends_share_a_subnet_of_their_own() -> None:
    desk = Desk("a").add("old", "old studio").plug("a", 1, "old", 1, speed=40)
    found = joined(desk)
    assert [entry.ips for entry in found.hostfile.hosts] == [("172.20.1.1",), ("172.20.1.2",)]
    readdressed(desk, "old", "en2", "169.254.3.3")
    over_lan = joined(desk)
    assert [entry.ips for entry in over_lan.hostfile.hosts] == [("10.0.1.11",), ("10.0.1.12",)]
    assert "not the cables" in over_lan.notes[0]


# ---------------------------------------------------------------- a file against the facts


def test_a_dead_port_is_named_with_the_live_ones() -> None:
    desk = pair()
    hostfile = joined(desk).hostfile
    desk.plug("a", 1, "b", 1).device("a", 3, state="PORT_DOWN")
    assert "a: rdma_en4 is down; active: rdma_en2" in compare(hostfile, topology(desk.hosts))


def test_a_device_that_is_not_there_is_named() -> None:
    desk = pair()
    hostfile = joined(desk).hostfile
    desk.change("b", rdma_devices=())
    assert "b: there is no rdma_en3; none is active" in compare(hostfile, topology(desk.hosts))


def test_names_that_are_no_two_ends_of_one_cable_are_told() -> None:
    desk = mesh(2, "mini", cables=2)
    hostfile = joined(desk).hostfile
    crossed = replace(hostfile.hosts[1], rdma=(tuple(reversed(hostfile.hosts[1].rdma[0] or ())), None))
    faults = compare(replace(hostfile, hosts=(hostfile.hosts[0], crossed)), topology(desk.hosts))
    assert faults[0] == "m0 rdma_en2 leads to m1 rdma_en2, not to m1 rdma_en3"


def test_a_cable_that_has_moved_to_another_mac_is_told() -> None:
    hostfile = joined(ring(3)).hostfile
    moved = Desk("m0", "m1", "m2").plug("m0", 2, "m2", 1).plug("m2", 2, "m1", 1).plug("m1", 2, "m0", 1)
    faults = compare(hostfile, topology(moved.hosts))
    assert "m0 rdma_en3 leads to m2 rdma_en2, not to m1 rdma_en2" in faults


def test_an_address_that_is_not_rank_0s_a_cables_or_a_vpns_is_told() -> None:
    desk = pair()
    desk.change("a", addresses=(*desk["a"].addresses, Address("utun4", "100.71.2.3", 32)))
    hostfile = joined(desk).hostfile

    def told(ip: str) -> list[str]:
        first = replace(hostfile.hosts[0], ips=(ip,))
        return compare(replace(hostfile, hosts=(first, hostfile.hosts[1])), topology(desk.hosts))

    assert told("10.0.1.11") == []
    assert told("10.0.1.77") == ["a (rank 0): 10.0.1.77 is not an address of it (it has 10.0.1.11)"]
    assert told("172.20.1.1") == ["a (rank 0): 172.20.1.1 is on Thunderbolt 3 (en4); the others meet on the LAN"]
    assert told("100.71.2.3") == ["a (rank 0): 100.71.2.3 is a VPN's (utun4); use 10.0.1.11"]


def test_a_host_that_was_not_looked_at_is_told() -> None:
    desk = pair()
    assert "b: not looked at" in compare(joined(desk).hostfile, topology([desk["a"]]))
