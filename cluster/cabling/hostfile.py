"""A hostfile in mlx's own format: read, check, write. Who the ranks are, in order, and which devices join them.

mlx.launch rejects few faults itself; the rest hang or corrupt later. So `parse` and `check` tell all of them at once,
before anything is x
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from cluster.cabling.addresses import VPN, ipv4_of
from cluster.cabling.topology import MESH_HOSTS, RING_CABLES, cycle
from cluster.errors import HostfileInvalid, HostfileUnreadable, HostfileUnwritable

BACKENDS = ("ring", "jaccl", "jaccl-ring", "nccl")
KEYS = ("backend", "envs", "hosts")
HOST_KEYS = ("ssh", "ips", "rdma")
DEVICE = re.compile(r"rdma_\w+")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
LAUNCHER_SETS = re.compile(
    r"(MLX_RANK|MLX_WORLD_SIZE|MLX_HOSTFILE|MLX_IBV_\w+|MLX_JACCL_\w+|JACCL_\w+|NCCL_HOST_IP|NCCL_PORT)"
)


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One rank. `ssh` is what ssh calls it, `rdma[j]` the devices that lead to rank j (None: none, and itself)."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[tuple[str, ...] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Hostfile:
    """`backend` is one of BACKENDS, or "" for mlx's own choice (ring on a Mac); a host's rank is its position."""

    hosts: tuple[HostEntry, ...]
    backend: str = ""
    envs: tuple[str, ...] = ()

    @property
    def local(self) -> bool:
        """Whether every rank is on one machine and talks over loopback."""
        ips = [ip for host in self.hosts for ip in host.ips]
        return len({host.ssh for host in self.hosts}) == 1 and bool(ips) and all(map(_is_loopback, ips))


def read(path: Path) -> Hostfile:
    """The checked hostfile at `path`. Raises HostfileUnreadable, or HostfileInvalid with every fault in it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HostfileUnreadable(
            f"{path}: {error.strerror or error}.", hint=f"`cluster hostfile -o {path}` writes one."
        ) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HostfileInvalid(str(path), [f"byte {error.start}: not UTF-8 text"]) from error
    return parse(text, str(path))


def parse(text: str, name: str) -> Hostfile:
    """The hostfile in `text`, called `name` in messages. Raises HostfileInvalid with every fault."""
    faults: list[str] = []
    try:
        data = json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, faults))
    except json.JSONDecodeError as error:
        fault = f"line {error.lineno} column {error.colno}: not JSON ({error.msg})"
        raise HostfileInvalid(name, [fault]) from error
    except RecursionError as error:
        raise HostfileInvalid(name, ["not a hostfile: nested too deeply"]) from error
    hostfile, unread = _hostfile(data, faults)
    faults += _semantic_faults(hostfile, unread)
    if faults:
        raise HostfileInvalid(name, faults)
    return hostfile


def check(hostfile: Hostfile) -> list[str]:
    """Every fault that shows without looking at the hosts, in the order of the file; empty when it is right."""
    return _semantic_faults(hostfile, frozenset())


def notes(hostfile: Hostfile) -> list[str]:
    """What is no fault but worth knowing: cables that JACCL leaves unused, an address that is hardly a LAN's."""
    found = []
    hosts = hostfile.hosts
    if not hostfile.backend.startswith("jaccl") and any(any(host.rdma) for host in hosts):
        found.append(f'"rdma" is ignored with the backend {hostfile.backend or "left out"}; for RDMA name jaccl')
    counts = {pair: len(link) for pair in combinations(range(len(hosts)), 2) if (link := _link(hosts, *pair))}
    if hostfile.backend == "jaccl" and counts and len(set(counts.values())) > 1:
        least = min(counts.values())
        few = ", ".join(f"{hosts[i].ssh}-{hosts[j].ssh}" for (i, j), count in counts.items() if count == least)
        used = "1 cable per link is used" if least == 1 else f"{least} cables per link are used"
        found.append(f"only {used}: {few} has no more")
    if hostfile.backend.startswith("jaccl") and hosts and hosts[0].ips:
        address = ipv4_of(hosts[0].ips[0])
        if address is not None and address in VPN:
            found.append(f"host {hosts[0].ssh} (rank 0): {address} looks like a VPN's address; prefer the LAN's")
        if address is not None and address.is_link_local:
            found.append(f"host {hosts[0].ssh} (rank 0): {address} is link-local and may change after a replug")
    return found


