"""Every host gets this machine's environment: the same Python, the pinned packages, this project's very files.

The packages come from here as wheels, whatever index a host could reach: fetched once per system and Python, copied by
`carry.py`, installed there by `environment.py` into a folder below the home of whoever ssh logs in as. Nothing needs
root and nothing outside that folder is touched. `cluster install` calls `install`; `cluster up` calls `versions`.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError, HostNotInstallable, InstallFailed
from cluster.macs.ssh import LOCAL_NAMES, Shell, on_all, open_shell
from cluster.ship import environment, same, streams, wheelhouse
from cluster.ship.carry import ENVIRONMENT, Errand, File, Progress, bring
from cluster.ship.same import HERE, Facts

ROOT = ENVIRONMENT.rpartition("/")[0]
OWN = (f"{ENVIRONMENT}/bin/python", "-I")  # nothing but what `install` has put there
SCRIPT = Path(environment.__file__)
ASK_S = 60.0  # the first import of mlx on a cold disk
MARGIN = 1.1  # what pip and the file system add to the bytes unpacked

# Runs the script "$1" in every Python of a host that may do; $2 is the version looked for, like 3.13. Homebrew's and
# others are not on the PATH of an ssh command. macOS's /usr/bin/python3 without Apple's tools opens a window.
SURVEY = """
seen=
for folder in $(echo "$PATH" | tr : " ") /opt/homebrew/bin /usr/local/bin "$HOME/.local/bin" \
  /Library/Frameworks/Python.framework/Versions/$2/bin "$HOME"/.pyenv/versions/$2.*/bin; do
  for name in python$2 python3; do
    python="$folder/$name"
    [ -x "$python" ] || continue
    if [ "$python" = /usr/bin/python3 ] && [ "$(uname -s)" = Darwin ] && ! xcode-select -p >/dev/null 2>&1; then
      continue
    fi
    real=$(readlink -f "$python" 2>/dev/null || echo "$python")
    case " $seen " in *" $real "*) continue;; esac
    seen="$seen $real"
    "$python" -I -c "$1" survey 2>/dev/null
  done
done
df -Pk "$HOME" | tail -n 1
"""


@dataclass(frozen=True, slots=True)
class Found:
    """What a host has: the Python to make an environment from (None: none that does), others, free bytes; and the
    environment that is there, by its key, with its facts."""

    host: str
    python: Mapping[str, Any] | None
    others: tuple[str, ...]
    free: int
    key: str
    facts: Facts


def python_of(host: str) -> str:
    """The interpreter of a host's ranks: this one here, else what `install` puts there, from the home folder."""
    return sys.executable if host in LOCAL_NAMES else f"{ENVIRONMENT}/bin/python"


def facts_here(name: str = HERE, *, ranks: bool = True) -> Facts:
    """What runs here. Without `ranks` only this project counts: the others need no mlx of a laptop that looks on."""
    if not ranks:
        return Facts(name, ours=environment.ours())
    done = subprocess.run([sys.executable, "-I", str(SCRIPT), "facts"], capture_output=True, text=True, check=True)
    return replace(_facts(name, done.stdout), ours=environment.ours())  # the files that run, not what is installed


def versions(
    hosts: Sequence[str], *, python: str | None = None, models: Mapping[str, str] | None = None
) -> list[Facts]:
    """What the ranks' environment is on each host, and first of all here; for `same.check`.

    The environment is the one of the interpreter `python` on every host, None: the one that `install` makes. `models`
    are what stands for the model's files there. Everything is "" where there is none. Raises the error of the first
    host that cannot be asked.
    """

    def ask(host: str) -> Facts:
        if host in LOCAL_NAMES and python is None:
            return facts_here(host)
        with open_shell(host) as shell:
            return _ask(shell, (python,) if python else OWN)

    outcomes = on_all(list(hosts), ask)
    for outcome in outcomes:
        if isinstance(outcome, ClusterError):
            raise outcome
    found = [outcome for outcome in outcomes if isinstance(outcome, Facts)]
    told = [replace(one, model=(models or {}).get(one.host)) for one in found]
    return [facts_here(ranks=False), *told]


