"""IPv4 addresses of hosts: which are the LAN's, which belong to cables, and ranges that nobody uses. Pure.

Doctor, backend and repair ask. Thunderbolt ports, bridges, VPNs and loopback are never the LAN; link-local counts as
LAN only where a host has nothing else.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from itertools import combinations

from cluster.cabling.topology import Topology
from cluster.macs.hosts import Address, Host, Port, RdmaDevice

VPN = ipaddress.IPv4Network("100.64.0.0/10")
NO_LAN = re.compile(
    r"(lo|bridge|utun|tun|tap|ppp|ipsec|wg|tailscale|zt|awdl|llw|anpi|ap|gif|stf|docker|virbr|veth|br-)"
)
CABLE_RANGES = ("10.219.0.0/16", "172.31.0.0/16", "10.83.0.0/16", "172.23.0.0/16", "192.168.219.0/24")


def network_of(address: Address) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(f"{address.ip}/{address.prefix}", strict=False)


def ipv4_of(text: str) -> ipaddress.IPv4Address | None:
    """The address in a text, or None."""
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        return None


def is_link_local(address: Address) -> bool:
    return ipaddress.IPv4Address(address.ip).is_link_local


def lan_addresses(host: Host) -> tuple[Address, ...]:
    """Where others reach a host, the best first: wired before Wi-Fi. Link-local ones only if there are no others."""
    cable_devices = {port.device for port in host.ports}
    wifi = {device for name, device in host.interfaces.items() if "wi-fi" in name.lower() or "wlan" in name.lower()}
    found = [
        address
        for address in host.addresses
        if address.interface not in cable_devices
        and not NO_LAN.match(address.interface)
        and not ipaddress.IPv4Address(address.ip).is_loopback
        and ipaddress.IPv4Address(address.ip) not in VPN
    ]
    found.sort(key=lambda address: (is_link_local(address), address.interface in wifi))
    routed = [address for address in found if not is_link_local(address)]
    return tuple(routed or found)


def meeting_point(hosts: Sequence[Host]) -> tuple[tuple[Address, ...], bool] | None:
    """An address of each host, the first host's being one that all others reach; and whether they share its subnet.

    None if there is no host, or one without any LAN address.
    """
    choices = [lan_addresses(host) for host in hosts]
    if not choices or not all(choices):
        return None
    for first in choices[0]:
        subnet = network_of(first)
        near = [
            next((other for other in choice if ipaddress.IPv4Address(other.ip) in subnet), None)
            for choice in choices[1:]
        ]
        if all(near):
            return (first, *(other for other in near if other)), True
    return tuple(choice[0] for choice in choices), False


def port_addresses(host: Host, port: Port) -> tuple[Address, ...]:
    return tuple(address for address in host.addresses if port.device and address.interface == port.device)


def ipv4_gid_index(device: RdmaDevice) -> int | None:
    """Where in its table a device has an IPv4 GID; JACCL takes the first and sends with index 1. None: it has none."""
    return next((k for k, gid in enumerate(device.gids) if gid.lower().startswith("::ffff:")), None)


def same_subnet(host: Host, port: Port, other: Host, other_port: Port) -> bool | None:
    """Whether two ports have addresses in one subnet; None where an end has no address."""
    here, there = port_addresses(host, port), port_addresses(other, other_port)
    if not here or not there:
        return None
    return any(network_of(a) == network_of(b) for a in here for b in there)


def clashes(found: Topology) -> Iterator[tuple[int, Port, Address, str]]:
    """Addresses of ports whose subnet is also a LAN's, or also another cable's: host, port, address, and whose."""
    lans = [(host.name, network_of(address)) for host in found.hosts for address in lan_addresses(host)]
    cables = [
        (cable, end, address)
        for cable in found.cables
        for end in (cable.a, cable.b)
        for address in port_addresses(found.hosts[end.host], end.port)
        if not is_link_local(address)
    ]
    for _, end, address in cables:
        if lan := next((name for name, lan in lans if lan.overlaps(network_of(address))), ""):
            yield end.host, end.port, address, f"the LAN of {lan}"
    for (cable, end, address), (other_cable, other_end, other) in combinations(cables, 2):
        if cable is not other_cable and end.host == other_end.host and network_of(address).overlaps(network_of(other)):
            yield end.host, end.port, address, f"the cable in Thunderbolt {other_end.port.number}"


def free_subnets(hosts: Sequence[Host]) -> Iterator[ipaddress.IPv4Network]:
    """Subnets of two addresses (/30), one per cable, from a range that no host has an address in."""
    used = [network_of(address) for host in hosts for address in host.addresses]
    for text in CABLE_RANGES:
        block = ipaddress.IPv4Network(text)
        if not any(block.overlaps(network) for network in used):
            yield from block.subnets(new_prefix=30)
            return
    for text in CABLE_RANGES:
        for subnet in ipaddress.IPv4Network(text).subnets(new_prefix=30):
            if not any(subnet.overlaps(network) for network in used):
                yield subnet
