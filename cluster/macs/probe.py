"""What one machine is: the commands that are run on it and the `Host` that follows; for all at once, or replayed.

It changes nothing anywhere. A command that fails leaves its facts empty and a line in `Host.unread`; only a host that
cannot be reached, or stops answering, is no Host at all. What the outputs mean is in mac_outputs.py. The commands of
`cluster discover | probe | topology | doctor | plan | hostfile` and `up` start here.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError, CommandTimedOut, HostUnreachable, RecordingUnreadable
from cluster.macs import mac_outputs as read
from cluster.macs.hosts import Host, RdmaDevice, Unreachable, Unread, Versions
from cluster.macs.recording import BATCH_SSH, RecordingShell, write_recording
from cluster.macs.ssh import (
    CONNECT_S,
    LOCAL_NAMES,
    MISSING,
    NOT_RECORDED,
    RecordedShell,
    Result,
    Runner,
    batch_login,
    on_all,
    open_shell,
)
from cluster.vm.facts import virtual_machine

COMMAND_S = 20.0
HOST_S = 90.0  # for all commands of one host together
PYTHON = "python3"
ASK_VERSIONS = """\
import json, platform
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
names = ("mlx", "mlx-lm", "cluster")
print(json.dumps({"python": platform.python_version(), **{name: version(name) for name in names}}))
"""
SYSTEM = {"uname": ("uname", "-s")}
EVERYWHERE: dict[str, tuple[str, ...]] = {
    "df": ("df", "-Pk", "."),
    "versions": (PYTHON, "-c", ASK_VERSIONS),
    "mlx_version": (PYTHON, "-c", "import mlx.core as mx; print(mx.__version__)"),
}
MAC: dict[str, tuple[str, ...]] = {
    "hardware": ("system_profiler", "SPHardwareDataType", "-json"),
    "thunderbolt": ("system_profiler", "SPThunderboltDataType", "-json"),
    "displays": ("system_profiler", "SPDisplaysDataType", "-json"),
    "hardwareports": ("networksetup", "-listallhardwareports"),
    "ibv_devices": ("ibv_devices",),
    "ibv_devinfo_v": ("ibv_devinfo", "-v"),
    "rdma_ctl": ("rdma_ctl", "status"),
    "sw_vers": ("sw_vers",),
    "memsize": ("sysctl", "-n", "hw.memsize"),
    "hw_model": ("sysctl", "-n", "hw.model"),
    "cpu_brand": ("sysctl", "machdep.cpu.brand_string"),
    "wired_limit": ("sysctl", "iogpu.wired_limit_mb"),
    "hv_vmm": ("sysctl", "kern.hv_vmm_present"),
    "ifconfig": ("ifconfig",),
    "ifconfig_bridge0": ("ifconfig", "bridge0"),
    "pmset": ("pmset", "-g"),
    "vm_stat": ("vm_stat",),
    "firewall": ("/usr/libexec/ApplicationFirewall/socketfilterfw", "--getglobalstate"),
}
LINUX: dict[str, tuple[str, ...]] = {
    "machine_id": ("cat", "/etc/machine-id"),
    "meminfo": ("cat", "/proc/meminfo"),
    "cpuinfo": ("cat", "/proc/cpuinfo"),
    "os_release": ("cat", "/etc/os-release"),
    "addresses": ("ip", "-o", "-4", "address"),
}
RECORD_ONLY: dict[str, tuple[str, ...]] = {  # read by people and by other tools, not here
    "serviceorder": ("networksetup", "-listnetworkserviceorder"),
    "ibv_devinfo": ("ibv_devinfo",),
    "getifaddr_en0": ("ipconfig", "getifaddr", "en0"),
    "getifaddr_en1": ("ipconfig", "getifaddr", "en1"),
}
# A failure of these is an answer: there is no such device, interface or setting.
FAILURE_TELLS = ("ibv_devinfo_v", "ifconfig_bridge0", "wired_limit", "hv_vmm", "machine_id")


def commands(python: str = PYTHON) -> dict[str, tuple[str, ...]]:
    """Every command that a probe may run, by the name under which it is recorded."""
    every = SYSTEM | MAC | LINUX | RECORD_ONLY | EVERYWHERE | {BATCH_SSH: (BATCH_SSH,)}
    return {name: (python, *argv[1:]) if argv[0] == PYTHON else argv for name, argv in every.items()}


# ---------------------------------------------------------------- hosts


def probe_hosts(
    names: Sequence[str],
    *,
    pythons: Mapping[str, str] | None = None,
    save: Path | None = None,
    connect_s: float = CONNECT_S,
) -> tuple[list[Host], list[Unreachable]]:
    """Look at all hosts at once. A machine that appears under a second name is told as unreachable by that name.

    `pythons` names the interpreter of a host's ranks where it is not python3. `save`: record there what they printed.
    `connect_s`: how long a host has to let us in.
    """
    recorded: dict[str, RecordingShell] = {}

    def look(name: str) -> Host:
        with open_shell(name, connect_s) as shell:
            local = name in LOCAL_NAMES  # there, mlx.launch needs no ssh, and ranks run on this interpreter
            python = (pythons or {}).get(name, sys.executable if local else PYTHON)
            said = "" if local else batch_login(name)
            if save is None:
                return probe(shell, name, python=python, batch_ssh=said)
            recorded[name] = RecordingShell(shell, commands(python))
            recorded[name].said[BATCH_SSH] = Result(255 if said else 0, err=said)
            return probe(recorded[name], name, python=python, batch_ssh=said, everything=True)

    outcomes = on_all(names, look)
    if save is not None:
        write_recording(save, {name: recorded[name].said for name in names if name in recorded}, commands())
    seen: list[Host] = []
    away: list[Unreachable] = []
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, ClusterError):
            away.append(Unreachable(name, outcome.message, outcome.hint))
        elif same := next((host.name for host in seen if host.uuid and host.uuid == outcome.uuid), ""):
            away.append(Unreachable(name, f"It is the same machine as {same}.", "Leave one of the two names out."))
        else:
            seen.append(outcome)
    return seen, away


def probe_recorded(folder: Path) -> list[Host]:
    """The hosts of a recorded folder: CLUSTER/HOST/COMMAND.out, .err, .rc. Raises RecordingUnreadable."""
    try:
        hosts = sorted(path for path in folder.iterdir() if path.is_dir() and any(path.glob("*.out")))
    except OSError as error:
        raise RecordingUnreadable(f"{folder} cannot be read: {error.strerror}.") from error
    if not hosts:
        raise RecordingUnreadable(
            f"{folder} holds no recorded hosts.",
            hint="It must have a folder per host, as `cluster probe --save` writes.",
        )
    shells = [RecordedShell(host, commands()) for host in hosts]
    return [probe(shell, shell.name, batch_ssh=_recorded_words(shell)) for shell in shells]


def _recorded_words(shell: RecordedShell) -> str:
    said = shell.run(commands()[BATCH_SSH])
    return "" if said.err == NOT_RECORDED else " ".join(said.err.split())


def probe(shell: Runner, name: str, *, python: str = PYTHON, batch_ssh: str = "", everything: bool = False) -> Host:
    """One host. `everything` also runs what is only worth recording. Raises HostUnreachable when it stops answering.

    `python` is the interpreter of its ranks; `batch_ssh` what `ssh.batch_login` said.
    """
    asked = _Asked(shell, commands(python))
    system = asked.first("uname").strip() or "Darwin"  # recordings of Macs may lack it
    facts = _linux(asked) if system == "Linux" else _mac(asked)
    if everything and system != "Linux":
        for extra in RECORD_ONLY:
            asked.record(extra)
    facts |= {"disk_free_bytes": read.disk_free(asked.out("df")), "versions": _versions(asked)}
    return Host(name=name, ssh=name, system=system, batch_ssh=batch_ssh, unread=tuple(asked.unread), **facts)


def identity(shell: Runner) -> tuple[str, str]:
    """The hardware UUID and the model of a host: enough to know it again. "" for what it does not tell."""
    asked = _Asked(shell, commands())
    if asked.first("uname").strip() == "Linux":
        return asked.out("machine_id").strip(), "Linux"
    hardware = next(iter(read.document(asked.out("hardware"), "SPHardwareDataType")), {})
    return str(hardware.get("platform_UUID", "")).upper(), str(hardware.get("machine_name", ""))


# ---------------------------------------------------------------- asking


class _Asked:
    """The answers of one host; what gave none is noted in `unread`."""

    def __init__(self, shell: Runner, table: Mapping[str, Sequence[str]]) -> None:
        self._shell = shell
        self._table = table
        self._until = time.monotonic() + HOST_S
        self.unread: list[Unread] = []

    def first(self, name: str) -> str:
        """What the first command prints. A host that does not answer this one will not answer others."""
        try:
            return self._shell.run(self._table[name], COMMAND_S).out
        except CommandTimedOut as error:
            raise HostUnreachable(
                f"{self._shell.name} lets us in, but does not answer within {COMMAND_S:.0f} s.",
                hint=f"Is it overloaded? Look at it, or restart it. Try: ssh {self._shell.name} uname",
            ) from error

    def out(self, name: str) -> str:
        """What a command prints; "" if it fails."""
        result = self._run(name)
        return result.out if result is not None and result.ok else ""

    def record(self, name: str) -> None:
        """Run what a recording should have and nothing here reads."""
        with contextlib.suppress(CommandTimedOut):
            self._shell.run(self._table[name], COMMAND_S)

    def note(self, name: str, reason: str) -> None:
        self.unread.append(Unread(name, reason))

    def _run(self, name: str) -> Result | None:
        """None: no answer. Whatever failed is noted, unless its failure says something or it was never recorded."""
        left = self._until - time.monotonic()
        if left <= 0:
            self.note(name, f"not asked: the commands before took {HOST_S:.0f} s")
            return None
        try:
            result = self._shell.run(self._table[name], min(COMMAND_S, left))
        except CommandTimedOut as error:
            self.note(name, error.message)
            return None
        if result.rc == MISSING and result.err == NOT_RECORDED:
            return None
        if not result.ok and (result.rc == MISSING or name not in FAILURE_TELLS):
            last = ((result.err or result.out).strip().splitlines() or [""])[-1]
            missing = f"there is no {self._table[name][0]}" if result.rc == MISSING else ""
            self.note(name, missing or last.strip() or f"status {result.rc}")
        return result


def _mac(asked: _Asked) -> dict[str, Any]:
    hardware = next(iter(read.document(asked.out("hardware"), "SPHardwareDataType")), {})
    display = next((item for item in read.document(asked.out("displays"), "SPDisplaysDataType")), {})
    brand, model = asked.out("cpu_brand"), asked.out("hw_model").strip()
    memory = asked.out("memsize").strip()
    said = read.keyed(asked.out("sw_vers"))
    interfaces = read.hardware_ports(asked.out("hardwareports"))
    guids = read.guid_names(asked.out("ibv_devices"))
    ports, notes = read.thunderbolt_ports(asked.out("thunderbolt"), interfaces, guids)
    for note in notes:
        asked.note("thunderbolt", note)
    switch = asked.out("rdma_ctl").strip()
    members, up = read.bridge(asked.out("ifconfig_bridge0"))
    gigabytes = read.number(hardware.get("physical_memory"))
    return {
        "uuid": str(hardware.get("platform_UUID", "")).upper(),
        "model": str(hardware.get("machine_model", "")) or model,
        "model_name": str(hardware.get("machine_name", "")),
        "chip": str(hardware.get("chip_type", "")) or read.sysctl(brand),
        "gpu_cores": read.number(display.get("sppci_cores")) or 0,
        "memory_bytes": int(memory) if memory.isdigit() else (gigabytes or 0) << 30,
        "available_bytes": read.available_memory(asked.out("vm_stat")),
        "wired_limit_mb": read.number(read.sysctl(asked.out("wired_limit"))),
        "macos": said.get("ProductVersion", ""),
        "build": said.get("BuildVersion", ""),
        "ports": tuple(ports),
        "rdma_enabled": {"enabled": True, "disabled": False}.get(switch),
        "rdma_devices": _rdma(read.rdma_devices(asked.out("ibv_devinfo_v")), guids),
        "interfaces": interfaces,
        "addresses": tuple(read.mac_addresses(asked.out("ifconfig"))),
        "bridge_members": members,
        "bridge_up": up,
        "power": read.power(asked.out("pmset")),
        "firewall": read.firewall(asked.out("firewall")),
        "virtual": virtual_machine(asked.out("hv_vmm"), model, str(display.get("sppci_model", "")), brand),
    }


def _rdma(described: list[RdmaDevice], guids: dict[str, str]) -> tuple[RdmaDevice, ...]:
    """The devices in the order of `ibv_devices`; those that only it lists have no state."""
    by_name = {device.name: device for device in described}
    listed = {name: by_name.get(name, RdmaDevice(name, "")) for name in guids.values()}
    return tuple((listed | by_name).values())


def _linux(asked: _Asked) -> dict[str, Any]:
    memory, available = read.linux_memory(asked.out("meminfo"))
    models = [line.partition(":")[2].strip() for line in asked.out("cpuinfo").splitlines() if "model name" in line]
    names = [line.partition("=")[2].strip('"') for line in asked.out("os_release").splitlines()]
    return {
        "uuid": asked.out("machine_id").strip(),
        "model_name": names[0] if names else "",
        "chip": models[0] if models else "",
        "memory_bytes": memory,
        "available_bytes": available,
        "addresses": tuple(read.linux_addresses(asked.out("addresses"))),
    }


def _versions(asked: _Asked) -> Versions:
    """Of the interpreter that ranks use. mlx counts only if it can be imported; recordings may have mlx alone."""
    try:
        said = json.loads(asked.out("versions") or "{}")
    except ValueError:
        said = {}
    if not isinstance(said, dict):
        said = {}
    mlx = asked.out("mlx_version").split()
    python, mlx_lm, cluster = (str(said.get(name, "")) for name in ("python", "mlx-lm", "cluster"))
    return Versions(python=python, mlx=mlx[-1] if mlx else "", mlx_lm=mlx_lm, cluster=cluster)
