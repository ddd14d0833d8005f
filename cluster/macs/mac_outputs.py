"""What the commands of a Mac (and a few of Linux) print, turned into facts. Pure: text in, values of hosts.py out.

Every function takes any text: what is not there is left out, never guessed. Nothing depends on the language of the
system: numbers, keys and device names are read, words are not. probe.py runs the commands and calls these.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator
from typing import Any

from cluster.macs.hosts import Address, Peer, Port, Power, RdmaDevice

RDMA_PROTOCOL = 64087  # the service that a Mac with RDMA switched on advertises over a cable
RECEPTACLE = re.compile(r"receptacle_\d+_tag")
DEVICE = re.compile(r"[a-z]+\d+")


def document(text: str, key: str) -> list[dict[str, Any]]:
    """The items of a `system_profiler -json` answer; empty for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    items = found.get(key) if isinstance(found, dict) else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def sysctl(text: str) -> str:
    """The value in "name: value", or in what `-n` prints."""
    return text.strip().rpartition(": ")[2].strip()


def number(text: object) -> int | None:
    """The first whole number in a text."""
    found = re.search(r"\d+", text) if isinstance(text, str) else None
    return int(found[0]) if found else None


def keyed(text: str) -> dict[str, str]:
    """`key: value` lines, as sw_vers prints them."""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def hardware_ports(text: str) -> dict[str, str]:
    """Port name -> device of `networksetup -listallhardwareports`: the first two lines of a block, in any language."""
    ports = {}
    for block in re.split(r"\n\s*\n", text.strip()):
        values = [value.strip() for _, colon, value in (line.partition(":") for line in block.splitlines()) if colon]
        if len(values) >= 2 and DEVICE.fullmatch(values[1]):
            ports[values[0]] = values[1]
    return ports


# ---------------------------------------------------------------- Thunderbolt


def thunderbolt_ports(text: str, interfaces: dict[str, str], guids: dict[str, str]) -> tuple[list[Port], list[str]]:
    """The receptacles by number, and a note for each bus or port that could not be told.

    `interfaces` maps port names to devices; `guids` an RDMA device's node GUID to its name: the second source for the
    device, since that GUID is the bus's switch UID with its bytes reversed.
    """
    ports, notes = [], []
    for bus in document(text, "SPThunderboltDataType"):
        name = str(bus.get("_name", "a bus"))
        tags = [value for key, value in sorted(bus.items()) if RECEPTACLE.fullmatch(key) and isinstance(value, dict)]
        if not tags:
            notes.append(f"{name} names no receptacle")
        for tag in tags:
            receptacle = number(tag.get("receptacle_id_key"))
            if receptacle is None:
                notes.append(f"{name} has a receptacle without a number")
                continue
            device = _device(receptacle, bus, interfaces, guids)
            if not device:
                notes.append(f"Thunderbolt {receptacle} has no network interface of that name")
            ports.append(_port(receptacle, device, bus, tag, alone=len(tags) == 1))
    return sorted(ports, key=lambda port: port.number), notes


def _device(receptacle: int, bus: dict[str, Any], interfaces: dict[str, str], guids: dict[str, str]) -> str:
    for name, device in interfaces.items():
        if re.fullmatch(rf".*Thunderbolt\D*\b{receptacle}", name, re.IGNORECASE):
            return device
    uid = str(bus.get("switch_uid_key", "")).lower().removeprefix("0x")
    reversed_uid = "".join(reversed(re.findall("..", uid))) if len(uid) == 16 else ""
    return guids.get(reversed_uid, "").removeprefix("rdma_")


def _port(receptacle: int, device: str, bus: dict[str, Any], tag: dict[str, Any], *, alone: bool) -> Port:
    status = tag.get("receptacle_status_key")
    items = [item for item in bus.get("_items") or [] if isinstance(item, dict)]
    connected = status == "receptacle_connected" if isinstance(status, str) else bool(items)
    speed = number(tag.get("current_speed_key")) or 0
    here = items if connected or alone else []
    peers = tuple(_peers(here, behind=""))
    attached = next((_name(item) for item in here if not _is_mac(item)), "")
    return Port(
        number=receptacle,
        device=device,
        domain_uuid=str(bus.get("domain_uuid_key", "")).upper(),
        connected=connected,
        speed=speed if connected else 0,
        max_speed=0 if connected else speed,
        peers=peers,
        attached=attached,
    )


def _peers(items: list[dict[str, Any]], behind: str) -> Iterator[Peer]:
    for item in items:
        if _is_mac(item):
            services = [service for service in item.get("services_title") or [] if isinstance(service, dict)]
            yield Peer(
                domain_uuid=str(item["domain_uuid_key"]).upper(),
                name=_name(item),
                model=str(item.get("device_name_key", "")),
                rdma_service=any(_is_rdma(service) for service in services),
                behind=behind,
            )
        inner = [inner for inner in item.get("_items") or [] if isinstance(inner, dict)]
        yield from _peers(inner, behind=behind if _is_mac(item) else _name(item))


