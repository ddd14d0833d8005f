"""From settings, hostfile and model to which rank holds what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_planner import model

from cluster.cabling import hostfile
from cluster.cabling.hostfile import HostEntry, Hostfile
from cluster.config import ClusterConfig
from cluster.errors import BadSetting, SplitRefused
from cluster.supervision.arrange import Arrangement, arrange, local_hostfile

GB = 1 << 30
HOSTFILES = Path(__file__).parent.parent / "hostfiles"


def arranged(ranks: int = 2, info: Any = None, **settings: Any) -> Arrangement:
    return arrange(ClusterConfig(**settings), local_hostfile(ranks), info or model(6))


def layers(found: Arrangement) -> list[tuple[int, int]]:
    return [(rank.start, rank.stop) for rank in found.ranks]


def test_a_pipeline_is_split_evenly_and_rank_0_has_the_last_layers() -> None:
    found = arranged(3)
    assert (found.strategy, found.backend, found.local) == ("pipeline", "ring", True)
    assert layers(found) == [(4, 6), (2, 4), (0, 2)]
    assert {rank.host for rank in found.ranks} == {"this machine"}


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    assert layers(arranged(2, model(6, head=4 * GB))) == [(4, 6), (0, 4)]


def test_a_wanted_split_names_the_layers_of_rank_0_first() -> None:
    assert layers(arranged(2, split=(4, 2))) == [(2, 6), (0, 2)]
    assert layers(arranged(3, split=(1, 2, 3))) == [(5, 6), (3, 5), (0, 3)]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ((4, 3), "--split 4,3 is for 2 ranks and 7 layers, but there are 2 ranks and the model has 6 layers"),
        ((2, 2, 2), "--split 2,2,2 is for 3 ranks and 6 layers, but there are 2 ranks and the model has 6 layers"),
    ],
)
def test_a_split_that_does_not_add_up_is_told_with_all_four_numbers(split: tuple[int, ...], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        arranged(2, split=split)


def test_a_split_of_layers_is_no_setting_of_tensor_parallel() -> None:
    with pytest.raises(BadSetting, match="--split is for --parallel pipeline"):
        arranged(2, model(6, tensor=(2,)), parallel="tensor", split=(3, 3))


def test_every_tensor_rank_has_all_layers() -> None:
    found = arranged(3, model(6, tensor=(3,)), parallel="tensor")
    assert (found.strategy, layers(found)) == ("tensor", [(0, 6)] * 3)


def test_tensor_parallel_that_does_not_divide_is_refused_with_reason_and_alternatives() -> None:
    with pytest.raises(SplitRefused, match="tensor-parallel on 2 ranks: 2 is odd") as refusal:
        arranged(2, model(6, tensor=(3,)), parallel="tensor")
    assert refusal.value.hint == "Possible: tensor parallel on 3 ranks or a pipeline on 2 to 6 ranks."


@pytest.mark.parametrize("parallel", ["pipeline", "auto"])
def test_a_pipeline_that_cannot_be_is_refused_with_reason_and_alternatives(parallel: str) -> None:
    with pytest.raises(SplitRefused, match="8 stages: it has 6 layers") as refusal:
        arranged(8, model(6, tensor=(2,)), parallel=parallel)
    assert refusal.value.hint == "Possible: tensor parallel on 2 ranks or a pipeline on 2 to 6 ranks."


def test_by_default_a_model_that_cannot_be_staged_is_sharded_where_that_works() -> None:
    assert arranged(2, model(6, tensor=(2,), pipeline="it is odd")).strategy == "tensor"
    assert arranged(2, model(6, tensor=(2,))).strategy == "pipeline"
    with pytest.raises(SplitRefused, match="it is odd"):
        arranged(3, model(6, tensor=(2,), pipeline="it is odd"))


def test_over_nccl_only_tensor_parallel_is_possible() -> None:
    gpus = replace(local_hostfile(2), backend="nccl")
    info = model(6, tensor=(2,))
    assert arrange(ClusterConfig(), gpus, info).strategy == "tensor"
    with pytest.raises(BadSetting, match="no send and receive"):
        arrange(ClusterConfig(parallel="pipeline"), gpus, info)


def test_hosts_of_a_hostfile_keep_their_names_and_order() -> None:
    hosts = Hostfile((HostEntry("studio-b", ("10.0.0.2",)), HostEntry("studio-a", ("10.0.0.1",))), "ring")
    found = arrange(ClusterConfig(), hosts, model(6))
    assert [rank.host for rank in found.ranks] == ["studio-b", "studio-a"]
    assert not found.local


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_example_hostfiles_for_one_machine_are_what_local_makes(ranks: int) -> None:
    assert hostfile.read(HOSTFILES / f"local-{ranks}.json") == local_hostfile(ranks)
