"""One machine becomes a Host: recorded Macs, odd outputs, this Linux, and machines behind a real sshd."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from netns.machines import Network

from cluster.errors import FolderUnusable, HostUnreachable, RecordingUnreadable
from cluster.macs import mac_outputs, probe
from cluster.macs.hosts import Host, Peer, Port, Unread
from cluster.macs.probe import probe_hosts, probe_recorded
from cluster.macs.recording import Disguise, RecordingShell, write_recording
from cluster.macs.ssh import LocalShell, RecordedShell, Result

MACS = Path(__file__).parent / "macs"
CLUSTERS = sorted(path.parent.name for path in MACS.glob("*/cluster.json"))
VARIANTS = sorted(path.name for path in (MACS / "variants").iterdir())


def recorded(cluster: str, folder: Path = MACS) -> dict[str, Host]:
    return {host.name: host for host in probe_recorded(folder / cluster)}


def truth(cluster: str) -> dict:
    return json.loads((MACS / cluster / "cluster.json").read_text())


# ---------------------------------------------------------------- recorded clusters


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_recorded_mac_is_read_as_what_it_is(cluster):
    hosts = recorded(cluster)
    for wanted in truth(cluster)["hosts"]:
        host = hosts.pop(wanted["name"])
        assert host.system == "Darwin"
        assert (host.chip, host.model) == (wanted["chip"], wanted["model"])
        assert (host.memory_bytes, host.gpu_cores) == (wanted["ram_gb"] << 30, wanted["gpu_cores"] or 0)
        assert (host.macos, host.build, host.versions.mlx) == (wanted["macos"], wanted["build"], wanted["mlx"])
        assert wanted["lan_ip"] in [address.ip for address in host.addresses if address.interface == "en0"]
        assert bool(host.rdma_enabled) == wanted["rdma_enabled"]
        assert (host.virtual is not None) == wanted.get("virtual_machine", False)
        assert re.fullmatch(r"[0-9A-F-]{36}", host.uuid)
        assert 0 < (host.available_bytes or 0) < host.memory_bytes
        assert host.wired_limit_mb == {"ultra": 491520}.get(host.name, 0)
        assert host.firewall is False
    assert hosts == {}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_both_ends_of_every_cable_see_each_other_with_its_speed_and_device(cluster):
    hosts = recorded(cluster)
    for cable in truth(cluster)["cables"]:
        ends = [
            next(port for port in hosts[cable[end]].ports if port.number == cable[f"{end}_port"]) for end in ("a", "b")
        ]
        for here, there, device in zip(ends, reversed(ends), (cable["a_dev"], cable["b_dev"]), strict=True):
            assert here.connected
            assert [peer.domain_uuid for peer in here.peers] == [there.domain_uuid]
            assert (here.speed, here.max_speed, here.rdma) == (cable["gbps"], 0, device)
        states = {
            device.name: device.active
            for host, name in ((cable["a"], cable["a_dev"]), (cable["b"], cable["b_dev"]))
            for device in hosts[host].rdma_devices
            if device.name == name
        }
        assert all(states.values()) == cable["rdma_active"] or not states


def test_nothing_but_the_truth_is_connected():
    ports = [port for host in recorded("broken").values() for port in host.ports if port.connected]
    assert len(ports) == 2 * len(truth("broken")["cables"])


def test_rdma_devices_keep_apples_order_and_their_gids_and_limits():
    host = recorded("mesh2")["mini-a"]
    assert [device.name for device in host.rdma_devices] == ["rdma_en2", "rdma_en3", "rdma_en4"]
    last = host.rdma_devices[-1]
    assert last.active
    assert last.gids == ("fe80::3475:beff:fe8d:e888", "::ffff:192.168.0.1", "fe80::b07e:a16:b008:e03")
    assert (last.max_qp, last.max_mr, last.max_pd) == (11, 100, 11)
    studio = recorded("mesh4-double")["m3-ultra-1"]
    assert [device.name[-3:] for device in studio.rdma_devices] == ["en2", "en3", "en5", "en4", "en6", "en7"]


def test_a_disk_is_attached_and_no_peer():
    ports = recorded("single")["laptop"].ports
    assert [(port.number, port.device, port.attached, port.peers) for port in ports if port.connected] == [
        (1, "en1", "Envoy Ultra", ())
    ]
    assert {port.max_speed for port in ports if not port.connected} == {120}


def test_a_bridge_names_its_members_and_a_missing_one_has_none():
    assert recorded("ring5")["mini-1"].bridge_members == ("en2", "en3", "en4")
    assert recorded("ring5")["mini-1"].bridge_up
    assert recorded("broken")["st-3"].bridge_members == ("en4",)
    assert (recorded("broken")["st-1"].bridge_members, recorded("broken")["st-1"].bridge_up) == ((), False)


def test_sleep_is_minutes_whatever_prevents_it_just_now():
    assert recorded("broken")["st-1"].power == probe.read.power("sleep 10\ndisksleep 10\nautorestart 0")
    assert recorded("mesh2")["mini-a"].power.sleep_min == 0
    assert recorded("mesh2")["mini-a"].power.autorestart is True


def test_a_mac_whose_neighbour_has_rdma_off_sees_no_rdma_service():
    peers = [peer for port in recorded("broken")["st-1"].ports for peer in port.peers]
    assert sorted(peer.rdma_service for peer in peers) == [False, False, True]


def test_a_mac_without_the_tools_says_which_are_missing():
    host = recorded("broken")["st-4"]
    assert host.rdma_enabled is None
    assert [unread.command for unread in host.unread] == ["ibv_devices", "rdma_ctl", "ibv_devinfo_v"]
    assert host.rdma_devices == ()


def test_a_mac_with_rdma_off_has_no_devices_and_nothing_unread():
    host = recorded("broken")["st-2"]
    assert (host.rdma_enabled, host.rdma_devices, host.unread) == (False, (), ())


@pytest.mark.parametrize("model", VARIANTS)
def test_recordings_of_a_few_commands_are_read_as_far_as_they_go(model):
    hosts = recorded(model, MACS / "variants")
    for name, host in hosts.items():
        peers = [peer for port in host.ports for peer in port.peers]
        assert len(peers) == (2 if name == "double" else int(name.removeprefix("peers")))
        assert all(port.device for port in host.ports)
        assert host.model and host.memory_bytes
        assert (host.unread, host.macos, host.power, host.firewall, host.disk_free_bytes) == ((), "", None, None, None)
        assert {port.rdma for port in host.ports} >= {device.name for device in host.rdma_devices}


def test_a_folder_without_recordings_is_an_error(tmp_path):
    with pytest.raises(RecordingUnreadable, match="no recorded hosts"):
        probe_recorded(tmp_path)
    with pytest.raises(RecordingUnreadable, match="cannot be read"):
        probe_recorded(tmp_path / "missing")


# ---------------------------------------------------------------- odd outputs


def bus(number: str | None = "1", *, items: list | None = None, **tag: str) -> dict:
    receptacle = {"receptacle_status_key": "receptacle_connected", "current_speed_key": "80 Gb/s"} | tag
    if number is not None:
        receptacle["receptacle_id_key"] = number
    made = {"_name": "bus_0", "domain_uuid_key": "u1", "receptacle_1_tag": receptacle}
    return made | ({"_items": items} if items is not None else {})


def ports_of(*buses: object, interfaces: dict | None = None, guids: dict | None = None) -> tuple[list[Port], list[str]]:
    text = json.dumps({"SPThunderboltDataType": list(buses)})
    return mac_outputs.thunderbolt_ports(text, interfaces or {"Thunderbolt 1": "en2"}, guids or {})


PEER = {
    "_name": "MacBook Pro",
    "device_name_key": "Mac17,6",
    "domain_uuid_key": "u2",
    "services_title": [{"_name": "service_ip", "protocol_id_key": 1}, {"protocol_id_key": 64087}],
}


def test_a_display_alone_is_no_peer():
    (port,), _ = ports_of(bus(items=[{"device_name_key": "Studio Display", "_name": "Studio Display"}]))
    assert (port.attached, port.peers) == ("Studio Display", ())


def test_a_peer_behind_a_dock_is_found_and_the_dock_is_named():
    (port,), _ = ports_of(bus(items=[{"_name": "Dock", "_items": [PEER]}]))
    assert port.peers == (Peer("U2", "MacBook Pro", "Mac17,6", True, behind="Dock"),)
    assert port.attached == "Dock"


def test_a_bus_without_a_receptacle_is_left_out_with_a_note_and_the_others_are_read():
    ports, notes = ports_of({"_name": "bus_9", "domain_uuid_key": "x"}, bus("1", items=[PEER]), bus(None))
    assert [port.number for port in ports] == [1]
    assert notes == ["bus_9 names no receptacle", "bus_0 has a receptacle without a number"]


def test_a_receptacle_that_no_interface_names_is_known_by_its_rdma_device_else_noted():
    unknown = bus("6") | {"switch_uid_key": "0x05AC6EC53A728EA5"}
    (port,), notes = ports_of(unknown, guids={"a58e723ac56eac05": "rdma_en7"})
    assert (port.device, notes) == ("en7", [])
    (port,), notes = ports_of(unknown)
    assert (port.device, port.rdma, notes) == ("", "", ["Thunderbolt 6 has no network interface of that name"])


def test_the_switch_uid_leads_to_the_same_device_as_the_interfaces_on_every_recorded_mac():
    for cluster in ("mesh2", "mesh4-double", "mixed"):
        for host in recorded(cluster).values():
            folder = MACS / cluster / host.name
            guids = mac_outputs.guid_names((folder / "ibv_devices.out").read_text())
            alone, _ = mac_outputs.thunderbolt_ports((folder / "thunderbolt.out").read_text(), {}, guids)
            assert [port.device for port in alone if port.device] == [port.device for port in host.ports if guids]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"SPThunderboltDataType": null}', '{"SPThunderboltDataType": [5]}']
)
def test_an_answer_without_controllers_has_no_ports(text):
    assert mac_outputs.thunderbolt_ports(text, {}, {}) == ([], [])


@pytest.mark.parametrize(
    "speed", ["Up to 120 Gb/s", "Bis zu 120 Gbit/s", "Jusqu\u2019\u00e0 120\u00a0Gb/s", "最大120 Gb/s"]
)
def test_speeds_are_read_in_any_language(speed):
    free = {"receptacle_status_key": "receptacle_no_devices_connected", "current_speed_key": speed}
    (port,), _ = ports_of(bus(**free))
    assert (port.connected, port.speed, port.max_speed) == (False, 0, 120)


def test_hardware_ports_are_read_in_any_language():
    text = "\nPort matériel : Thunderbolt 1\nAppareil : en1\nAdresse Ethernet : 36:00:00:00:00:01\n\n"
    text += "Hardwareanschluss: Thunderbolt-Brücke\nGerät: bridge0\nEthernet-Adresse: 36:00:00:00:00:02\n\nVLANs\n===\n"
    assert mac_outputs.hardware_ports(text) == {"Thunderbolt 1": "en1", "Thunderbolt-Brücke": "bridge0"}


def test_port_ten_is_not_port_one():
    (port,), _ = ports_of(bus("1"), interfaces={"Thunderbolt 10": "en10", "Thunderbolt 1": "en2"})
    assert port.device == "en2"


def test_a_laptop_has_no_setting_for_power_failures():
    assert mac_outputs.power("sleep 1\n").autorestart is None
    assert mac_outputs.power("no such output") is None


def test_a_point_to_point_address_counts_and_loopback_does_not():
    text = "lo0: flags=8049<UP>\n\tinet 127.0.0.1 netmask 0xff000000\n"
    text += "utun4: flags=8051<UP>\n\tinet 100.71.2.3 --> 100.71.2.3 netmask 0xffffffff\n"
    assert [(a.interface, a.ip, a.prefix) for a in mac_outputs.mac_addresses(text)] == [("utun4", "100.71.2.3", 32)]


def test_free_disk_is_read_from_names_with_spaces():
    text = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/disk3s5 971350180 5 800 1% /Volumes/A B\n"
    assert mac_outputs.disk_free(text) == 800 * 1024
    assert mac_outputs.disk_free("df: .: gone") is None


@pytest.mark.parametrize("seed", range(5))
def test_damaged_outputs_never_raise(tmp_path, seed):
    """Every recorded output of one Mac cut, emptied or with lines shuffled: a Host with less in it."""
    dice = random.Random(seed)
    for source in (MACS / "broken" / "st-3").iterdir():
        text = source.read_text()
        lines = text.splitlines(keepends=True)
        dice.shuffle(lines)
        damaged = dice.choice(["", text[: dice.randrange(len(text) + 1)], "".join(lines), text.replace('"', ""), text])
        (tmp_path / source.name).write_text(damaged)
    assert probe.probe(RecordedShell(tmp_path, probe.commands()), "st-3").name == "st-3"


# ---------------------------------------------------------------- this machine


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own files")
def test_this_linux_is_probed_sensibly():
    host = probe.probe(LocalShell(), "here")
    total = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert (host.system, host.memory_bytes, host.virtual) == ("Linux", total, None)
    assert 0 < (host.available_bytes or 0) <= total
    assert host.disk_free_bytes
    assert host.versions.python.startswith("3.")


def test_the_interpreter_of_the_ranks_is_the_one_that_is_asked(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$2" in *metadata*) echo \'{"python": "3.13.1", "mlx-lm": "9"}\';; *) echo 9.9;; esac'
    )
    python.chmod(0o755)
    versions = probe.probe(LocalShell(), "here", python=str(python)).versions
    assert (versions.python, versions.mlx, versions.mlx_lm, versions.cluster) == ("3.13.1", "9.9", "9", "")


# ---------------------------------------------------------------- machines behind ssh


def test_this_machine_by_its_own_name_is_probed_with_this_interpreter_and_without_ssh():
    (host,), away = probe_hosts(["localhost"])
    assert (host.versions.python, host.batch_ssh, away) == (platform.python_version(), "", [])
    assert host.versions.mlx == metadata.version("mlx")


def without_ssh(host: Host) -> Host:
    """What a replay and a machine made of the same recording have in common."""
    return replace(
        host, versions=replace(host.versions, python="", mlx_lm="", cluster=""), disk_free_bytes=None, unread=()
    )


def test_machines_behind_ssh_give_the_same_hosts_as_their_recording(network: Network, tmp_path):
    names = ["st-1", "st-2", "st-3", "st-4"]
    for name in names:
        network.add(name, mac=MACS / "broken" / name)
    with network.inside():
        seen, away = probe_hosts(names, save=tmp_path / "saved")
    assert away == []
    live = [replace(without_ssh(host), firewall=False) for host in seen]
    assert live == [without_ssh(host) for host in probe_recorded(MACS / "broken")]
    assert {host.batch_ssh for host in seen} == {""}
    assert "firewall" in {unread.command for unread in seen[0].unread}  # Linux lacks that one
    again = probe_recorded(tmp_path / "saved")
    assert [host.name for host in again] == ["host-1", "host-2", "host-3", "host-4"]
    assert {host.batch_ssh for host in again} == {""}
    assert [len(host.ports) for host in again] == [len(host.ports) for host in seen]


def test_one_hosts_trouble_does_not_hide_the_others(network: Network):
    network.add("good", mac=MACS / "mesh2" / "mini-a")
    network.add("new", trusted=False)
    network.add("off", sshd=None)
    network.add("frozen").freeze()
    slow = network.add("slow", mac=MACS / "mesh2" / "mini-b")
    slow.command("ibv_devices", "exec sleep 600\n")
    (slow.bin / "rdma_ctl").unlink()
    network.configure("Host frozen\n  ConnectTimeout 2\n")
    with network.inside(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "COMMAND_S", 3.0)
        seen, away = probe_hosts(["good", "new", "off", "frozen", "slow"])
    assert [host.name for host in seen] == ["good", "slow"]
    assert [host.name for host in away] == ["new", "off", "frozen"]
    assert ["not known yet" in away[0].reason, "refuses" in away[1].reason, "no ssh answer" in away[2].reason] == [
        True
    ] * 3
    assert all(host.hint for host in away)
    assert Unread("rdma_ctl", "there is no rdma_ctl") in seen[1].unread
    assert "did not end within 3 s" in {unread.command: unread.reason for unread in seen[1].unread}["ibv_devices"]
    assert len(seen[1].ports) == 3


def test_the_same_machine_under_two_names_is_one_host(network: Network):
    network.add("mini-a", mac=MACS / "mesh2" / "mini-a")
    network.configure("Host also\n  HostName 10.77.0.11\n")
    with network.inside():
        seen, away = probe_hosts(["mini-a", "also"])
    assert [host.name for host in seen] == ["mini-a"]
    assert [(host.name, host.reason) for host in away] == [("also", "It is the same machine as mini-a.")]


class Deaf(LocalShell):
    """A machine that lets us in and then says nothing."""

    def run(self, argv, timeout_s=0.0):
        raise probe.CommandTimedOut("deaf")


def test_a_machine_that_answers_nothing_is_unreachable():
    with pytest.raises(HostUnreachable, match="lets us in, but does not answer"):
        probe.probe(Deaf("deaf"), "deaf")


# ---------------------------------------------------------------- recordings for others


def saved(cluster: str, folder: Path) -> list[Host]:
    said = {}
    for host in sorted(path for path in (MACS / cluster).iterdir() if path.is_dir()):
        shell = RecordingShell(RecordedShell(host, probe.commands()), probe.commands())
        probe.probe(shell, host.name, everything=True)
        said[host.name] = {name: result for name, result in shell.said.items() if result.err != "not recorded"}
    write_recording(folder, said, probe.commands())
    return probe_recorded(folder)


def pairs(hosts: list[Host]) -> set:
    """Cables as (host place, port) pairs, whatever the UUIDs."""
    ends = {port.domain_uuid: (place, port.number) for place, host in enumerate(hosts) for port in host.ports}
    return {
        frozenset((ends[port.domain_uuid], ends[peer.domain_uuid]))
        for host in hosts
        for port in host.ports
        for peer in port.peers
    }


@pytest.mark.parametrize("cluster", ["mesh4-double", "broken", "ring5", "mixed"])
def test_a_saved_recording_still_pairs_its_cables_and_devices(cluster, tmp_path):
    before, after = probe_recorded(MACS / cluster), saved(cluster, tmp_path / "saved")
    assert pairs(after) == pairs(before) != set()
    for old, new in zip(before, after, strict=True):
        assert [port.device for port in new.ports] == [port.device for port in old.ports]
        assert (new.chip, new.macos, new.model, new.model_name) == (old.chip, old.macos, old.model, old.model_name)
        assert (new.addresses, new.bridge_members, new.power) == (old.addresses, old.bridge_members, old.power)
        assert [d.state for d in new.rdma_devices] == [d.state for d in old.rdma_devices]
        assert [len(d.gids) for d in new.rdma_devices] == [len(d.gids) for d in old.rdma_devices]
        assert [d.gids[1:2] for d in new.rdma_devices] == [d.gids[1:2] for d in old.rdma_devices]
        guids = mac_outputs.guid_names((tmp_path / "saved" / new.name / "ibv_devices.out").read_text())
        text = (tmp_path / "saved" / new.name / "thunderbolt.out").read_text()
        by_uid, _ = mac_outputs.thunderbolt_ports(text, {}, guids)
        assert not guids or [port.device for port in by_uid] == [port.device for port in new.ports]


def test_a_saved_recording_has_no_serial_uuid_mac_address_or_name_of_the_original(tmp_path):
    saved("broken", tmp_path / "saved")
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path.name != "COMMANDS.json"]
    text = "\n".join(texts).lower()
    for source in (MACS / "broken").rglob("*.*"):
        if source.suffix in (".out", ".err"):
            original = source.read_text()
            for found in re.findall(
                r"[0-9A-F]{8}(?:-[0-9A-F]{4}){3}-[0-9A-F]{12}|(?:[0-9a-f]{2}:){5}[0-9a-f]{2}", original
            ):
                assert found.lower() not in text, (source, found)
            for found in re.findall(r'"(?:serial_number|provisioning_UDID)" : "([^"]+)"', original):
                assert found.lower() not in text, (source, found)
            for found in re.findall(r"\b[0-9a-f]{16}\b|0x[0-9A-F]{16}|fe80::[0-9a-f:]{8,}", original):
                assert found.lower() not in text, (source, found)
    assert not re.search(r"\bst-[1-4]\b", text)


def test_the_same_name_and_uuid_become_the_same_on_every_host_and_another_in_another_recording():
    one = Disguise(["anna@studio-a.local", "studio-b"], ["anna"], b"salt")
    other = Disguise(["anna@studio-a.local", "studio-b"], ["anna"], b"pepper")
    text = "studio-a: Permission denied for anna in /Users/anna/x, 94AF33C4-6B63-45EE-A69C-FC6F09F4AD73"
    shown = one.text(text)
    assert shown.startswith("host-1: Permission denied for user-1 in /Users/user-1/x, ")
    assert one.text(text) == shown != other.text(text)
    assert one.text("studio-ab macstudio-a") == "studio-ab macstudio-a"


def test_public_addresses_are_replaced_and_private_ones_stay():
    disguise = Disguise([], [], b"salt")
    shown = disguise.text("inet 10.0.1.61 inet 8.8.8.8 inet6 2a01:4f8::1 inet6 fe80::1%lo0 ::1 ::ffff:192.168.0.1")
    assert "10.0.1.61" in shown and "::ffff:192.168.0.1" in shown and " ::1 " in shown
    assert "8.8.8.8" not in shown and "2a01:4f8" not in shown


def test_a_recording_never_goes_into_a_folder_with_other_files(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(FolderUnusable, match="not empty"):
        write_recording(tmp_path, {"a": {"uname": Result(0, "Linux\n")}}, probe.commands())
    assert os.listdir(tmp_path) == ["mine"]
