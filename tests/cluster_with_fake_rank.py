"""The `cluster` command with `fake_rank.py` in the place of a rank, for tests.

python cluster_with_fake_rank.py [FAKE-RANK-OPTION ... | endless-download] -- up MODEL ...
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster import cli
from cluster.ship import weights
from cluster.supervision import launch


def endless_download(*_: object, **__: object) -> Any:
    """A download in a pool of threads that the interpreter would wait for."""
    with ThreadPoolExecutor() as pool:
        return pool.submit(threading.Event().wait).result()


if __name__ == "__main__":
    split = sys.argv.index("--")
    if "endless-download" in sys.argv[:split]:
        weights.resolve = endless_download
    launch.RANK_COMMAND = (sys.executable, str(Path(__file__).with_name("fake_rank.py")), *sys.argv[1:split])
    sys.argv[1:] = sys.argv[split + 1 :]
    cli.main()
