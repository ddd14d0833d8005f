"""The `cluster` command with another script as the rank: `python cluster_with_rank.py [RANK ARG ...] -- up`."""

from __future__ import annotations

import sys

from cluster import cli
from cluster.supervision import launch

if __name__ == "__main__":
    split = sys.argv.index("--")
    if split > 1:
        launch.RANK_COMMAND = (sys.executable, *sys.argv[1:split])
    sys.argv[1:] = sys.argv[split + 1 :]
    cli.main()
