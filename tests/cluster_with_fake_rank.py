"""The `cluster` command with `fake_rank.py` in the place of a rank, for tests.

    python cluster_with_fake_rank.py [FAKE-RANK-OPTION ...] -- up MODEL ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster import cli, launch

if __name__ == "__main__":
    split = sys.argv.index("--")
    launch.RANK_COMMAND = (sys.executable, str(Path(__file__).with_name("fake_rank.py")), *sys.argv[1:split])
    sys.argv[1:] = sys.argv[split + 1 :]
    cli.main()
