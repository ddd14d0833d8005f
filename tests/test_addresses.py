"""Which addresses are the LAN's, where ranks meet, and ranges that nobody uses."""

from __future__ import annotations

from made_macs import Desk, pair

from cluster.cabling.addresses import free_subnets, lan_addresses, meeting_point
from cluster.macs.hosts import Address


def test_vpn_loopback_thunderbolt_and_link_local_are_not_the_lan() -> None:
    desk = pair().change(
        "b",
        addresses=(
            Address("lo0", "127.0.0.1", 8),
            Address("utun4", "100.71.2.3", 32),
            Address("utun5", "10.9.0.2", 24),
            Address("en3", "192.168.7.1", 30),
            Address("bridge100", "192.168.64.1", 24),
            Address("en0", "169.254.9.9", 16),
            Address("en1", "192.168.0.7", 24),
        ),
    )
    assert [address.ip for address in lan_addresses(desk["b"])] == ["192.168.0.7"]


def test_link_local_counts_only_where_there_is_nothing_else() -> None:
    desk = pair().change("b", addresses=(Address("en0", "169.254.9.9", 16), Address("utun4", "100.71.2.3", 32)))
    assert [address.ip for address in lan_addresses(desk["b"])] == ["169.254.9.9"]


def test_the_meeting_point_is_where_all_are_and_wired_before_wireless() -> None:
    desk = Desk("a", "b")
    desk.change("a", addresses=(Address("en1", "10.0.1.8", 24), Address("en0", "10.0.1.9", 24)))
    assert [address.ip for address in (meeting_point(desk.hosts) or ((), False))[0]] == ["10.0.1.9", "10.0.1.12"]
    desk.change("b", addresses=(Address("en1", "10.0.5.3", 24),))
    desk.change("a", addresses=(Address("en0", "10.0.1.9", 24), Address("en1", "10.0.5.2", 24)))
    assert [address.ip for address in (meeting_point(desk.hosts) or ((), False))[0]] == ["10.0.5.2", "10.0.5.3"]


def test_addresses_come_from_a_range_that_no_host_uses() -> None:
    desk = pair().add("c").change("c", addresses=(Address("en0", "10.219.3.4", 16), Address("en1", "172.31.0.9", 20)))
    first = next(free_subnets(desk.hosts))
    assert str(first) == "10.83.0.0/30"


def test_where_every_range_is_in_use_gaps_are_found() -> None:
    taken = [Address("en0", ip, 24) for ip in ("10.219.0.1", "172.31.0.1", "10.83.0.1", "172.23.0.1", "192.168.219.1")]
    first = next(free_subnets(pair().change("a", addresses=tuple(taken)).hosts))
    assert str(first) == "10.219.1.0/30"
