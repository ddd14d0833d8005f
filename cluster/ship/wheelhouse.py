"""The packages of an environment as wheels on this machine, for any system and Python: the pinned ones and our own.

Pinned means requirements.lock, with hashes: of this checkout, or packed into our own wheel. That wheel is written from
the files that run here, so what is installed elsewhere is what runs here, whether or not it is committed. Called by
`install.py`; nothing here looks at another machine.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import cluster
from cluster.errors import WheelsUnavailable
from cluster.ship.environment import PACKAGES, files_of

LOCK = "requirements.lock"
ENTRY = re.compile(r"^(?=[\w.-]+==)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
LAST_LINES = 4


def lock_text() -> str:
    """The pinned packages of this installation. Raises WheelsUnavailable where there is no list of them."""
    package = Path(cluster.__file__).parent
    for file in (package / LOCK, package.parent / LOCK):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise WheelsUnavailable(
        f"This installation of cluster ({package}) has no {LOCK}, so nothing says which versions belong to it.",
        hint="Run it from a checkout (`make up` sets one up), or from where `cluster install` put it.",
    )


def requirements(lock: str, markers: Mapping[str, str]) -> list[str]:
    """The entries of a lock that count where the environment `markers` hold, as lines of a requirements file."""
    lines = []
    for entry in ENTRY.split(lock)[1:]:
        named = Requirement(entry.splitlines()[0].rstrip("\\ "))
        if named.marker is None or named.marker.evaluate(dict(markers)):
            lines.append(" ".join([f"{named.name}{named.specifier}", *HASH.findall(entry)]))
    return lines


def fetch(
    lines: Sequence[str],
    folder: Path,
    *,
    python: str,
    platforms: Sequence[str],
    told: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Wheels for all `lines` into `folder`, beside a requirements.txt of them; instant when they are there.

    `python` like "3.13", `platforms` as pip names them. Raises WheelsUnavailable; what was fetched stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / "requirements.txt"
    complete = folder / ".complete"
    text = "\n".join(lines) + "\n"
    here = len([wheel for wheel in folder.glob("*.whl") if not wheel.name.startswith("cluster-")])
    if here >= len(lines) and complete.exists() and complete.read_text() == text:
        return
    wanted.write_text(text)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--implementation", "cp"]
    command += ["--python-version", python, *(word for name in platforms for word in ("--platform", name))]
    command += ["--dest", str(folder), "--requirement", str(wanted)]
    last: list[str] = []
    faults: list[str] = []
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        for line in process.stdout:
            if stop.is_set():
                process.kill()
            last = [*last, line.strip()][-LAST_LINES:]
            faults += [line.strip()] if line.startswith("ERROR") else []
            told(len(list(folder.glob("*.whl"))))
    if process.returncode != 0:
        raise WheelsUnavailable(
            f"The packages for Python {python} on {platforms[0]} could not be fetched: {' '.join(faults or last)}",
            hint="Check the connection and pip's settings (`pip config list`); only this machine needs an index.",
        )
    complete.write_text(text)


def own_wheel(folder: Path) -> Path:
    """This project as it runs here, as a wheel in `folder`: the same bytes for the same files."""
    about = metadata.distribution("cluster")
    name = f"cluster-{about.version}"
    contents = {path: file.read_bytes() for package in PACKAGES for path, file in files_of(_root(package))}
    contents[f"{PACKAGES[0]}/{LOCK}"] = lock_text().encode()
    contents[f"{name}.dist-info/METADATA"] = (about.read_text("METADATA") or "").encode()
    contents[f"{name}.dist-info/entry_points.txt"] = (about.read_text("entry_points.txt") or "").encode()
    contents[f"{name}.dist-info/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: cluster\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    contents[f"{name}.dist-info/RECORD"] = _record(contents, f"{name}.dist-info/RECORD")
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in contents.items():
            archive.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
    return wheel


def unpacked_bytes(wheels: Sequence[Path]) -> int:
    """The room that wheels take once they are installed."""
    total = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            total += sum(entry.file_size for entry in archive.infolist())
    return total


def _root(package: str) -> Path:
    return Path(cluster.__file__).parent.parent / package


def _record(contents: Mapping[str, bytes], own: str) -> bytes:
    """The list of files that a wheel has, with their hashes; of itself only the name."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for path, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        writer.writerow([path, f"sha256={digest}", len(data)])
    writer.writerow([own, "", ""])
    return out.getvalue().encode()
