"""A bad cable: `python bad_line.py PORT TAP LOSS DELAY_S` carries frames between two interfaces, late and not all.

For kernels without netem. TAP is made here and ends with this process; PORT, whose other end is in a machine, must not
be in a bridge. `python bad_line.py plain INTERFACE` has an interface send frames as they are on a real cable (whole,
with their checksums), without which nobody else can carry them.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 2, 0x1000
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
ETH_P_ALL, PACKET_OUTGOING = 3, 4
FRAME = 65536


def plain(interface: str) -> None:
    """Switch off what leaves checksums and cutting into frames to the hardware."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), ctypes.addressof(value)))


def carry(port: str, tap: str, loss: float, delay_s: float) -> None:
    """Until this process is killed."""
    near = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    near.bind((port, ETH_P_ALL))
    far = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(far, TUNSETIFF, struct.pack("16sH22x", tap.encode(), IFF_TAP | IFF_NO_PI))
    print("up", flush=True)
    late: list[tuple[float, int, bool, bytes]] = []
    number = 0
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        for ready in select.select([near, far], [], [], wait_s)[0]:
            if ready is near:
                frame, address = near.recvfrom(FRAME)
                if address[2] == PACKET_OUTGOING:
                    continue
            else:
                frame = os.read(far, FRAME)
            if random.random() >= loss:
                number += 1
                heapq.heappush(late, (time.monotonic() + delay_s, number, ready is near, frame))
        while late and late[0][0] <= time.monotonic():
            _, _, outwards, frame = heapq.heappop(late)
            try:
                if outwards:
                    os.write(far, frame)
                else:
                    near.send(frame)
            except OSError:
                pass  # an interface that is down, or full: lost, too


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        plain(sys.argv[2])
    else:
        carry(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
