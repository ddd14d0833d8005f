"""Build the layer on the guest that will use it; kept in the cache by the hash of everything that shapes it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from cluster.errors import FolderUnusable, LayerUnbuildable

SOURCE = Path(__file__).with_name("layer.c")
FLAGS = ("-dynamiclib", "-mmacosx-version-min=13.0", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra")
LIBRARIES = ("-lobjc", "-framework", "Metal")


def build(cache: Path, architecture: str) -> Path:
    """The layer for "arm64" or "arm64e" programs, signed ad hoc. Raises LayerUnbuildable, FolderUnusable."""
    _tool("xcode-select", "-p")  # without the tools, /usr/bin/clang opens a window that asks to install them
    flags = ("-arch", architecture, *FLAGS)
    shape = repr((SOURCE.read_bytes(), _tool("clang", "--version"), flags))
    made = cache / "vm" / f"layer-{hashlib.sha256(shape.encode()).hexdigest()[:32]}.dylib"
    if not made.exists():
        try:
            made.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise FolderUnusable(f"{made.parent} cannot be made: {error.strerror}.") from error
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            fresh = f"{folder}/layer.dylib"
            _tool("clang", *flags, str(SOURCE), "-o", fresh, *LIBRARIES)
            _tool("codesign", "--force", "--sign", "-", fresh)
            os.replace(fresh, made)
    return made


def _tool(*argv: str) -> str:
    hint = "Apple's command line tools are needed: xcode-select --install"
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise LayerUnbuildable(f"{argv[0]} failed: {error.stderr.strip()}", hint=hint) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LayerUnbuildable(f"{argv[0]} could not run: {error}", hint=hint) from error
