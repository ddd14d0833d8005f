"""Tables of machines for the terminal: who was found, what was seen. Beside view.py the only user of rich.

`cli_macs.py` prints them; `--json` has every fact, these have what a person looks for first.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from cluster.macs.discover import Found
from cluster.macs.hosts import Host, Port

UNKNOWN = "-"


def found_table(found: Sequence[Found]) -> Table:
    """Who is there and whether ssh gets in."""
    table = _table("host", "found by", "model", "addresses", "also called", "ssh")
    for machine in found:
        ways = [way for way, holds in (("named", machine.configured), ("Bonjour", machine.bonjour)) if holds]
        trouble = f"{machine.trouble}\n{machine.hint}".strip()
        also, addresses = ", ".join(machine.also), ", ".join(machine.addresses)
        cells = (machine.name, ", ".join(ways), machine.model, addresses, also, trouble or "ok")
        table.add_row(*map(Text, cells))
    return table


def hosts_table(hosts: Sequence[Host]) -> Table:
    """One machine a column, so that what differs stands side by side."""
    table = _table("", *(host.name for host in hosts))
    rows = {
        "model": [f"{host.model_name} {host.model}".strip() for host in hosts],
        "chip": [f"{host.chip}, {host.gpu_cores} GPU cores" if host.gpu_cores else host.chip for host in hosts],
        "memory": [_size(host.memory_bytes) for host in hosts],
        "available": [_size(host.available_bytes) for host in hosts],
        "wired limit": [_wired(host) for host in hosts],
        "system": [_system(host) for host in hosts],
        "virtual": ["yes" if host.virtual else "no" for host in hosts],
        "Thunderbolt": ["\n".join(map(_port, host.ports)) for host in hosts],
        "RDMA": [_rdma(host) for host in hosts],
        "addresses": ["\n".join(f"{a.interface} {a.ip}/{a.prefix}" for a in host.addresses) for host in hosts],
        "bridge0": [_bridge(host) for host in hosts],
        "sleep": [_sleep(host) for host in hosts],
        "firewall": [{True: "on", False: "off", None: ""}[host.firewall] for host in hosts],
        "disk free": [_size(host.disk_free_bytes) for host in hosts],
        "python": [host.versions.python for host in hosts],
        "mlx": [host.versions.mlx for host in hosts],
        "mlx-lm": [host.versions.mlx_lm for host in hosts],
        "cluster": [host.versions.cluster for host in hosts],
        "ssh -o BatchMode": [host.batch_ssh for host in hosts],
        "not read": ["\n".join(f"{unread.command}: {unread.reason}" for unread in host.unread) for host in hosts],
    }
    for title, cells in rows.items():
        if any(cells):
            table.add_row(title, *(Text(cell or UNKNOWN) for cell in cells))
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(Text(title), overflow="fold")
    return table


def _size(size: int | None) -> str:
    if not size:
        return ""
    return f"{size / (1 << 30):.0f} GiB" if size >= 1 << 34 else f"{size / (1 << 30):.1f} GiB"


def _wired(host: Host) -> str:
    if host.wired_limit_mb is None:
        return ""
    return f"{host.wired_limit_mb} MB" if host.wired_limit_mb else "macOS's own"


def _system(host: Host) -> str:
    return f"macOS {host.macos} ({host.build})" if host.macos else host.system


def _port(port: Port) -> str:
    where = f"{port.number} {port.device or '?'}"
    peers = [f"{peer.name}{f' behind {peer.behind}' if peer.behind else ''}" for peer in port.peers]
    there = ", ".join([*peers, *([port.attached] if port.attached else [])])
    if not port.connected:
        return f"{where}: free"
    return f"{where}: {port.speed} Gb/s{f' to {there}' if there else ''}"


def _rdma(host: Host) -> str:
    switch = {True: "enabled", False: "disabled", None: ""}[host.rdma_enabled]
    active = [device.name for device in host.rdma_devices if device.active]
    return "\n".join(text for text in (switch, f"active: {', '.join(active)}" if active else "") if text)


def _bridge(host: Host) -> str:
    return f"{', '.join(host.bridge_members)} ({'up' if host.bridge_up else 'down'})" if host.bridge_members else ""


def _sleep(host: Host) -> str:
    if host.power is None:
        return ""
    return f"after {host.power.sleep_min} min" if host.power.sleep_min else "never"
