"""Build the layer on the guest that will use it; kept in the cache by the hash of everything that shapes it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from cluster.errors import LayerUnbuildable

SOURCE = Path(__file__).with_name("layer.c")
FLAGS = ("-arch", "arm64", "-dynamiclib", "-mmacosx-version-min=13.0", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra")
LIBRARIES = ("-lobjc", "-framework", "Metal")


def build(cache: Path) -> Path:
    """The layer in the folder `cache`, signed ad hoc. Raises LayerUnbuildable."""
    _tool("xcode-select", "-p")  # without the tools, /usr/bin/clang opens a window that asks to install them
    shape = repr((SOURCE.read_bytes(), _tool("clang", "--version"), FLAGS))
    made = cache / f"vm-layer-{hashlib.sha256(shape.encode()).hexdigest()[:32]}.dylib"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            fresh = f"{folder}/layer.dylib"
            _tool("clang", *FLAGS, str(SOURCE), "-o", fresh, *LIBRARIES)
            _tool("codesign", "--force", "--sign", "-", fresh)
            os.replace(fresh, made)
    return made


def _tool(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        hint = "Apple's command line tools are needed: xcode-select --install"
        raise LayerUnbuildable(f"{argv[0]} failed: {said}", hint=hint) from error
