"""Who is there: real multicast between network namespaces, and when two finds are one machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from netns.machines import Machine, Network

from cluster.errors import NoHosts
from cluster.macs import discover
from cluster.macs.discover import Found, browse, host_names, merge

MACS = Path(__file__).parent / "macs"
LISTEN_S = 1.5
ADVERTISE = """
import socket, sys, threading
from zeroconf import IPVersion, ServiceInfo, Zeroconf
name, server, *addresses = sys.argv[1:]
zeroconf = Zeroconf(ip_version=IPVersion.V4Only)
packed = [socket.inet_aton(address) for address in addresses]
info = ServiceInfo("_ssh._tcp.local.", f"{name}._ssh._tcp.local.", 22, addresses=packed, server=f"{server}.local.")
zeroconf.register_service(info, cooperating_responders=True)  # does not wait to see whether the name is taken
print("advertised", flush=True)
threading.Event().wait()
"""


def advertise(machine: Machine, *, server: str = "", addresses: tuple[str, ...] = ()) -> None:
    """Let a machine do what macOS does once Remote Login is on."""
    name = server or machine.name
    process = machine.start([sys.executable, "-c", ADVERTISE, f"Studio {name}", name, *(addresses or (machine.ip,))])
    assert process.stdout is not None
    assert process.stdout.readline() == "advertised\n"


# ---------------------------------------------------------------- multicast


def test_machines_that_offer_ssh_are_found_by_multicast_with_their_addresses(network: Network):
    for name in ("studio-b", "studio-a"):
        advertise(network.add(name))
    network.add("silent")
    with network.inside():
        found = browse(timeout_s=LISTEN_S)
    assert found == [
        Found("studio-a.local", ("10.77.0.12",), bonjour=True),
        Found("studio-b.local", ("10.77.0.11",), bonjour=True),
    ]


def test_a_machine_that_was_named_and_heard_is_one_and_keeps_the_name_given(network: Network):
    """`desk` is the user's alias of the Mac that calls itself studio-a.local: the hardware UUID tells."""
    advertise(network.add("studio-a", mac=MACS / "mesh2" / "mini-a"))
    advertise(network.add("studio-b", mac=MACS / "mesh2" / "mini-b"))
    network.configure("Host desk studio-a.local\n  HostName 10.77.0.11\nHost studio-b.local\n  HostName 10.77.0.12\n")
    with network.inside():
        desk, other = discover.discover(["desk"], timeout_s=LISTEN_S)
    assert (desk.name, desk.also, desk.configured, desk.bonjour) == ("desk", ("studio-a.local",), True, True)
    assert (desk.model, desk.addresses, desk.trouble) == ("Mac mini", ("10.77.0.11",), "")
    assert (other.name, other.configured, other.bonjour) == ("studio-b.local", False, True)
    assert desk.uuid != other.uuid


def test_two_macs_that_advertise_the_same_address_stay_two(network: Network):
    shared = "192.168.64.1"  # what every Mac with a virtual machine has on its bridge100
    for name in ("mini-a", "mini-b"):
        machine = network.add(name, mac=MACS / "mesh2" / name)
        advertise(machine, addresses=(machine.ip, shared))
        network.configure(f"Host {name}.local\n  HostName {machine.ip}\n")
    with network.inside():
        assert host_names(timeout_s=LISTEN_S) == ["mini-a.local", "mini-b.local"]


def test_a_machine_that_does_not_let_us_in_is_shown_with_the_reason(network: Network):
    machine = network.add("studio-a", trusted=False)
    advertise(machine)
    network.configure("Host studio-a.local\n  HostName 10.77.0.11\n")
    with network.inside():
        (found,) = discover.discover([], timeout_s=LISTEN_S)
    assert (found.name, found.uuid) == ("studio-a.local", "")
    assert "not known yet" in found.trouble
    assert "ssh studio-a.local" in found.hint


def test_an_empty_network_is_told_with_what_to_switch_on(network: Network):
    with network.inside(), pytest.raises(NoHosts, match="No Mac was found") as caught:
        host_names(timeout_s=0.2)
    assert "Remote Login" in caught.value.hint


# ---------------------------------------------------------------- one machine or two


def test_the_uuid_decides_over_name_and_address():
    one, other = Found("mini", ("10.0.0.1",), uuid="A"), Found("mini.local", ("10.0.0.1",), uuid="B")
    assert merge([one, other]) == [one, other]
    again = Found("10.0.0.9", ("10.0.0.9",), uuid="A")
    (same,) = merge([one, again])
    assert (same.name, same.also, same.addresses) == ("mini", ("10.0.0.9",), ("10.0.0.1", "10.0.0.9"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Found("Studio-A"), Found("studio-a.local")),
        (Found("anna@studio-a"), Found("studio-a.local")),
        (Found("10.0.0.1"), Found("studio-a.local", ("10.0.0.1",))),
        (Found("a.local", ("10.0.0.1",)), Found("b.local", ("10.0.0.1",))),
    ],
)
def test_without_a_uuid_the_same_name_or_address_is_the_same_machine(one, other):
    assert len(merge([one, other])) == 1


def test_the_trouble_of_a_name_that_works_under_another_is_forgotten():
    (same,) = merge([Found("mini", trouble="unknown key", hint="x"), Found("mini.local", uuid="A", model="Mac mini")])
    assert (same.name, same.uuid, same.model, same.trouble, same.hint) == ("mini", "A", "Mac mini", "", "")


def test_different_machines_stay_different():
    assert len(merge([Found("a", ("10.0.0.1",)), Found("b", ("10.0.0.2",)), Found("c")])) == 3
