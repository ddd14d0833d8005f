"""Who is there: Macs that offer Remote Login on this network, and hosts that the user names.

Every Mac with Remote Login switched on advertises `_ssh._tcp` by multicast DNS; nothing of ours runs on it. A machine
found under several names or addresses is one: its hardware UUID tells, where its login lets us in. `cluster discover`,
and every command that was told no hosts, starts here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroconf import IPVersion, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

from cluster.errors import ClusterError, NoHosts
from cluster.macs.probe import identity
from cluster.macs.ssh import on_all, open_shell

SERVICE = "_ssh._tcp.local."
BROWSE_S = 3.0
ANSWER_MS = 2000


@dataclass(frozen=True, slots=True)
class Found:
    """A machine. `name` is what goes after `ssh`; `also` its other names. `trouble` is why it could not be logged into.

    `addresses` are what it advertises, IPv4; `configured` is whether the user named it, `bonjour` whether it was heard.
    """

    name: str
    addresses: tuple[str, ...] = ()
    configured: bool = False
    bonjour: bool = False
    uuid: str = ""
    model: str = ""
    also: tuple[str, ...] = ()
    trouble: str = ""
    hint: str = ""


def discover(configured: Sequence[str], *, timeout_s: float = BROWSE_S) -> list[Found]:
    """Who is there, one entry per machine: those named first. Raises NoHosts when there is nobody."""
    heard = browse(timeout_s=timeout_s)
    named = [Found(name, configured=True) for name in configured]
    if not named and not heard:
        raise NoHosts(
            f"No Mac was found on this network within {timeout_s:.0f} s.",
            hint="Switch on Remote Login on the Macs, or name them: --hosts a,b,c. If they are on, allow this terminal "
            "under System Settings > Privacy & Security > Local Network.",
        )
    return merge(_identified([*named, *heard]))


def host_names(*, timeout_s: float = BROWSE_S) -> list[str]:
    """Names of the machines that Bonjour finds, one per machine. Raises NoHosts when there is none."""
    return [machine.name for machine in discover([], timeout_s=timeout_s)]


def browse(*, timeout_s: float = BROWSE_S) -> list[Found]:
    """Who advertises ssh by multicast DNS within `timeout_s`, one entry per name. Empty too without a network."""
    try:
        zeroconf = Zeroconf(ip_version=IPVersion.V4Only)
    except OSError:
        return []
    try:
        heard = _Heard()
        ServiceBrowser(zeroconf, SERVICE, listener=heard)
        threading.Event().wait(timeout_s)  # answers come one by one; there is no last one
        found = [entry for name in heard.names() if (entry := _resolve(zeroconf, name)) is not None]
    finally:
        zeroconf.close()
    return sorted({machine.name: machine for machine in found}.values(), key=lambda machine: machine.name)


class _Heard(ServiceListener):
    """The service names that were announced and not taken back."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        self._names[name] = None

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        self._names[name] = None

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        self._names.pop(name, None)

    def names(self) -> list[str]:
        return list(self._names)


def _resolve(zeroconf: Zeroconf, name: str) -> Found | None:
    info = ServiceInfo(SERVICE, name)
    if not info.request(zeroconf, ANSWER_MS) or not info.server:
        return None
    addresses = tuple(sorted(info.parsed_addresses(IPVersion.V4Only)))
    return Found(info.server.rstrip("."), addresses, bonjour=True)


def _identified(machines: Sequence[Found]) -> list[Found]:
    def ask(machine: Found) -> tuple[str, str]:
        with open_shell(machine.name) as shell:
            return identity(shell)

    known = []
    for machine, answer in zip(machines, on_all(machines, ask), strict=True):
        if isinstance(answer, ClusterError):
            known.append(replace(machine, trouble=answer.message, hint=answer.hint))
        else:
            known.append(replace(machine, uuid=answer[0], model=answer[1]))
    return known


def merge(machines: Sequence[Found]) -> list[Found]:
    """One entry per machine: same hardware UUID; without one, same name or advertised address. The first name stays."""
    kept: list[Found] = []
    for machine in machines:
        place = next((i for i, other in enumerate(kept) if _same(other, machine)), None)
        if place is None:
            kept.append(machine)
        else:
            kept[place] = _joined(kept[place], machine)
    return kept


def _same(one: Found, other: Found) -> bool:
    if one.uuid and other.uuid:
        return one.uuid == other.uuid
    names = {_plain(name) for name in (one.name, *one.also)} & {_plain(name) for name in (other.name, *other.also)}
    return bool(names or set(one.addresses) & set(other.addresses) or one.name in other.addresses)


def _plain(name: str) -> str:
    """A name to compare: without the user, Bonjour's domain and capitals."""
    return re.sub(r"\.local\.?$", "", name.rpartition("@")[2].lower())


def _joined(one: Found, other: Found) -> Found:
    names = [name for name in (*one.also, other.name, *other.also) if name != one.name]
    reached = next((machine for machine in (one, other) if machine.uuid), one)
    return Found(
        name=one.name,
        addresses=tuple(sorted({*one.addresses, *other.addresses})),
        configured=one.configured or other.configured,
        bonjour=one.bonjour or other.bonjour,
        uuid=reached.uuid,
        model=reached.model,
        also=tuple(dict.fromkeys(names)),
        trouble=reached.trouble,
        hint=reached.hint,
    )
