from __future__ import annotations

import pytest

from cluster.macs.hosts import Host
from cluster.plan.chips import alike, bandwidth, default_share, knows, limit_bytes
from cluster.vm.facts import VirtualMachine

GB = 1 << 30


def host(chip: str, gb: int = 64, **facts) -> Host:
    return Host("mac", "mac", chip=chip, memory_bytes=gb * GB, **facts)


@pytest.mark.parametrize(
    ("chip", "cores", "expected"),
    [
        ("Apple M3 Ultra", 80, 819),
        ("Apple M4 Pro", 20, 273),
        ("Apple M4 Max", 32, 410),
        ("Apple M4 Max", 40, 546),
        ("Apple M4 Max", 0, 546),
        ("Apple M3 Max", 30, 300),
        ("Apple M1", 8, 68),
    ],
)
def test_bandwidth_follows_chip_and_gpu_cores(chip, cores, expected):
    assert bandwidth(host(chip, gpu_cores=cores)) == expected * 1e9


def test_an_unknown_chip_counts_as_slow_and_says_so():
    mac = host("Apple M9 Mega")
    assert bandwidth(mac) == 100e9
    assert not knows(mac)
    assert knows(host("Apple M2"))


def test_a_guest_has_the_bandwidth_of_the_chip_underneath():
    guest = host("Apple M1 Ultra (Virtual)", virtual=VirtualMachine("VirtualMac2,1", "", "M1 Ultra", ("x",)))
    assert bandwidth(guest) == 800e9


def test_a_wired_limit_that_is_set_counts_and_never_exceeds_the_memory():
    assert limit_bytes(host("Apple M3 Ultra", 512, wired_limit_mb=460_000)) == 460_000 << 20
    assert limit_bytes(host("Apple M3 Ultra", 512, wired_limit_mb=10**9)) == 512 * GB


@pytest.mark.parametrize(("gb", "share"), [(16, 0.75), (64, 0.75), (96, 0.795), (128, 0.84), (512, 0.84)])
def test_the_default_limit_grows_from_75_to_84_percent(gb, share):
    assert default_share(gb * GB) == pytest.approx(share)
    assert limit_bytes(host("Apple M4 Max", gb, wired_limit_mb=0)) == int(gb * GB * default_share(gb * GB))


def test_chips_are_alike_only_with_as_many_gpu_cores():
    assert alike(host("Apple M3 Ultra", 512, gpu_cores=80), host("Apple M3 Ultra", 256, gpu_cores=80))
    assert not alike(host("Apple M3 Ultra", gpu_cores=80), host("Apple M3 Ultra", gpu_cores=60))
