"""What commands printed on hosts, written as a folder that may be shown to others.

`cluster probe --save` uses it. Serial numbers, UUIDs, MAC and public addresses, host and user names are replaced; the
same original always by the same replacement, on every host, so cables still pair. The salt is random and thrown away,
so nobody can test a guess. Private IPv4 addresses stay: topology needs their subnets, and they tell nothing.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import ipaddress
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import FolderUnusable
from cluster.macs.ssh import COMMAND_S, Result, Runner

BATCH_SSH = "batch_ssh"  # not a command on the host: what the system's ssh said on the way there
HEX = "0-9A-Fa-f"
IDENTITY = re.compile(
    rf"(?P<uuid>(?<![{HEX}-])[{HEX}]{{8}}(?:-[{HEX}]{{4}}){{3}}-[{HEX}]{{12}}(?![{HEX}-]))"
    rf"|(?P<mac>(?<![{HEX}:])[{HEX}]{{2}}(?::[{HEX}]{{2}}){{5}}(?![{HEX}:]))"
    rf"|(?P<uid>\b0x[{HEX}]{{16}}\b)"
    rf"|(?P<guid>(?<![{HEX}:])[{HEX}]{{4}}(?::[{HEX}]{{4}}){{3}}(?![{HEX}:])|\b[{HEX}]{{16}}\b)"
    rf"|(?P<ip6>(?<![{HEX}:.])(?=[{HEX}:]*:[{HEX}:]*:)[{HEX}:]+(?:\d+\.\d+\.\d+\.\d+)?(?![{HEX}:.]))"
    r"|(?P<ip4>(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]))"
)
SECRET_KEYS = re.compile(r"serial|udid|edid|ecid|activation", re.IGNORECASE)
HOME_FOLDERS = re.compile(r"(/Users/|/home/)([^/\s:'\"]+)")
SHARED_FOLDERS = ("Shared",)


class RecordingShell:
    """A shell that keeps what every named command said, in `said`."""

    def __init__(self, shell: Runner, commands: Mapping[str, Sequence[str]]) -> None:
        self.name = shell.name
        self.said: dict[str, Result] = {}
        self._shell = shell
        self._names = {tuple(argv): name for name, argv in commands.items()}

    def run(self, argv: Sequence[str], timeout_s: float = COMMAND_S) -> Result:
        result = self._shell.run(argv, timeout_s)
        name = self._names.get(tuple(argv))
        if name is not None:
            self.said[name] = result
        return result


class Disguise:
    """Replaces what identifies a machine or a person; the same way for all texts given to one Disguise."""

    def __init__(self, hosts: Sequence[str], users: Sequence[str], salt: bytes) -> None:
        self._salt = salt
        self.hosts = {host: f"host-{place}" for place, host in enumerate(hosts, 1)}
        names = {form: new for host, new in self.hosts.items() for form in _forms(host)}
        people = {user: f"user-{place}" for place, user in enumerate(dict.fromkeys(users), 1)}
        self._words = {old: new for old, new in (people | names).items() if old and old != "root"}
        longest_first = sorted(self._words, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first))
        self._names = re.compile(rf"(?<![\w-])(?:{alternatives})(?![\w-])") if alternatives else None

    def text(self, text: str) -> str:
        """A command's output. In JSON, names are replaced only where they are the whole value."""
        try:
            document = json.loads(text) if text.lstrip().startswith("{") else None
        except ValueError:
            document = None
        if document is not None:
            return json.dumps(self._value(document), indent=2, ensure_ascii=False) + "\n"
        text = HOME_FOLDERS.sub(self._home, text)
        if self._names is not None:
            text = self._names.sub(lambda found: self._words[found[0]], text)
        return IDENTITY.sub(self._identity, text)

    def _value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self._value(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._value(inner, key) for inner in value]
        if not isinstance(value, str):
            return value
        if SECRET_KEYS.search(key):
            return self._digest(value, 10).hex().upper()[: len(value)]
        if value in self._words:
            return self._words[value]
        return IDENTITY.sub(self._identity, value)

    def _identity(self, found: re.Match[str]) -> str:
        kind, old = str(found.lastgroup), found[0]
        new = getattr(self, f"_{kind}")(old)
        return str(new).upper() if re.search("[A-F]", old) and not re.search("[a-f]", old) else str(new)

    def _digest(self, original: str, size: int) -> bytes:
        return hashlib.blake2b(original.upper().encode(), digest_size=size, key=self._salt).digest()

    def _uuid(self, old: str) -> str:
        new = self._digest(old, 16).hex()
        return "-".join((new[:8], new[8:12], new[12:16], new[16:20], new[20:]))

    def _mac(self, old: str) -> str:
        return ":".join(["02", *(f"{byte:02x}" for byte in self._digest(old, 5))])

    def _uid(self, old: str) -> str:
        """A Thunderbolt switch: maker in front and bus at the end stay, so that it still pairs with its RDMA device."""
        digits = old[2:].lower()
        return "0x" + self._switch(digits).upper() if old[2:].upper() == old[2:] else "0x" + self._switch(digits)

    def _guid(self, old: str) -> str:
        digits = old.replace(":", "").lower()
        new = _reversed(self._switch(_reversed(digits)))
        return ":".join(re.findall("....", new)) if ":" in old else new

    def _switch(self, digits: str) -> str:
        return digits[:4] + self._digest(digits[:-1], 6).hex()[:11] + digits[-1]

    def _ip6(self, old: str) -> str:
        try:
            address = ipaddress.IPv6Address(old)
        except ValueError:
            return old
        if address.ipv4_mapped is not None:
            return f"::ffff:{self._ip4(str(address.ipv4_mapped))}"
        if int(address) < 1 << 32 or address.is_multicast:
            return old
        network, interface = address.packed[:8], address.packed[8:]
        if not address.is_link_local:
            network = b"\xfd" + self._digest(network.hex(), 7)
        return str(ipaddress.IPv6Address(network + self._digest(interface.hex(), 8)))

    def _ip4(self, old: str) -> str:
        try:
            public = ipaddress.IPv4Address(old).is_global
        except ValueError:
            return old
        return f"198.51.100.{self._digest(old, 1)[0]}" if public else old

    def _home(self, found: re.Match[str]) -> str:
        user = found[2]
        return found[0] if user in SHARED_FOLDERS else found[1] + self._words.get(user, "user")


