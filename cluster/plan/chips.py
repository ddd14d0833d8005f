"""What a Mac's chip and memory allow: bytes per second that decoding can read, and bytes that the GPU may hold. Pure.

The planner asks. Bandwidths are Apple's figures for peak; `EFFICIENCY` is the share that decoding was seen to reach.
"""

from __future__ import annotations

from cluster.cabling.topology import chip_of
from cluster.macs.hosts import Host

GB = 10**9
EFFICIENCY = 0.6  # 671B on one M3 Ultra: 21 tok/s of 39 at peak; dense models reach 0.7-0.85
UNKNOWN_BANDWIDTH = 100 * GB  # a base M2 or M3; what is not known is slow
SMALL_BYTES, SMALL_SHARE = 64 << 30, 0.75  # macOS lets the GPU hold 75 % of memory on small Macs,
LARGE_BYTES, LARGE_SHARE = 128 << 30, 0.84  # and 84 % where it was measured, on 128 GB

BANDWIDTHS = {  # chip -> [(up to so many GPU cores, GB/s)], the last for any number
    "M1": [(0, 68)],
    "M1 Pro": [(0, 200)],
    "M1 Max": [(0, 400)],
    "M1 Ultra": [(0, 800)],
    "M2": [(0, 100)],
    "M2 Pro": [(0, 200)],
    "M2 Max": [(0, 400)],
    "M2 Ultra": [(0, 800)],
    "M3": [(0, 100)],
    "M3 Pro": [(0, 150)],
    "M3 Max": [(30, 300), (0, 400)],
    "M3 Ultra": [(0, 819)],
    "M4": [(0, 120)],
    "M4 Pro": [(0, 273)],
    "M4 Max": [(32, 410), (0, 546)],
    "M5": [(0, 153)],
    "M5 Pro": [(0, 307)],
    "M5 Max": [(32, 460), (0, 614)],
}


def bandwidth(host: Host) -> float:
    """Bytes per second that decoding reads from this host's memory, at peak. A guest has its host's chip."""
    chip = host.virtual.host_chip if host.virtual is not None and host.virtual.host_chip else chip_of(host)
    for cores, speed in BANDWIDTHS.get(chip, ()):
        if cores == 0 or 0 < host.gpu_cores <= cores:
            return float(speed * GB)
    return float(UNKNOWN_BANDWIDTH)


def knows(host: Host) -> bool:
    """Whether the bandwidth of this host's chip is known."""
    return bandwidth(host) != UNKNOWN_BANDWIDTH or chip_of(host) in BANDWIDTHS


def limit_bytes(host: Host) -> int:
    """What the GPU may hold: the wired limit where one is set, else macOS's own default for this much memory."""
    if host.wired_limit_mb:
        return min(host.wired_limit_mb << 20, host.memory_bytes or host.wired_limit_mb << 20)
    return int(host.memory_bytes * default_share(host.memory_bytes))


def default_share(memory_bytes: int) -> float:
    """The share of memory that macOS leaves to the GPU by default, from 75 % (up to 64 GB) to 84 % (from 128 GB)."""
    place = (memory_bytes - SMALL_BYTES) / (LARGE_BYTES - SMALL_BYTES)
    return SMALL_SHARE + (LARGE_SHARE - SMALL_SHARE) * min(1.0, max(0.0, place))


def alike(first: Host, second: Host) -> bool:
    """Whether two hosts compute the same bits at the same speed: the same chip with as many GPU cores."""
    return (first.chip, first.gpu_cores) == (second.chip, second.gpu_cores)