def install(
    hosts: Sequence[str],
    *,
    cache: Path,
    progress: Progress = lambda host, what, done, total: None,
    note: Callable[[str], None] = lambda text: None,
    stop: threading.Event | None = None,
) -> list[Facts]:
    """Make the environment of all hosts this machine's, and return what they then run.

    Nothing is changed anywhere unless every host has what it takes. Raises HostNotInstallable, WheelsUnavailable,
    InstallFailed, and what `carry.bring` raises. A second run goes on where the first one broke off, and finds nothing
    to do where all is as it should be.
    """
    far = [host for host in hosts if host not in LOCAL_NAMES]
    run = _Install(cache, progress, note, stop or threading.Event())
    run.survey(far)
    run.prepare()
    run.carry_out()
    return run.verify(hosts)


class _Install:
    """One `install`."""

    def __init__(self, cache: Path, progress: Progress, note: Callable[[str], None], stop: threading.Event) -> None:
        self.cache, self.progress, self.note, self.stop = cache, progress, note, stop
        self.here = facts_here()
        self.lock = wheelhouse.lock_text()
        self.found: list[Found] = []
        self.lines: dict[str, list[str]] = {}
        self.keys: dict[str, str] = {}
        self.houses: dict[str, Path] = {}
        self.wheel = ""

    def survey(self, hosts: Sequence[str]) -> None:
        """Look at all hosts; those that have everything are done. Raises HostNotInstallable for a missing Python."""
        version = ".".join((self.here.python or "").split(".")[:2])

        def look(host: str) -> Found:
            with open_shell(host) as shell:
                return _survey(shell, version, self.here.python or "")

        outcomes = on_all(hosts, look)
        _raise([outcome for outcome in outcomes if isinstance(outcome, ClusterError)])
        lacking = []
        for found in (outcome for outcome in outcomes if isinstance(outcome, Found)):
            if found.python is None:
                lacking.append(
                    f"{found.host} has no usable Python {version} ({', '.join(found.others) or 'no Python'})"
                )
                continue
            lines = wheelhouse.requirements(self.lock, found.python["markers"])
            key = hashlib.sha256("\n".join([found.python["version"], *lines]).encode()).hexdigest()[:12]
            self.lines[found.host], self.keys[found.host] = lines, key
            if (found.key, found.facts.ours) == (key, self.here.ours) and found.facts.mlx:
                self.note(f"{found.host}: already as here")
            else:
                self.found.append(found)
        if lacking:
            raise HostNotInstallable(
                "\n  ".join([f"Python {version} with venv is what runs here, and what ranks need:", *lacking]),
                hint=f"On a Mac: brew install python@{version}; on Debian: apt-get install python3-venv.",
            )

    def prepare(self) -> None:
        """Have the wheels for every host here. Raises WheelsUnavailable, and HostNotInstallable for a full disk."""
        short = []
        for found in self.found:
            python, lines = found.python or {}, self.lines[found.host]
            house = self.cache / "wheels" / self.keys[found.host]
            short_version = str(python["markers"]["python_version"])

            def told(count: int, total: int = len(lines)) -> None:
                self.progress(HERE, "fetching packages", count, total)

            if house not in self.houses.values():
                wheelhouse.fetch(
                    lines, house, python=short_version, platforms=python["platforms"], told=told, stop=self.stop
                )
                self.wheel = wheelhouse.own_wheel(house).name
            self.houses[found.host] = house
            wheels = list(house.glob("*.whl"))
            need = int(MARGIN * (wheelhouse.unpacked_bytes(wheels) + sum(wheel.stat().st_size for wheel in wheels)))
            where = f"Python {python['version']} ({python['python']})"
            self.note(f"{found.host}: {where}, {len(wheels)} packages, needs {need / 1e6:.0f} MB in ~/{ROOT}")
            if need > found.free:
                free = f"the disk has {found.free / 1e6:.0f} MB free"
                short.append(f"{found.host} needs {need / 1e6:.0f} MB in its home folder; {free}")
        if short:
            raise HostNotInstallable(f"{'; '.join(short)}. Nothing was changed.", hint="Free some space there.")

    def carry_out(self) -> None:
        """Copy the wheels and make the environments, all hosts at once. Raises what `bring` raises, InstallFailed."""
        for house in dict.fromkeys(self.houses.values()):
            group = [found for found in self.found if self.houses[found.host] == house]
            files = {path.name: _file(path) for path in (*house.glob("*.whl"), house / "requirements.txt")}
            errands = [
                Errand(
                    found.host,
                    tuple(files),
                    {"folder": f"~/{ROOT}/wheels"},
                    (str((found.python or {})["python"]),),
                )
                for found in group
            ]
            bring(errands, house, files, what="The packages", progress=self.progress, note=self.note, stop=self.stop)
        outcomes = on_all(self.found, self._make)
        _raise([outcome for outcome in outcomes if isinstance(outcome, ClusterError)])

    def _make(self, found: Found) -> None:
        host, total = found.host, len(self.lines[found.host]) + 1
        job = {"root": f"~/{ROOT}", "wheels": f"~/{ROOT}/wheels", "key": self.keys[host], "wheel": self.wheel}
        python = (str((found.python or {})["python"]), "-I")
        argv = streams.script(SCRIPT, python, "make", json.dumps(job))
        self.progress(host, "installing", 0, total)
        said = streams.answer(
            host,
            streams.there(host, argv),
            told=lambda at: self.progress(host, "installing", min(at, total), total),
            stop=self.stop,
        )
        if said.get("end") != "done":
            raise InstallFailed(
                f"{host}: the environment could not be made: {said.get('words')}.",
                hint="`cluster install` again goes on with what has arrived.",
            )
        self.progress(host, "installing", total, total)

    def verify(self, hosts: Sequence[str]) -> list[Facts]:
        """What runs on the hosts now. Raises InstallFailed when that is not what runs here."""
        told = versions(hosts)[1:]
        own = Facts(HERE, python=self.here.python, mlx=self.here.mlx, mlx_lm=self.here.mlx_lm, ours=self.here.ours)
        different = [one for one in same.differences([own, *told]) if one.fact != "build"]
        if blocking := [one.text for one in different if one.blocks]:
            raise InstallFailed(
                f"After installing, not everything is as it is here: {'; '.join(blocking)}.",
                hint="Is this environment the locked one? `make up` sets that up; then `cluster install` again.",
            )
        for one in different:
            self.note(one.text)
        return told