def write_recording(
    folder: Path, said: Mapping[str, Mapping[str, Result]], commands: Mapping[str, Sequence[str]]
) -> None:
    """Write HOST/COMMAND.out, .err, .rc and COMMANDS.json. `said`: by host, then by command. Raises FolderUnusable."""
    users = [host.partition("@")[0] for host in said if "@" in host]
    with contextlib.suppress(OSError, KeyError):  # a user without a name has none to hide
        users.append(getpass.getuser())
    disguise = Disguise(list(said), users, secrets.token_bytes(32))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FolderUnusable(f"{folder} is not empty.", hint="Give --save a new folder.")
        _write(folder / "COMMANDS.json", json.dumps({name: list(argv) for name, argv in commands.items()}, indent=1))
        for host, results in said.items():
            place = folder / disguise.hosts[host]
            place.mkdir()
            for name, result in results.items():
                _write(place / f"{name}.out", disguise.text(result.out))
                if result.err:
                    _write(place / f"{name}.err", disguise.text(result.err))
                if result.rc:
                    _write(place / f"{name}.rc", f"{result.rc}\n")
    except OSError as error:
        raise FolderUnusable(f"{folder} cannot be written: {error.strerror}.") from error


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _forms(host: str) -> list[str]:
    """The ways in which a host's name appears: without its user, and without its domain."""
    full = host.rpartition("@")[2]
    short = full.partition(".")[0]
    return [host, full] if short.isdigit() else [host, full, short]


def _reversed(digits: str) -> str:
    return "".join(reversed(re.findall("..", digits)))
