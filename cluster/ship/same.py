"""Whether hosts run the same: their facts in, each difference named. Pure; `install.py` asks the hosts.

Ranks with different versions hang or compute nonsense, so this is checked before every launch. A launch may go on where
only the last part of Python's version differs; everything else blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from cluster.errors import VersionsDiffer

NAMES = {
    "build": "macOS build",
    "python": "Python",
    "mlx": "mlx",
    "mlx_lm": "mlx-lm",
    "ours": "cluster",
    "model": "model files",
}
REMEDIES = {
    "build": "System Settings > General > Software Update makes macOS equal",
    "model": "`cluster pull MODEL --verify` brings the right files",
}
INSTALL = "`cluster install {hosts}` makes them equal, for `up` without --python"
HERE = "this machine"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a host runs. "" is missing there; None does not count (a coordinator without a rank has no mlx to compare).

    `ours` stands for this project's files, `model` for the model's.
    """

    host: str
    build: str | None = None
    python: str | None = None
    mlx: str | None = None
    mlx_lm: str | None = None
    ours: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact that is not the same everywhere: `fact` as a field of `Facts`, and each host's value."""

    fact: str
    values: Mapping[str, str]

    @property
    def blocks(self) -> bool:
        """Whether ranks must not run so."""
        minor = {tuple(value.split(".")[:2]) for value in self.values.values()}
        return self.fact != "python" or len(minor) > 1

    @property
    def text(self) -> str:
        """Like "mlx: 0.32.4 on a and b, 0.32.3 on c"."""
        hosts: dict[str, list[str]] = {}
        for host, value in self.values.items():
            hosts.setdefault(value, []).append(host)
        several = sorted(hosts.items(), key=lambda item: -len(item[1]))
        return f"{NAMES[self.fact]}: " + ", ".join(f"{value or 'none'} on {_and(names)}" for value, names in several)


def differences(facts: Sequence[Facts]) -> list[Difference]:
    """Everything that is not the same on all hosts, in the order of `NAMES`."""
    found = []
    for field in fields(Facts):
        values = {one.host: value for one in facts if (value := getattr(one, field.name)) is not None}
        if field.name != "host" and len(set(values.values())) > 1:
            found.append(Difference(field.name, values))
    return found


def check(facts: Sequence[Facts]) -> list[str]:
    """Raise VersionsDiffer unless ranks may run on these hosts together; what differs and may, in words."""
    found = differences(facts)
    blocking = [difference for difference in found if difference.blocks]
    if not blocking:
        return [difference.text for difference in found]
    lines = "".join(f"\n  {difference.text}" for difference in blocking)
    hosts = list(dict.fromkeys(host for difference in blocking for host in difference.values if host != HERE))
    install = INSTALL.format(hosts=" ".join(hosts))
    remedies = dict.fromkeys(REMEDIES.get(difference.fact, install) for difference in blocking)
    raise VersionsDiffer(f"The hosts do not run the same:{lines}", hint=f"{'; '.join(remedies)}.")


def _and(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