def _survey(shell: Shell, version: str, exact: str) -> Found:
    """Look at one host, over its open connection."""
    text = streams.script(SCRIPT, [], "")[1]
    said = shell.run(["sh", "-c", SURVEY, "sh", text, version], ASK_S)
    *pythons, disk = said.out.strip().splitlines() or [""]
    candidates = [json.loads(line) for line in pythons if line.startswith("{")]
    able = [one for one in candidates if _short(one["version"]) == version and one["venv"] and one["native"]]
    best = min(able, key=lambda one: one["version"] != exact, default=None)
    others = tuple(dict.fromkeys(f"{one['version']} at {one['python']}{_lacks(one)}" for one in candidates))
    columns = disk.split()
    free = int(columns[-3]) * 1024 if len(columns) >= 6 and columns[-3].isdigit() else 0
    link = shell.run(["readlink", ENVIRONMENT])
    facts = _ask(shell, OWN) if link.ok else Facts(shell.name)
    return Found(shell.name, best, others, free, link.out.strip().removeprefix("env-") if link.ok else "", facts)


def _ask(shell: Shell, python: Sequence[str]) -> Facts:
    """The facts of the environment of an interpreter on a host; all "" where there is none."""
    said = shell.run(streams.script(SCRIPT, python, "facts"), ASK_S)
    return _facts(shell.name, said.out) if said.ok else Facts(shell.name, None, "", "", "", "")


def _facts(name: str, text: str) -> Facts:
    said = json.loads(text)
    return Facts(name, said["build"] or None, said["python"], said["mlx"], said["mlx_lm"], said["ours"])


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _lacks(python: Mapping[str, Any]) -> str:
    if not python["native"]:
        return " is not native (arm64)"
    return "" if python["venv"] else " lacks venv"


def _file(path: Path) -> File:
    with path.open("rb") as file:
        return File(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _raise(failures: Sequence[ClusterError]) -> None:
    if len(failures) == 1:
        raise failures[0]
    if failures:
        lines = "".join(f"\n  {failure.message}" for failure in failures)
        raise InstallFailed(f"{len(failures)} hosts failed:{lines}", hint=failures[0].hint)
