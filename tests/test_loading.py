"""Loading reads what is this rank's and nothing else, and never holds more than it must."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architectures import blank, config_of, draw
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from parallel import loading, pipeline

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 16,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}
SLACK = 1.15  # of a rank's share, at the peak of loading
TOKENS = mx.array([[1, 2, 3, 4, 5]])


def weights_of(config: dict[str, Any]) -> dict[str, mx.array]:
    mx.random.seed(1)
    weights = dict(draw(blank(config), seed=1))
    mx.eval(weights)
    return weights


def write(path: Path, weights: dict[str, mx.array], kind: str = "mlx") -> None:
    """A float32 safetensors file with the tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": kind}}
    at = 0
    for name, array in weights.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.array(array).tobytes() for array in weights.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def folder_of(folder: Path, config: dict[str, Any], files: dict[str, dict[str, mx.array]], kind: str = "mlx") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, weights in files.items():
        write(folder / name, weights, kind)
    return folder


def in_layers(weights: dict[str, mx.array], start: int, stop: int) -> dict[str, mx.array]:
    prefixes = tuple(f"model.layers.{i}." for i in range(start, stop))
    return {name: array for name, array in weights.items() if name.startswith(prefixes)}


def peak_bytes(load: Any) -> tuple[Any, int]:
    """What `load` returns, and the most memory that MLX held meanwhile beyond what it held before."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = load()
    return result, mx.get_peak_memory() - before


def bytes_of(parameters: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(parameters))


@pytest.fixture(scope="module")
def llama() -> dict[str, mx.array]:
    return weights_of(LLAMA)


# ---------------------------------------------------------------- a stage


def test_stages_of_a_folder_chained_are_the_model_of_that_folder(tmp_path, llama):
    folder = folder_of(tmp_path, LLAMA, {"model.safetensors": llama})
    whole, config = loading.load_model(folder)
    hidden: mx.array = TOKENS
    for start, stop in [(0, 5), (5, 6), (6, 16)]:
        stage, stage_config = loading.load_stage(folder, start, stop)
        assert stage_config == config
        hidden = stage(hidden, cache=stage.make_cache())
    assert mx.array_equal(hidden, whole(TOKENS, cache=make_prompt_cache(whole)))


def bytes_read() -> int:
    """What this process has read from files so far."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux to tell what a process has read")
@pytest.mark.parametrize(("start", "stop"), [(0, 6), (6, 9), (9, 16)])
def test_a_stage_of_a_single_file_reads_no_weights_of_other_layers(tmp_path, llama, start, stop):
    folder = folder_of(tmp_path, LLAMA, {"model.safetensors": llama})
    loading.load_stage(folder, start, stop)  # whatever is imported on the way
    before = bytes_read()
    stage, _ = loading.load_stage(folder, start, stop)
    share = bytes_of(stage.parameters())
    assert share <= bytes_read() - before <= share + 100_000  # the config and the file's header, of 15 KB, twice


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (6, 9), (9, 16)])
def test_a_stage_takes_the_memory_of_its_own_weights(tmp_path, llama, start, stop):
    folder = folder_of(tmp_path, LLAMA, {"model.safetensors": llama})
    (stage, _), peak = peak_bytes(lambda: loading.load_stage(folder, start, stop))
    share = bytes_of(stage.parameters())
    assert share < bytes_of(llama) / 2
    assert share <= peak <= SLACK * share


