"""Doctor: the expected findings of every recorded cluster, each kind of finding on made Macs, and the repairs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_macs import Desk, bridged, bridged_ring, mesh, pair, readdressed, ring
from recorded_macs import CLUSTERS, MACS, recorded, renamed, truth, unchanged

from cluster.doctor.doctor import ORDER, examine
from cluster.macs.hosts import Address, Host, Power, Unreachable, Unread, Versions
from cluster.macs.probe import commands, probe, probe_recorded
from cluster.macs.ssh import RecordedShell
from cluster.vm.facts import virtual_machine

EXTRA = {"vm1": ["virtual:guest"]}  # its cluster.json names no findings
FAILURES = Path(__file__).parent.parent / "docs" / "failures.md"


def codes(hosts: tuple[Host, ...] | list[Host], *away: Unreachable) -> list[str]:
    return [finding.code for finding in examine(hosts, away)]


def blocking(hosts: tuple[Host, ...]) -> list[str]:
    return [finding.code for finding in examine(hosts) if finding.blocks]


# ---------------------------------------------------------------- the recorded Macs


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_recorded_clusters_have_the_expected_findings_in_their_exact_spelling(cluster: str) -> None:
    expected = truth(cluster).get("expect", {}).get("findings", []) or EXTRA.get(cluster, [])
    assert sorted(codes(recorded(cluster))) == sorted(expected)


@pytest.mark.parametrize("cluster", CLUSTERS)
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_findings_are_the_same_under_any_names_and_orders(cluster: str, seed: int) -> None:
    other = renamed(recorded(cluster), seed)
    expected = truth(cluster).get("expect", {}).get("findings", []) or EXTRA.get(cluster, [])
    assert sorted(map(other.old_code, codes(other.hosts))) == sorted(map(unchanged, expected))


def test_only_clusters_that_cannot_run_yet_are_blocked() -> None:
    blocked = {cluster for cluster in CLUSTERS if blocking(recorded(cluster))}
    assert blocked == {"broken", "ring5"}


@pytest.mark.parametrize("folder", sorted(MACS.glob("variants/*/*")), ids=lambda path: "-".join(path.parts[-2:]))
def test_a_mac_alone_is_told_only_what_its_model_cannot_do(folder: Path) -> None:
    model, peers = folder.parent.name, folder.name
    expected = []
    if peers != "peers0" and model in ("m1max-studio", "m2u-studio"):
        expected = ["no-tb5:mac"]
    elif peers != "peers0" and model in ("m3u-studio", "m4max-studio"):
        expected = ["studio-en2"]
    assert codes([probe(RecordedShell(folder, commands()), "mac")]) == expected


def test_one_mac_tells_that_the_other_has_rdma_disabled() -> None:
    (st_1,) = (host for host in recorded("broken") if host.name == "st-1")
    found = {finding.code: finding for finding in examine([st_1])}
    assert "peer-rdma-disabled:st-1:en5" in found
    assert "recovery" in found["peer-rdma-disabled:st-1:en5"].do or "start-up options" in (
        found["peer-rdma-disabled:st-1:en5"].do
    )


def test_a_mac_whose_own_answer_is_missing_is_told_by_its_neighbours() -> None:
    desk = pair().without_service("b").change("b", rdma_enabled=None, rdma_devices=()).device("a", 3, state="PORT_DOWN")
    (finding,) = examine(desk.hosts)
    assert finding.code == "rdma-disabled:b"
    assert "Seen from a" in finding.seen


# ---------------------------------------------------------------- each kind


def slow_pair() -> Desk:
    return Desk("a", "b").plug("a", 3, "b", 2, speed=40)


VM = virtual_machine("kern.hv_vmm_present: 1", "VirtualMac2,1")
KINDS: dict[str, tuple[Callable[[], Desk], bool]] = {
    "ssh:a": (lambda: pair().change("a", batch_ssh="Permission denied (publickey)."), True),
    "local-network:a": (lambda: pair().change("a", batch_ssh="ssh: connect: No route to host"), True),
    "unread:a:ifconfig": (lambda: pair().change("a", unread=(Unread("ifconfig", "timed out"),)), False),
    "virtual:v": (lambda: pair().add("v", "old studio", virtual=VM, ports=(), rdma_devices=()), False),
    "not-a-mac:l": (lambda: pair().add("l", "old studio", system="Linux", macos="", build="", ports=()), False),
    "no-tb5:old": (lambda: pair().add("old", "old studio"), False),
    "old-macos:b": (lambda: pair().change("b", macos="26.1", rdma_devices=(), rdma_enabled=None), True),
    "early-macos:a": (lambda: pair().change("a", macos="26.2"), False),
    "macos-mismatch": (lambda: pair().change("b", build="25F99"), True),
    "rdma-disabled:b": (lambda: pair().change("b", rdma_enabled=False, rdma_devices=()), True),
    "no-rdma-devices:b": (lambda: pair().change("b", rdma_devices=()), True),
    "rdma-worn:a:rdma_en4": (lambda: pair().device("a", 3, max_qp=3), False),
    "missing-cable:m0:m3": (lambda: _chain(4), True),
    "no-cables": (lambda: Desk("a", "b"), False),
    "slow-link:a:b": (slow_pair, True),
    "studio-en2:a": (
        lambda: Desk("a", "b", kind="studio").plug("a", 1, "b", 2).device("a", 1, state="PORT_DOWN"),
        True,
    ),
    "studio-en2": (lambda: mesh(3), False),
    "dock:a:b": (lambda: Desk("a", "b").plug("a", 1, "b", 1, behind="A Dock"), True),
    "one-sided:a:b": (lambda: pair().port("b", 2, peers=()), True),
    "self-cable:a": (lambda: pair().plug("a", 1, "a", 2), False),
    "port-unknown:a:3": (lambda: pair().port("a", 3, device=""), True),
    "bridge-loop": (lambda: bridged_ring(), True),
    "bridge-active": (lambda: bridged(pair(), "a", "en2", "en3", "en4"), True),
    "bridge-member:a:en4": (lambda: bridged(pair(), "a", "en4"), True),
    "port-down:b:rdma_en3": (lambda: pair().device("b", 2, state="PORT_DOWN"), True),
    "no-ipv4-gid": (lambda: pair().device("b", 2, gids=("fe80::2",)), True),
    "gid-index:b:rdma_en3": (lambda: pair().device("b", 2, gids=("fe80::2", "fe80::3", "::ffff:172.20.1.2")), True),
    "other-subnet:a:b": (lambda: readdressed(pair(), "b", "en3", "172.20.9.1"), True),
    "address-overlap:b:en3": (lambda: readdressed(pair(), "b", "en3", "10.0.1.201"), True),
    "no-lan:b": (lambda: pair().change("b", addresses=(Address("lo0", "127.0.0.1", 8),)), True),
    "no-shared-lan": (lambda: readdressed(pair(), "b", "en0", "10.0.9.9"), False),
    "no-mlx:b": (lambda: pair().change("b", versions=Versions("3.11.9", "", "0.32.2")), True),
    "old-mlx": (lambda: _both(versions=Versions("3.11.9", "0.31.2", "0.32.2")), False),
    "mlx-mismatch:b": (lambda: pair().change("b", versions=Versions("3.11.9", "0.31.2", "0.32.2")), True),
    "mlx-lm-mismatch:b": (lambda: pair().change("b", versions=Versions("3.11.9", "0.32.4", "0.31.0")), True),
    "python-mismatch": (lambda: pair().change("b", versions=Versions("3.12.1", "0.32.4", "0.32.2")), False),
    "sleep:a": (lambda: pair().change("a", power=Power(10, 10, False)), False),
    "wired-limit:a": (lambda: pair().change("a", wired_limit_mb=64000), False),
    "firewall:a": (lambda: pair().change("a", firewall=True), False),
    "uneven-memory": (lambda: pair().change("a", memory_bytes=512 << 30), False),
}


def _studios() -> Desk:
    return Desk("a", "b", kind="studio").plug("a", 1, "b", 2)


def _chain(n: int) -> Desk:
    desk = Desk(*(f"m{i}" for i in range(n)))
    for i in range(n - 1):
        desk.plug(f"m{i}", 2, f"m{i + 1}", 1)
    return desk


def _both(**changes: object) -> Desk:
    return pair().change("a", **changes).change("b", **changes)


@pytest.mark.parametrize("code", KINDS)
def test_each_finding_is_made_by_what_it_names(code: str) -> None:
    make, blocks = KINDS[code]
    found = {finding.code: finding for finding in examine(make().hosts)}
    assert code in found
    assert found[code].blocks is blocks
    assert min(map(len, (found[code].seen, found[code].why, found[code].do))) > 5


def test_every_kind_of_finding_is_tried_here_but_those_of_strangers_and_absent_hosts() -> None:
    elsewhere = {"unreachable", "peer-rdma-disabled"}
    assert {code.partition(":")[0] for code in KINDS} | elsewhere == set(ORDER)


def test_every_kind_of_finding_has_its_section_in_the_failures_document() -> None:
    sections = re.findall(r"^### `([a-z0-9-]+)", FAILURES.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(sections) == sorted(ORDER)


# ---------------------------------------------------------------- causes, not consequences


@pytest.mark.parametrize("desk", [pair(), ring(5), Desk("a"), mesh(4, "mini")], ids=["pair", "ring", "one", "mesh"])
def test_macs_that_are_right_have_no_findings(desk: Desk) -> None:
    assert codes(desk.hosts) == []


def test_a_port_that_is_down_because_the_other_has_rdma_off_is_no_finding_of_its_own() -> None:
    desk = (
        pair().change("b", rdma_enabled=False, rdma_devices=()).device("a", 3, state="PORT_DOWN").without_service("b")
    )
    assert codes(desk.hosts) == ["rdma-disabled:b"]


def test_devices_that_are_active_are_believed_before_the_switch() -> None:
    assert codes(pair().change("a", rdma_enabled=False).hosts) == []


def test_a_thunderbolt_4_mac_is_never_told_to_enable_rdma() -> None:
    desk = Desk("a").add("old", "old studio", rdma_enabled=True).plug("a", 1, "old", 1, speed=40)
    found = examine(desk.change("a", memory_bytes=64 << 30).hosts)
    assert [finding.code for finding in found] == ["no-tb5:old", "slow-link:a:old"]
    assert not any(finding.blocks for finding in found)


def test_what_needs_a_restart_comes_before_what_a_restart_undoes() -> None:
    desk = pair().change("b", macos="26.1", build="25B78", rdma_devices=(), rdma_enabled=None)
    bridged(desk, "a", "en4").change("a", power=Power(10, 10, True))
    assert codes(desk.hosts) == ["old-macos:b", "macos-mismatch", "bridge-member:a:en4", "sleep:a"]


def test_a_second_cable_that_is_slow_does_not_block() -> None:
    found = examine(pair().plug("a", 1, "b", 1, speed=40).hosts)
    assert [(finding.code, finding.blocks) for finding in found] == [("slow-link:a:b", False)]


def test_a_ring_is_not_asked_to_become_a_mesh_but_a_begun_mesh_is() -> None:
    assert codes(ring(4).hosts) == []
    begun = ring(4).plug("m0", 3, "m2", 3)
    assert [(finding.code, finding.blocks) for finding in examine(begun.hosts)] == [("missing-cable:m1:m3", False)]


def test_two_missing_cables_at_one_mac_go_into_two_ports() -> None:
    star = Desk("hub", "a", "b", "c").plug("hub", 1, "a", 1).plug("hub", 2, "b", 1).plug("hub", 3, "c", 1)
    found = examine(star.hosts)
    plugs = [part for finding in found for part in re.findall(r"(?:from|to) (\w+ Thunderbolt \d)", finding.do)]
    assert len(plugs) == len(set(plugs)) == 2 * len(found) > 0


def test_a_host_that_cannot_be_looked_at_blocks_and_keeps_its_hint() -> None:
    away = Unreachable("c", "connection refused", "Switch on Remote Login.")
    found = examine(pair().hosts, [away])
    assert [(finding.code, finding.blocks, finding.do) for finding in found] == [
        ("unreachable:c", True, "Switch on Remote Login.")
    ]
    assert codes(pair().hosts, Unreachable("c", "No route to host (65)", "")) == ["local-network:c"]


def test_a_guest_says_its_limits_in_the_words_of_the_virtual_machine() -> None:
    (finding,) = examine(recorded("vm1"))
    assert recorded("vm1")[0].virtual is not None
    assert all(sentence in finding.why for sentence in recorded("vm1")[0].virtual.consequences)  # type: ignore[union-attr]


@pytest.mark.parametrize("folder", sorted(path.name for path in (MACS / "variants").iterdir() if path.is_dir()))
def test_recordings_without_addresses_are_examined_together_without_an_error(folder: str) -> None:
    """Each holds one Mac with other cables: as one cluster they make no sense, and still get findings."""
    assert examine(probe_recorded(MACS / "variants" / folder))
