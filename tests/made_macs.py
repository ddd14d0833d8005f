"""Macs made for a test: what they are is said, cables are plugged, and everything works until something is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.macs.hosts import Address, Host, Peer, Port, Power, RdmaDevice, Versions

CHIPS = {
    "mini": ("Apple M4 Pro", "Mac16,11", "Mac mini", 3, 64),
    "studio": ("Apple M3 Ultra", "Mac15,14", "Mac Studio", 6, 512),
    "many ports": ("Apple M9 Max", "Mac99,1", "Mac Pro", 8, 512),
    "old studio": ("Apple M1 Max", "Mac13,1", "Mac Studio", 4, 64),
}


class Desk:
    """Macs by name. A cable sets speeds, peers, RDMA devices and a /30 at both ends."""

    def __init__(self, *names: str, kind: str = "mini") -> None:
        self._hosts: dict[str, Host] = {}
        self._cables = 0
        for name in names:
            self.add(name, kind)

    def add(self, name: str, kind: str = "mini", **changes: Any) -> Desk:
        chip, model, model_name, ports, gigabytes = CHIPS[kind]
        fast = kind != "old studio"
        numbers = range(1, ports + 1)
        lan = f"10.0.1.{len(self._hosts) + 11}"
        host = Host(
            name=name,
            ssh=name,
            uuid=f"UUID-{name}",
            model=model,
            model_name=model_name,
            chip=chip,
            memory_bytes=gigabytes << 30,
            wired_limit_mb=0,
            macos="26.5.1",
            build="25F80",
            ports=tuple(Port(n, f"en{n + 1}", f"{name}-{n}", False, 0, 120 if fast else 40) for n in numbers),
            rdma_enabled=fast,
            rdma_devices=tuple(
                RdmaDevice(f"rdma_en{n + 1}", "PORT_DOWN", (f"fe80::{n}",), 11, 100, 11) for n in numbers if fast
            ),
            interfaces={"Ethernet": "en0", "Wi-Fi": "en1"} | {f"Thunderbolt {n}": f"en{n + 1}" for n in numbers},
            addresses=(Address("lo0", "127.0.0.1", 8), Address("en0", lan, 24)),
            power=Power(0, 10, True),
            firewall=False,
            versions=Versions("3.11.9", "0.32.4", "0.32.2", "0.1.0"),
        )
        self._hosts[name] = replace(host, **changes)
        return self

    def plug(self, a: str, a_port: int, b: str, b_port: int, *, speed: int = 80, behind: str = "") -> Desk:
        self._cables += 1
        for k, (name, number, other, other_number) in enumerate(((a, a_port, b, b_port), (b, b_port, a, a_port)), 1):
            there = self._hosts[other]
            service = bool(there.rdma_devices) and there.rdma_enabled is not False
            peer = Peer(f"{other}-{other_number}", there.model_name, there.model, service, behind)
            self.port(name, number, connected=True, speed=speed, max_speed=0, peers=(peer,))
            ip = f"172.20.{self._cables}.{k}"
            self.device(name, number, state="PORT_ACTIVE", gids=(f"fe80::{number}", f"::ffff:{ip}"))
            addresses = self._hosts[name].addresses
            self.change(name, addresses=(*addresses, Address(f"en{number + 1}", ip, 30)))
        return self

    def change(self, name: str, /, **changes: Any) -> Desk:
        self._hosts[name] = replace(self._hosts[name], **changes)
        return self

    def port(self, name: str, number: int, **changes: Any) -> Desk:
        ports = self._hosts[name].ports
        return self.change(name, ports=tuple(replace(p, **changes) if p.number == number else p for p in ports))

    def device(self, name: str, number: int, **changes: Any) -> Desk:
        devices = self._hosts[name].rdma_devices
        own = f"rdma_en{number + 1}"
        return self.change(name, rdma_devices=tuple(replace(d, **changes) if d.name == own else d for d in devices))

    def without_service(self, name: str) -> Desk:
        """No other Mac sees an RDMA service of this one."""
        for other, host in self._hosts.items():
            ports = tuple(
                replace(
                    port,
                    peers=tuple(
                        replace(peer, rdma_service=False) if peer.domain_uuid.startswith(f"{name}-") else peer
                        for peer in port.peers
                    ),
                )
                for port in host.ports
            )
            self.change(other, ports=ports)
        return self

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(self._hosts.values())


def pair() -> Desk:
    """Two minis, one cable, nothing to complain about."""
    return Desk("a", "b").plug("a", 3, "b", 2)


def ring(n: int) -> Desk:
    """n minis in a ring: port 1 to the one before, port 2 to the next."""
    names = [f"m{i}" for i in range(n)]
    desk = Desk(*names)
    for i, name in enumerate(names):
        desk.plug(name, 2, names[(i + 1) % n], 1)
    return desk


def mesh(n: int, kind: str = "studio", cables: int = 1, first_port: int = 1) -> Desk:
    """n Macs, every two joined by so many cables."""
    names = [f"m{i}" for i in range(n)]
    desk = Desk(*names, kind=kind)
    free = {name: first_port for name in names}
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            for _ in range(cables):
                desk.plug(a, free[a], b, free[b])
                free[a] += 1
                free[b] += 1
    return desk


def bridged(desk: Desk, name: str, *devices: str) -> Desk:
    return desk.change(name, bridge_members=devices, bridge_up=True)


def bridged_ring() -> Desk:
    desk = ring(3)
    for i in range(3):
        bridged(desk, f"m{i}", "en2", "en3", "en4")
    return desk


def readdressed(desk: Desk, name: str, interface: str, ip: str) -> Desk:
    kept = tuple(address for address in desk[name].addresses if address.interface != interface)
    return desk.change(name, addresses=(*kept, Address(interface, ip, 30 if interface != "en0" else 24)))
