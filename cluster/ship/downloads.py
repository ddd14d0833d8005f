"""What every download shares: the shape of its progress callback, and the look at the disk before the first byte.

Used by `weights.py` and `demo.py`; it fetches nothing itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from cluster.errors import NotEnoughDisk

Progress = Callable[[str, int, int], None]  # label, bytes done, bytes in total (0: not known yet)


def check_disk(folder: Path, need_bytes: int, what: str) -> None:
    """Raise NotEnoughDisk unless the disk that holds `folder` (it need not exist yet) has `need_bytes` free."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if need_bytes > free_bytes:
        raise NotEnoughDisk(
            f"{what} needs {need_bytes / 1e9:.2f} GB more in {folder}; the disk has {free_bytes / 1e9:.2f} GB free.",
            hint="Free some space, or move the cache to another disk (HF_HOME for Hugging Face models, CLUSTER_HOME).",
        )
