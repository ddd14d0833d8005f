"""The virtual environment of a host, from there: which Python could make it, making it, and what is in it.

Standard library only and Python 3.9, since `install.py` sends this very file to Pythons of other hosts. It answers in
lines of JSON, as `arrivals.py` does: {"at": packages} while it works, then the result.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

TELL_S = 0.5
KEPT_LINES = 3
PACKAGES = ("cluster", "parallel")
NOT_OURS = ("__pycache__", "requirements.lock")  # the lock is added to our wheel, and is no code


# ---------------------------------------------------------------- what is there


def survey() -> dict[str, Any]:
    """What this Python could make an environment from, and what packages it takes."""
    implementation = sys.implementation
    version = platform.python_version()
    return {
        "python": sys.executable,
        "version": version,
        "native": sys.platform != "darwin" or platform.machine() == "arm64",
        "venv": all(importlib.util.find_spec(name) is not None for name in ("venv", "ensurepip")),  # Debian: split off
        "platforms": platforms(),
        "markers": {
            "implementation_name": implementation.name,
            "implementation_version": version,
            "os_name": os.name,
            "platform_machine": platform.machine(),
            "platform_python_implementation": platform.python_implementation(),
            "platform_release": platform.release(),
            "platform_system": platform.system(),
            "platform_version": platform.version(),
            "python_full_version": version,
            "python_version": ".".join(version.split(".")[:2]),
            "sys_platform": sys.platform,
        },
    }


def platforms() -> list[str]:
    """The platform tags of wheels that run here, as `pip download --platform` takes them."""
    machine = platform.machine()
    if sys.platform == "darwin":  # pip itself adds the older ones
        return [f"macosx_{_said('sw_vers', '-productVersion').split('.')[0]}_0_{machine}"]
    name, _, glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    minor = int(glibc.split(".")[1]) if name == "glibc" else 16
    several = [f"manylinux_2_{older}_{machine}" for older in range(minor, 16, -1)]
    return [*several, f"manylinux2014_{machine}", f"linux_{machine}"]


def facts() -> dict[str, str]:
    """What ranks would run on in this Python; "" for what is missing. `ours` stands for this project's files."""
    try:
        mlx = str(importlib.import_module("mlx.core").__version__)  # it must not only lie there, it must load
    except ImportError:
        mlx = ""
    try:
        mlx_lm = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        mlx_lm = ""
    build = _said("sw_vers", "-buildVersion") if sys.platform == "darwin" else ""
    return {"build": build, "python": platform.python_version(), "mlx": mlx, "mlx_lm": mlx_lm, "ours": ours()}


def ours() -> str:
    """A short hash of this project's files in this Python; "" if they are not there."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return ""
        for name, path in files_of(Path(spec.origin).parent):
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()} ".encode())
    return digest.hexdigest()[:12]


def files_of(package: Path) -> list[tuple[str, Path]]:
    """The files of a package, as (path in an archive, path here), in one order on every machine."""
    paths = [(path.relative_to(package.parent), path) for path in package.rglob("*") if path.is_file()]
    return sorted((name.as_posix(), path) for name, path in paths if not set(NOT_OURS).intersection(name.parts))


def _said(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True).stdout.strip()


# ---------------------------------------------------------------- making it


class _Failed(Exception):
    """A command failed; its last words."""


class _Making:
    """One environment being made. Tells every half second how many packages are in it; ends when nobody listens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: subprocess.Popen[str] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
        self._thread.start()

    def run(self, *argv: str) -> None:
        """Run a command to its end. Raises _Failed."""
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        own = {**os.environ, "PIP_CONFIG_FILE": os.devnull}  # an index or constraint of this host has no say
        with subprocess.Popen(argv, text=True, start_new_session=True, env=own, **pipes) as self._running:
            assert self._running.stdout is not None
            lines = [line.strip() for line in self._running.stdout if line.strip()]
        if self._running.returncode:
            raise _Failed(" ".join(lines[-KEPT_LINES:]) or f"{argv[0]} ended with {self._running.returncode}")

    def last(self, answer: dict[str, Any]) -> None:
        """The result, as the last line."""
        self._end.set()
        self._thread.join()
        print(json.dumps(answer), flush=True)

    def _tell(self) -> None:
        while not self._end.wait(TELL_S):
            count = sum(1 for _ in self._folder.glob("lib/python*/site-packages/*.dist-info"))
            try:
                print(json.dumps({"at": count}), flush=True)
            except OSError:
                if self._running is not None and self._running.poll() is None:
                    os.killpg(self._running.pid, signal.SIGKILL)
                os._exit(1)


def make(job: dict[str, Any]) -> None:
    """Make the environment `env-KEY` under `root` from `wheels`, and have `env` point to it.

    A run that broke off leaves no `ready` in its folder, so it is made anew; one that is ready only gets our wheel. The
    environment before this one stays, since ranks may run on it; older ones go.
    """
    root = Path(job["root"]).expanduser().absolute()
    folder, link, wheels = root / f"env-{job['key']}", root / "env", Path(job["wheels"]).expanduser().absolute()
    root.mkdir(parents=True, exist_ok=True)
    making = _Making(folder)
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _fill(making, folder, wheels, job["wheel"])
            before = os.readlink(link) if link.is_symlink() else ""
            new = root / f"env.{os.getpid()}"
            new.symlink_to(folder.name)
            os.replace(new, link)
            for other in root.glob("env-*"):
                if other.name not in (folder.name, before):
                    shutil.rmtree(other, ignore_errors=True)
            shutil.rmtree(wheels, ignore_errors=True)
            answer = {"end": "done"}
        except BlockingIOError:
            answer = {"end": "busy", "words": "another `cluster install` is at work there"}
        except (_Failed, OSError) as error:
            answer = {"end": "failed", "words": str(error)}
        making.last(answer)


def _fill(making: _Making, folder: Path, wheels: Path, wheel: str) -> None:
    ready, python = folder / "ready", str(folder / "bin" / "python")
    pip = (python, "-m", "pip", "--isolated", "--no-input", "--disable-pip-version-check", "install", "--no-index")
    if not ready.exists():
        making.run(sys.executable, "-m", "venv", "--clear", str(folder))
        every = ("--find-links", str(wheels), "--no-deps", "--require-hashes", "-r", str(wheels / "requirements.txt"))
        making.run(*pip, *every)
        ready.touch()
    making.run(*pip, "--no-deps", "--force-reinstall", str(wheels / wheel))


def main(argv: list[str]) -> None:
    """`survey`, `facts` or `make JOB`."""
    if argv[1] == "make":
        make(json.loads(argv[2]))
    else:
        print(json.dumps(survey() if argv[1] == "survey" else facts()))


if __name__ == "__main__":
    main(sys.argv)