def dump(hostfile: Hostfile) -> str:
    """The text of the file, one host per line; a single cable as a string, as mlx writes it."""
    rows = [
        json.dumps({"ssh": host.ssh, "ips": host.ips, "rdma": [_cell(devices) for devices in host.rdma]})
        for host in hostfile.hosts
    ]
    head = f'{{"backend": {json.dumps(hostfile.backend)}, "envs": {json.dumps(hostfile.envs)}, "hosts": [\n  '
    return head + ",\n  ".join(rows) + "\n]}\n"


def write(hostfile: Hostfile, path: Path) -> None:
    """Replace the file at `path` in one step. Raises HostfileUnwritable; what was there then stays."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(dump(hostfile), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise HostfileUnwritable(
            f"{path} cannot be written: {error.strerror or error}.", hint="Give another path with -o."
        ) from error


# ---------------------------------------------------------------- the structure of the file


def _object(pairs: list[tuple[str, Any]], faults: list[str]) -> dict[str, Any]:
    faults += [f'the key "{key}" stands twice' for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    return dict(pairs)


def _hostfile(data: Any, faults: list[str]) -> tuple[Hostfile, frozenset[tuple[int, str]]]:
    """What can be made of the JSON, and which (host, field) could not be read and must not be judged further."""
    if isinstance(data, list):
        data = {"hosts": data}
    if not isinstance(data, dict):
        faults.append('must be a list of hosts, or an object with "hosts"')
        return Hostfile(()), frozenset({(-1, "hosts")})
    _unknown_keys(data, KEYS, "", faults)
    unread: set[tuple[int, str]] = set()
    backend = _backend(data.get("backend"), faults, unread)
    envs = _envs(data.get("envs"), faults)
    rows = data.get("hosts") or []
    if not isinstance(rows, list):
        faults.append('"hosts" must be a list')
        unread.add((-1, "hosts"))
        rows = []
    hosts = tuple(_host(i, row, faults, unread) for i, row in enumerate(rows))
    return Hostfile(hosts, backend, envs), frozenset(unread)


def _backend(value: Any, faults: list[str], unread: set[tuple[int, str]]) -> str:
    """The backend; where it is misspelt, the one that is judged by: the nearest, or none."""
    if value is None or value == "" or value in BACKENDS:
        return value or ""
    near = difflib.get_close_matches(value, BACKENDS, 1) if isinstance(value, str) else []
    remedy = f'did you mean "{near[0]}"?' if near else f"it is one of {', '.join(BACKENDS)}"
    faults.append(f"backend {json.dumps(value)}: {remedy}")
    if not near:
        unread.add((-1, "backend"))
    return near[0] if near else ""


def _envs(value: Any, faults: list[str]) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        faults.append(f'envs must be a list of "NAME=VALUE"; got {json.dumps(value)}')
        return ()
    wrong = [item for item in value if not (isinstance(item, str) and VARIABLE.fullmatch(item))]
    faults += [f'envs must be a list of "NAME=VALUE"; got {json.dumps(item)} in it' for item in wrong]
    return tuple(item for item in value if isinstance(item, str) and VARIABLE.fullmatch(item))


def _host(rank: int, row: Any, faults: list[str], unread: set[tuple[int, str]]) -> HostEntry:
    label = f"host {rank + 1}"
    if not isinstance(row, dict):
        faults.append(f'{label} must be an object with "ssh", "ips" and "rdma"; got {json.dumps(row)}')
        unread |= {(rank, key) for key in HOST_KEYS}
        return HostEntry(label)
    ssh = row.get("ssh")
    if "ssh" not in row:
        faults.append(f'{label}: "ssh" is missing')
    elif not (isinstance(ssh, str) and re.fullmatch(r"[^\s-]\S*", ssh)):
        faults.append(f'{label}: "ssh" must be a host name or address; got {json.dumps(ssh)}')
    else:
        label = f"host {ssh}"
    if label == f"host {rank + 1}":
        unread.add((rank, "ssh"))
    _unknown_keys(row, HOST_KEYS, f"{label}: ", faults)
    ips = row.get("ips", [])
    if not isinstance(ips, list) or not all(isinstance(ip, str) for ip in ips):
        faults.append(f'{label}: "ips" must be a list of addresses in quotes; got {json.dumps(ips)}')
        unread.add((rank, "ips"))
        ips = []
    return HostEntry(
        label if (rank, "ssh") in unread else str(ssh),
        tuple(ips),
        _rdma(rank, label, row.get("rdma", []), faults, unread),
    )


def _rdma(
    rank: int, label: str, row: Any, faults: list[str], unread: set[tuple[int, str]]
) -> tuple[tuple[str, ...] | None, ...]:
    if not isinstance(row, list):
        faults.append(f'{label}: "rdma" must be a list with an entry per host; got {json.dumps(row)}')
        unread.add((rank, "rdma"))
        return ()
    cells: list[tuple[str, ...] | None] = []
    for number, cell in enumerate(row, 1):
        names = [cell] if isinstance(cell, str) else cell
        if cell is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            faults.append(
                f'{label}: "rdma" entry {number} must be null, a device or a list of devices; got {json.dumps(cell)}'
            )
            unread.add((rank, "rdma"))
        elif names == []:
            faults.append(f'{label}: "rdma" entry {number} is an empty list; write null where there is no cable')
            unread.add((rank, "rdma"))
        cells.append(tuple(names) if isinstance(names, list) else None)
    return tuple(cells)


def _unknown_keys(row: dict[str, Any], known: tuple[str, ...], label: str, faults: list[str]) -> None:
    faults += [f'{label}unknown key "{key}" (known: {", ".join(known)})' for key in row if key not in known]


# ---------------------------------------------------------------- its meaning


def _semantic_faults(hostfile: Hostfile, unread: frozenset[tuple[int, str]]) -> list[str]:
    hosts = hostfile.hosts
    if not hosts:
        return [] if (-1, "hosts") in unread else ["no hosts"]
    faults = [f"envs: {name} is set by the launcher" for name in _names(hostfile.envs) if LAUNCHER_SETS.fullmatch(name)]
    faults += [f"envs: {name} is set twice" for name, count in Counter(_names(hostfile.envs)).items() if count > 1]
    if hostfile.backend.startswith("jaccl"):
        return faults + _jaccl_faults(hostfile, unread)
    if hostfile.backend == "nccl":
        return faults + _rank0_faults(hostfile, unread)
    if (-1, "backend") in unread:
        return faults
    return faults + _ring_faults(hostfile, unread)


def _names(envs: tuple[str, ...]) -> list[str]:
    return [item.partition("=")[0] for item in envs]


def _ring_faults(hostfile: Hostfile, unread: frozenset[tuple[int, str]]) -> list[str]:
    hosts = hostfile.hosts
    if len(hosts) == 1:
        return []
    faults = [] if hostfile.local else _duplicates(hosts, unread, "one rank per Mac, unless all are 127.0.0.1")
    for rank, host in enumerate(hosts):
        if (rank, "ips") in unread:
            continue
        if not host.ips:
            faults.append(f'host {host.ssh}: "ips" is empty; the ring needs an address of every host')
        faults += [fault for ip in host.ips if (fault := _address_fault(hostfile, rank, ip))]
    if not hostfile.local:
        owners: dict[str, int] = {}
        for rank, host in enumerate(hosts):
            for ip in host.ips:
                if owners.setdefault(ip, rank) != rank:
                    faults.append(f"hosts {hosts[owners[ip]].ssh} and {host.ssh} both have {ip}")
    return faults


def _jaccl_faults(hostfile: Hostfile, unread: frozenset[tuple[int, str]]) -> list[str]:
    hosts, ring = hostfile.hosts, hostfile.backend == "jaccl-ring"
    if len(hosts) == 1:
        return ["jaccl needs at least 2 hosts; leave the backend out to run on one"]
    faults = _duplicates(hosts, unread, "one rank per Mac with jaccl") + _rank0_faults(hostfile, unread)
    if len(hosts) > MESH_HOSTS and not ring:
        faults.append(f"a jaccl mesh takes at most {MESH_HOSTS} Macs ({len(hosts)} given); use jaccl-ring")
    whole = True
    for rank, host in enumerate(hosts):
        if (rank, "rdma") in unread:
            whole = False
        elif len(host.rdma) != len(hosts):
            faults.append(f'host {host.ssh}: "rdma" has {len(host.rdma)} entries for {len(hosts)} hosts')
            whole = False
        else:
            faults += _row_faults(hosts, rank)
    if whole:
        faults += _pair_faults(hosts)
        faults += _ring_link_faults(hosts) if ring else _mesh_link_faults(hosts)
    return faults


def _row_faults(hosts: tuple[HostEntry, ...], rank: int) -> list[str]:
    host, faults = hosts[rank], []
    leads: dict[str, str] = {}
    for peer, names in enumerate(host.rdma):
        if peer == rank and names is not None:
            faults.append(f'host {host.ssh}: "rdma" entry {rank + 1} is {host.ssh} itself and must be null')
            continue
        way = f"{host.ssh} -> {hosts[peer].ssh}"
        for name in names or ():
            if not DEVICE.fullmatch(name):
                near = f' (did you mean "rdma_{name}"?)' if re.fullmatch(r"en\d+", name) else ""
                faults.append(f"host {way}: {json.dumps(name)} is not an RDMA device{near}")
            elif name in leads:
                where = f"for {leads[name]} and for {hosts[peer].ssh}" if leads[name] != hosts[peer].ssh else "twice"
                faults.append(f"{host.ssh}: {name} is listed {where}; a port has one cable")
            leads[name] = hosts[peer].ssh
    return faults


def _pair_faults(hosts: tuple[HostEntry, ...]) -> list[str]:
    faults = []
    for i, j in combinations(range(len(hosts)), 2):
        there, back = hosts[i].rdma[j], hosts[j].rdma[i]
        a, b = hosts[i].ssh, hosts[j].ssh
        if (there is None) != (back is None):
            lister, silent, names = (a, b, there) if there else (b, a, back)
            faults.append(
                f"{lister} lists {', '.join(names or ())} for {silent}, but {silent} lists nothing for {lister}"
            )
        elif there and back and len(there) != len(back):
            faults.append(f"{a} -> {b} has {_cables(there)}, {b} -> {a} has {len(back)}")
    return faults


def _mesh_link_faults(hosts: tuple[HostEntry, ...]) -> list[str]:
    pairs = combinations(range(len(hosts)), 2)
    missing = [(i, j) for i, j in pairs if hosts[i].rdma[j] is None and hosts[j].rdma[i] is None]
    order = _working_order(hosts) if missing else None
    other = f"use jaccl-ring in the order {order}, or add a cable" if order else "add a cable"
    return [f"{hosts[i].ssh} and {hosts[j].ssh} have no cable: a mesh needs every pair; {other}" for i, j in missing]


def _ring_link_faults(hosts: tuple[HostEntry, ...]) -> list[str]:
    n = len(hosts)
    pairs = [(i, (i + 1) % n) for i in range(n if n > 2 else 1)]
    missing = [(i, j) for i, j in pairs if hosts[i].rdma[j] is None and hosts[j].rdma[i] is None]
    order = _working_order(hosts) if missing else None
    other = f"a working order is {order}" if order else "no other order works either: add a cable"
    faults = [
        f"jaccl-ring: {hosts[i].ssh} (rank {i}) and {hosts[j].ssh} (rank {j}) are neighbours but have no cable; {other}"
        for i, j in missing
    ]
    counts = {(i, j): len(link) for i, j in pairs if (link := _link(hosts, i, j))}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{hosts[i].ssh}-{hosts[j].ssh} has {count}" for (i, j), count in counts.items())
        least = min(counts.values())
        faults.append(f"jaccl-ring needs the same number of cables on every link: {shown}; list {least} on each")
    most = f"jaccl-ring uses at most {RING_CABLES} cables per link"
    faults += [
        f"{hosts[i].ssh} -> {hosts[j].ssh}: {most} ({count} given)"
        for (i, j), count in counts.items()
        if count > RING_CABLES
    ]
    return faults


def _working_order(hosts: tuple[HostEntry, ...]) -> str:
    linked = [{j for j in range(len(hosts)) if j != i and _link(hosts, i, j)} for i in range(len(hosts))]
    order = cycle(linked)
    return ", ".join(hosts[i].ssh for i in order) if order else ""


def _link(hosts: tuple[HostEntry, ...], i: int, j: int) -> tuple[str, ...]:
    """Host i's devices that lead to host j, if both name each other."""
    there = hosts[i].rdma[j] if j < len(hosts[i].rdma) else None
    back = hosts[j].rdma[i] if i < len(hosts[j].rdma) else None
    return there if there and back else ()


