"""One drill of test_drills.py on a tiny model: the quickest look whether a cluster over ssh works."""

from __future__ import annotations

from pathlib import Path

import pytest
from netns.drill import Clients, Drill, lose
from netns.machines import Network

pytestmark = pytest.mark.netns


def test_a_cluster_on_two_hosts_serves_loses_a_rank_and_serves_again(network: Network, tiny_model: Path):
    drill = Drill(network, hosts=("a", "b"))
    with drill.serving(str(tiny_model), "--parallel", "pipeline"), Clients(drill, story=4000) as clients:
        assert drill.ready(2)
        told, _, _ = lose(drill, clients, drill.rank(1).kill)
        assert "rank 1 on b: its connection closed" in told
        assert drill.ready(2)
        drill.only_this_launch()