def test_progress_counts_the_bytes_of_the_stage(tmp_path, llama):
    folder = folder_of(tmp_path, LLAMA, {"model.safetensors": llama})
    seen: list[tuple[int, int]] = []
    stage, _ = loading.load_stage(folder, 3, 5, lambda done, total: seen.append((done, total)))
    total = bytes_of(stage.parameters())
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def split_in_two(llama: dict[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    early = in_layers(llama, 0, 8)
    late = {name: array for name, array in llama.items() if name not in early}
    return {"model-00001-of-00002.safetensors": early, "model-00002-of-00002.safetensors": late}


def test_files_that_hold_nothing_of_a_stage_may_be_missing(tmp_path, llama):
    first, second = split_in_two(llama).items()
    folder = folder_of(tmp_path, LLAMA, dict([second]))
    stage, _ = loading.load_stage(folder, 8, 16)
    complete = folder_of(tmp_path / "all", LLAMA, dict([first, second]))
    expected, _ = loading.load_stage(complete, 8, 16)
    inputs = mx.ones((1, 5, 128))
    assert mx.array_equal(stage(inputs, cache=stage.make_cache()), expected(inputs, cache=expected.make_cache()))


def test_weights_that_a_stage_needs_and_no_file_has_are_named(tmp_path, llama):
    folder = folder_of(tmp_path, LLAMA, dict([list(split_in_two(llama).items())[1]]))
    with pytest.raises(ValueError, match=r"no weights for model.layers.7.*which layers 7 to 9 need"):
        loading.load_stage(folder, 7, 10)


def test_some_files_of_a_foreign_format_are_refused_since_they_may_be_converted_otherwise(tmp_path, llama):
    folder = folder_of(tmp_path, LLAMA, dict([list(split_in_two(llama).items())[1]]), kind="pt")
    with pytest.raises(ValueError, match="only some of the model's files"):
        loading.load_stage(folder, 8, 16)


def test_weights_of_another_shape_are_refused(tmp_path, llama):
    folder = folder_of(tmp_path, LLAMA | {"intermediate_size": 512}, {"model.safetensors": llama})
    with pytest.raises(ValueError, match="shape"):
        loading.load_stage(folder, 8, 16)


def test_a_model_that_cannot_be_a_pipeline_is_refused_before_its_weights_are_looked_at(tmp_path):
    folder = folder_of(tmp_path, config_of("kimi_k3"), {})
    with pytest.raises(ValueError, match="kimi_k3 hands several tensors"):
        loading.load_stage(folder, 0, 3)


def test_the_stages_of_a_folder_keep_what_sanitizing_gave_them(tmp_path):
    config = config_of("gemma3_text")
    weights = weights_of(config)
    del weights["lm_head.weight"]  # mlx-lm then takes the embedding as the head
    folder = folder_of(tmp_path, config, {"model.safetensors": weights})
    first, _ = loading.load_stage(folder, 0, 2)
    last, _ = loading.load_stage(folder, 2, 6)
    whole, _ = loading.load_model(folder)
    logits = last(first(TOKENS, cache=first.make_cache()), cache=last.make_cache())
    assert mx.array_equal(logits, whole(TOKENS, cache=make_prompt_cache(whole)))
    assert "model.embed_tokens.weight" in dict(tree_flatten(last.parameters()))


def test_some_files_of_a_quantised_model_load_as_a_stage(tmp_path):
    model = blank(LLAMA)
    nn.quantize(model, group_size=32, bits=4)
    config = LLAMA | {"quantization": {"group_size": 32, "bits": 4}}
    folder_of(tmp_path / "all", config, {})
    folder_of(tmp_path / "some", config, {})
    for name, weights in split_in_two(dict(tree_flatten(model.parameters()))).items():
        mx.save_safetensors(str(tmp_path / "all" / name), weights, metadata={"format": "mlx"})
    mx.save_safetensors(str(tmp_path / "some" / name), weights, metadata={"format": "mlx"})
    loaded = [loading.load_stage(tmp_path / folder, 8, 16)[0] for folder in ("all", "some")]
    inputs = mx.ones((1, 5, 128))
    ours, expected = (stage(inputs, cache=stage.make_cache()) for stage in loaded)
    assert mx.array_equal(ours, expected)
    assert (
        bytes_of(loaded[1].parameters()) < bytes_of(in_layers(dict(tree_flatten(blank(LLAMA).parameters())), 8, 16)) / 3
    )


# ---------------------------------------------------------------- a shard


class Group:
    """What mlx-lm's shard() asks of a distributed group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def test_the_shards_of_all_ranks_together_are_the_model(tmp_path, llama):
    folder = folder_of(tmp_path, LLAMA, {"model.safetensors": llama})
    parts = [loading.load_shard(folder, Group(rank, 2))[0] for rank in range(2)]
    attention = [model.model.layers[11].self_attn for model in parts]
    prefix = "model.layers.11.self_attn"
    assert mx.array_equal(mx.concatenate([a.q_proj.weight for a in attention]), llama[f"{prefix}.q_proj.weight"])
    assert mx.array_equal(mx.concatenate([a.o_proj.weight for a in attention], 1), llama[f"{prefix}.o_proj.weight"])
    assert mx.array_equal(parts[1].lm_head.weight, llama["lm_head.weight"])


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2)])
def test_a_shard_takes_the_memory_of_its_own_slices(tmp_path, llama, rank, size):
    folder = folder_of(tmp_path, LLAMA, {"model.safetensors": llama})
    (model, _), peak = peak_bytes(lambda: loading.load_shard(folder, Group(rank, size)))
    share = bytes_of(model.parameters())
    assert share < 0.6 * bytes_of(llama)
    assert share <= peak <= SLACK * share


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "muse_spark"])
def test_a_shard_lets_go_of_what_its_slices_were_cut_from(tmp_path, name):
    config = config_of(name)
    folder = folder_of(tmp_path, config, {"model.safetensors": weights_of(config)})
    mx.clear_cache()
    before = mx.get_active_memory()
    model, _ = loading.load_shard(folder, Group(1, 2))
    assert mx.get_active_memory() - before <= 1.05 * bytes_of(model.parameters())


def test_progress_of_a_shard_counts_the_bytes_of_the_slices(tmp_path, llama):
    folder = folder_of(tmp_path, LLAMA, {"model.safetensors": llama})
    seen: list[tuple[int, int]] = []
    model, _ = loading.load_shard(folder, Group(0, 2), lambda done, total: seen.append((done, total)))
    total = bytes_of(model.parameters())
    assert (seen[0], seen[-1]) == ((0, total), (total, total))


def test_a_model_that_does_not_divide_is_refused(tmp_path, llama):
    folder = folder_of(tmp_path, LLAMA, {"model.safetensors": llama})
    with pytest.raises(ValueError, match="do not divide by 3"):
        loading.load_shard(folder, Group(0, 3))


# ---------------------------------------------------------------- the rest of a folder


def test_the_context_is_read_from_the_config_or_its_text_part(tmp_path):
    folder = folder_of(tmp_path, {"max_position_embeddings": 4096}, {})
    assert loading.context_of(folder) == 4096
    folder_of(tmp_path, {"text_config": {"max_seq_len": 512}}, {})
    assert loading.context_of(folder) == 512
    folder_of(tmp_path, {}, {})
    assert loading.context_of(folder) == 0


def test_all_of_a_model_is_loaded_with_progress(tmp_path, llama):
    folder = folder_of(tmp_path, LLAMA, {"model.safetensors": llama})
    seen: list[tuple[int, int]] = []
    model, config = loading.load_model(folder, lambda done, total: seen.append((done, total)))
    assert config == LLAMA
    assert seen[-1] == (bytes_of(model.parameters()),) * 2 == (bytes_of(llama),) * 2
    assert pipeline.why_not(config) == ""