def _cables(names: tuple[str, ...]) -> str:
    return "1 cable" if len(names) == 1 else f"{len(names)} cables"


def _cell(devices: tuple[str, ...] | None) -> Any:
    return devices[0] if devices is not None and len(devices) == 1 else devices


# ---------------------------------------------------------------- names and addresses


def _duplicates(hosts: tuple[HostEntry, ...], unread: frozenset[tuple[int, str]], rule: str) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        if (rank, "ssh") not in unread:
            ranks.setdefault(host.ssh, []).append(rank)
    faults = []
    for ssh, same in ranks.items():
        numbers = [str(rank + 1) for rank in same]
        all_of_them = "both" if len(same) == 2 else "all"
        if len(same) > 1:
            faults.append(
                f"hosts {', '.join(numbers[:-1])} and {numbers[-1]} are {all_of_them} {json.dumps(ssh)}: {rule}"
            )
    return faults


def _rank0_faults(hostfile: Hostfile, unread: frozenset[tuple[int, str]]) -> list[str]:
    first = hostfile.hosts[0]
    if (0, "ips") in unread:
        return []
    if not first.ips:
        return [f'host {first.ssh} (rank 0): "ips" is empty; the others need an IPv4 address of rank 0']
    addresses = [(rank, ip) for rank, host in enumerate(hostfile.hosts) for ip in host.ips]
    return [fault for rank, ip in addresses if (fault := _address_fault(hostfile, rank, ip))]


