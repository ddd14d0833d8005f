from __future__ import annotations

import json
from pathlib import Path

import pytest
from sharded_model import LAYERS, build_sharded_model, shard

from cluster.errors import DamagedShard
from cluster.ship.stage_files import is_weights, model_files, needed
from parallel.loading import load_stage

TEXT = ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"]
TEXT += ["tokenizer_config.json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sharded_model(tmp_path_factory.mktemp("model") / "m")


def weights(names: list[str]) -> list[str]:
    return [name for name in names if is_weights(name)]


def test_a_stage_needs_the_files_of_its_layers_and_every_text_file(folder: Path):
    wanted = needed(folder, {"a": (0, 1), "b": (1, 3), "c": (3, 4)})
    assert [weights(wanted[host]) for host in "abc"] == [[shard(0)], [shard(1), shard(2)], [shard(3)]]
    assert all(set(TEXT) < set(names) for names in wanted.values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [(0, 2), (1, 3), (2, 4)])
def test_a_stage_loads_from_just_the_files_that_it_needs(tmp_path: Path, tied: bool, layers: tuple[int, int]):
    whole = build_sharded_model(tmp_path / "whole", tied=tied)
    part = tmp_path / "part"
    part.mkdir()
    for name in needed(whole, {"a": layers, "z": (LAYERS - 1, LAYERS)})["a"]:
        (part / name).symlink_to(whole / name)
    assert len(weights(model_files(part))) < LAYERS
    stage, _ = load_stage(part, *layers)
    assert (stage.first, stage.last) == (layers[0] == 0, layers[1] == LAYERS)


def test_the_last_stage_of_a_tied_model_needs_the_embedding_for_its_head(tmp_path: Path):
    whole = build_sharded_model(tmp_path / "whole", tied=True)
    assert weights(needed(whole, {"a": (0, 2), "b": (2, 4)})["b"]) == [shard(0), shard(2), shard(3)]


def test_a_host_of_tensor_parallel_needs_everything(folder: Path):
    assert needed(folder, {"a": None, "b": (0, 4)})["a"] == model_files(folder)


def test_files_that_mlx_did_not_write_are_needed_whole(tmp_path: Path):
    whole = build_sharded_model(tmp_path / "whole", format_="pt")
    assert needed(whole, {"a": (0, 1), "b": (1, 4)})["a"] == model_files(whole)


def test_what_lies_beside_the_model_is_no_part_of_it(folder: Path, tmp_path: Path):
    for name in ("config.json", "model.safetensors", "README.md", "consolidated.safetensors", ".cache", "model.bin"):
        (tmp_path / name).write_bytes(b"")
    assert model_files(tmp_path) == ["config.json", "model.safetensors"]


def test_layers_of_a_vision_tower_are_not_the_text_models(tmp_path: Path):
    names = {
        shard(0): ["language_model.model.embed_tokens.weight", "language_model.model.layers.0.mlp.weight"],
        shard(1): ["language_model.model.layers.1.mlp.weight", "vision_tower.encoder.layers.0.weight"],
        shard(2): ["language_model.model.layers.2.mlp.weight"],
        shard(3): ["language_model.model.layers.3.mlp.weight", "language_model.lm_head.weight"],
    }
    for file, tensors in names.items():
        header = json.dumps({"__metadata__": {"format": "mlx"}} | {name: {} for name in tensors}).encode()
        (tmp_path / file).write_bytes(len(header).to_bytes(8, "little") + header)
    assert weights(needed(tmp_path, {"a": (2, 3), "z": (3, 4)})["a"]) == [shard(2)]


def test_a_header_that_cannot_be_read_is_told_by_file(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(DamagedShard, match=r"model\.safetensors"):
        needed(tmp_path, {"a": None})
