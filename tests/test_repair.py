"""The commands that doctor --fix prints, and those that undo them."""

from __future__ import annotations

import re

from made_macs import Desk, bridged, bridged_ring, pair, readdressed
from recorded_macs import recorded

from cluster.cabling.topology import topology
from cluster.doctor.doctor import examine
from cluster.doctor.repair import Repair, repairs
from cluster.macs.hosts import Power


def repairs_of(desk: Desk) -> list[Repair]:
    return repairs(topology(desk.hosts), examine(desk.hosts))


def test_nothing_is_repaired_where_nothing_is_wrong() -> None:
    assert repairs_of(pair()) == []


def test_a_whole_bridge_is_switched_off_by_the_name_it_has_there_and_both_ends_get_addresses() -> None:
    desk = bridged_ring()
    for i in range(3):
        desk.change(f"m{i}", interfaces={**desk[f"m{i}"].interfaces, "Thunderbolt-Brücke": "bridge0"})
        for number in (1, 2):
            desk.device(f"m{i}", number, gids=(f"fe80::{number}",))
            desk.change(f"m{i}", addresses=desk[f"m{i}"].addresses[:2])
    found = repairs_of(desk)
    assert 'sudo networksetup -setnetworkserviceenabled "Thunderbolt-Brücke" off' in found[0].commands
    assert 'sudo networksetup -setnetworkserviceenabled "Thunderbolt-Brücke" on' in found[0].undo
    typed = [command for repair in found for command in repair.commands]
    given_out = [word for command in typed for word in re.findall(r"inet (\S+) ", command)]
    assert len(given_out) == len(set(given_out)) == 6


def test_a_single_member_is_taken_out_of_the_bridge() -> None:
    found = [repair for repair in repairs_of(bridged(pair(), "a", "en4")) if "bridge0" in repair.what]
    assert [(repair.host, repair.commands, repair.undo) for repair in found] == [
        ("a", ("sudo ifconfig bridge0 deletem en4",), ("sudo ifconfig bridge0 addm en4",))
    ]


def test_sleep_and_the_wired_limit_are_put_back_to_what_they_were_by_the_undo() -> None:
    desk = pair().change("a", power=Power(10, 5, False), wired_limit_mb=64000)
    found = {repair.commands: repair.undo for repair in repairs_of(desk)}
    assert found == {
        ("sudo pmset -a sleep 0 disksleep 0 autorestart 1",): ("sudo pmset -a sleep 10 disksleep 5 autorestart 0",),
        ("sudo sysctl iogpu.wired_limit_mb=0",): ("sudo sysctl iogpu.wired_limit_mb=64000",),
    }


def test_an_address_that_is_replaced_comes_back_by_the_undo() -> None:
    found = [repair for repair in repairs_of(readdressed(pair(), "b", "en3", "10.0.1.201")) if repair.host == "b"]
    assert "sudo ifconfig en3 inet 10.0.1.201 -alias" in found[0].commands
    assert "sudo ifconfig en3 inet 10.0.1.201/30 alias" in found[0].undo


def test_a_group_that_talks_tcp_gets_addresses_on_every_cable() -> None:
    hosts = recorded("mixed")
    found = repairs(topology(hosts), examine(hosts))
    assert sorted(repair.host for repair in found) == ["max", "max", "old", "old", "ultra", "ultra"]
