from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from parallel import loading, random_model
from parallel.random_model import SHAPES, write_random_model

SHAPE = {**SHAPES["llama-tiny"], "vocab_size": 300}


def test_the_model_loads_with_its_shape_and_dtype_and_gives_finite_logits(tiny_model: Path, tmp_path: Path) -> None:
    size = write_random_model(tmp_path, SHAPE, mx.bfloat16, tiny_model)
    model, config = loading.load_model(tmp_path)
    weights = [array for _, array in tree_flatten(model.parameters())]
    assert {array.dtype for array in weights} == {mx.bfloat16}
    assert sum(array.nbytes for array in weights) == size
    logits = model(mx.array([[1, 2, 299]]))
    assert logits.shape == (1, 3, config["vocab_size"]) and mx.isfinite(logits).all().item()


def test_every_token_id_of_the_model_has_a_text_and_text_encodes_as_before(tiny_model: Path, tmp_path: Path) -> None:
    write_random_model(tmp_path, SHAPE, mx.float32, tiny_model)
    before = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    padded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert padded.get_vocab_size() == 300
    assert all(padded.decode([id]) for id in range(before.get_vocab_size(), 300))
    text = "the filler299 of 3 things, and more"
    assert padded.encode(text).ids == before.encode(text).ids


def test_weights_are_cut_into_shards_that_the_index_names(tiny_model: Path, tmp_path: Path) -> None:
    size = write_random_model(tmp_path, SHAPE, mx.float32, tiny_model, shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == size
    loading.load_model(tmp_path)


def test_the_same_seed_gives_the_same_weights(tiny_model: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_model(tmp_path / name, SHAPE, mx.float32, tiny_model, seed=seed)
    a, b, c = ((tmp_path / name / "model-00001-of-00001.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_a_tokenizer_larger_than_the_shape_is_refused_with_both_numbers(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"268 tokens.*only 100"):
        write_random_model(tmp_path, {**SHAPE, "vocab_size": 100}, mx.float32, tiny_model)


def test_the_command_writes_a_shape_with_fewer_layers(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(tmp_path / "out"), "--shape", "llama-tiny", "--layers", "1", "--tokenizer", str(tiny_model)]
    random_model.main(argv)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["torch_dtype"]) == (1, "bfloat16")
    assert "GB of random bfloat16 weights" in capsys.readouterr().out