def _is_mac(item: dict[str, Any]) -> bool:
    """Whether an item below a bus is another computer: it has a domain of its own; disks, docks, displays have none."""
    return isinstance(item.get("domain_uuid_key"), str)


def _is_rdma(service: dict[str, Any]) -> bool:
    return service.get("protocol_id_key") == RDMA_PROTOCOL or service.get("service_key_key") == "rdma"


def _name(item: dict[str, Any]) -> str:
    return str(item.get("_name") or item.get("device_name_key") or "unknown device")


# ---------------------------------------------------------------- RDMA


def guid_names(ibv_devices: str) -> dict[str, str]:
    """Node GUID -> device of `ibv_devices`."""
    rows = (line.split() for line in ibv_devices.splitlines())
    return {row[1].lower(): row[0] for row in rows if len(row) >= 2 and row[0].startswith("rdma_")}


def rdma_devices(ibv_devinfo: str) -> list[RdmaDevice]:
    """The devices of `ibv_devinfo`, with or without -v."""
    devices = []
    for block in re.split(r"^hca_id:", ibv_devinfo, flags=re.MULTILINE)[1:]:
        name = block.split(None, 1)[0] if block.strip() else ""
        gids = sorted((int(index), gid) for index, gid in re.findall(r"GID\[\s*(\d+)\]:\s*([^\s,]+)", block))
        state = re.search(r"\bstate:\s*(\w+)", block)
        limits = {key: int(value) for key, value in re.findall(r"\b(max_qp|max_mr|max_pd):\s*(\d+)", block)}
        devices.append(RdmaDevice(name, state[1] if state else "", tuple(gid for _, gid in gids), **limits))
    return [device for device in devices if device.name]


# ---------------------------------------------------------------- addresses


def mac_addresses(ifconfig: str) -> list[Address]:
    """IPv4 addresses of a Mac's `ifconfig`, loopback left out."""
    found = []
    for block in re.split(r"^(?=\S)", ifconfig, flags=re.MULTILINE):
        interface = block.partition(":")[0]
        for ip, mask in re.findall(r"^\s+inet (\S+)(?: --> \S+)? netmask (0x[0-9a-f]{8})", block, re.MULTILINE):
            found.append(_address(interface, ip, int(mask, 16).bit_count()))
    return [address for address in found if address]


def linux_addresses(ip_address: str) -> list[Address]:
    """IPv4 addresses of `ip -o -4 address`, loopback left out."""
    rows = re.findall(r"^\d+:\s+(\S+)\s+inet (\S+?)/(\d+)", ip_address, re.MULTILINE)
    return [address for address in (_address(name, ip, int(prefix)) for name, ip, prefix in rows) if address]


def _address(interface: str, ip: str, prefix: int) -> Address | None:
    try:
        loopback = ipaddress.IPv4Address(ip).is_loopback
    except ValueError:
        return None
    return None if loopback else Address(interface, ip, prefix)


def bridge(ifconfig_bridge0: str) -> tuple[tuple[str, ...], bool]:
    """The members of bridge0, and whether it is up."""
    flags = re.search(r"^bridge0: flags=\w+<([^>]*)>", ifconfig_bridge0)
    members = re.findall(r"^\s*member: (\S+)", ifconfig_bridge0, re.MULTILINE)
    return tuple(members), flags is not None and "UP" in flags[1].split(",")


# ---------------------------------------------------------------- memory, disk, power


def available_memory(vm_stat: str) -> int | None:
    """Bytes that a new process could have: free, speculative and inactive pages."""
    size = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = dict(re.findall(r"^Pages (free|speculative|inactive):\s+(\d+)", vm_stat, re.MULTILINE))
    return int(size[1]) * sum(map(int, pages.values())) if size and "free" in pages else None


def linux_memory(meminfo: str) -> tuple[int, int | None]:
    """All and available bytes of /proc/meminfo; 0 when it does not tell."""
    rows = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", meminfo, re.MULTILINE))
    available = int(rows["MemAvailable"]) * 1024 if "MemAvailable" in rows else None
    return int(rows.get("MemTotal", 0)) * 1024, available


def disk_free(df: str) -> int | None:
    """Bytes free on the disk of `df -Pk`'s last line."""
    rows = re.findall(r"\s\d+\s+\d+\s+(\d+)\s+\d+%", df)
    return int(rows[-1]) * 1024 if rows else None


def power(pmset: str) -> Power | None:
    """The settings in use of `pmset -g`."""
    rows = dict(re.findall(r"^\s*(sleep|disksleep|autorestart)\s+(\d+)", pmset, re.MULTILINE))
    if "sleep" not in rows:
        return None
    restart = rows["autorestart"] != "0" if "autorestart" in rows else None
    return Power(int(rows["sleep"]), int(rows.get("disksleep", 0)), restart)


def firewall(socketfilterfw: str) -> bool | None:
    """Whether the application firewall is on."""
    state = re.search(r"State = (\d)", socketfilterfw)
    return state[1] != "0" if state else None