def _address_fault(hostfile: Hostfile, rank: int, ip: str) -> str:
    """What is wrong with an address of a host, or "". Where rank 0's is the meeting point, the others' matter less."""
    hosts, local = hostfile.hosts, hostfile.local and not hostfile.backend.startswith("jaccl")
    host = hosts[rank]
    label = f"host {host.ssh} (rank {rank})"
    address = ipv4_of(ip)
    if address is None:
        return f"{label}: {json.dumps(ip)} is no IPv4 address"
    other = next((peer.ssh for peer in hosts if peer.ssh != host.ssh), "the other rank")
    everyone_link_local = all(peer.ips and all(map(_is_link_local, peer.ips)) for peer in hosts)
    if address.is_unspecified or address.is_multicast or ip == "255.255.255.255":
        return f"{label}: {ip} is not the address of one host"
    meeting = rank == 0 or hostfile.backend in ("", "ring")
    if meeting and (
        (address.is_loopback and not local and len(hosts) > 1) or (address.is_link_local and not everyone_link_local)
    ):
        return f"{label}: {ip} cannot be reached from {other}"
    return ""


def _is_loopback(text: str) -> bool:
    address = ipv4_of(text)
    return address is not None and address.is_loopback


def _is_link_local(text: str) -> bool:
    address = ipv4_of(text)
    return address is not None and address.is_link_local
