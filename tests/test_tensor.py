"""Which splits come out even, and that what passes gives the whole model's tokens on real ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from architectures import NAMES, blank, config_of

from parallel import tensor
from parallel.blueprint import bytes_of, family_of
from parallel.model_info import describe

TESTS = Path(__file__).parent
SHARDED = [name for name in NAMES if not tensor.reasons(blank(config_of(name)), 2)]
QUICK = ("llama", "qwen3_5_moe", "deepseek_v3", "gpt_oss", "mistral3", "muse_spark")
TOLERANCE = 1e-3  # of a logit; a wrong cut gives 0.1 to 9
DEADLINE_S = 200


class Ranks:
    """What `shard()` asks of a distributed group."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size
        self.rank = lambda: 0


def llama(**changes):
    config = {
        "model_type": "llama",
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 384,
    }
    return config | changes


# ---------------------------------------------------------------- on real ranks


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def run_ranks(names, size: int, folder: Path) -> dict[str, dict]:
    """What rank 0 found, by architecture."""
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
    ranks = []
    try:
        for rank in range(size):
            environment = os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(TESTS / "tensor_rank.py"), *names]
            with (folder / f"rank-{rank}").open("wb") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for process in ranks:
            process.wait(DEADLINE_S)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = [(folder / f"rank-{rank}").read_text() for rank in range(size)]
    assert [process.returncode for process in ranks] == [0] * size, "\n".join(text[-2000:] for text in said)
    found = [json.loads(line) for line in said[0].splitlines() if line.startswith("{")]
    return {one["name"]: one for one in found}


@pytest.fixture(scope="module", params=[2, 3])
def trial(request, tmp_path_factory):
    return request.param, run_ranks(QUICK, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", QUICK)
def test_the_ranks_together_give_the_whole_models_tokens_and_logits(trial, name):
    _, found = trial
    assert found[name]["equal"]
    assert found[name]["parted"] < TOLERANCE


@pytest.mark.parametrize("name", QUICK)
def test_a_rank_holds_as_many_bytes_as_was_foretold(trial, name, tmp_path):
    size, found = trial
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(name) | {"torch_dtype": "float32"}))
    foretold = {one.ranks: one.weights for one in describe(path).tensor}
    assert found[name]["bytes"] == foretold[size]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_family_that_is_let_through_gives_the_whole_models_tokens(size, tmp_path):
    found = run_ranks(SHARDED, size, tmp_path)
    assert {name: one["equal"] and one["parted"] < TOLERANCE for name, one in found.items()} == dict.fromkeys(
        SHARDED, True
    )


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "9 attention heads do not divide by 2"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "3 KV heads do not divide by 2"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 192}, 2, "3 attention heads"),
        ({"num_attention_heads": 32, "num_key_value_heads": 2}, 4, "2 KV heads do not divide by 4"),
        ({"num_attention_heads": 128, "num_key_value_heads": 64}, 3, "128 attention heads do not divide by 3"),
        ({"intermediate_size": 190}, 4, "mlp.down_proj is 190 wide"),
    ],
)
def test_an_uneven_split_is_refused_with_what_does_not_divide(changes, ranks, reason):
    assert any(reason in text for text in tensor.why_not(llama(**changes), ranks))


def test_quantisation_groups_must_divide_even_where_the_width_does():
    quantised = llama(
        hidden_size=128, intermediate_size=1856, quantization={"group_size": 64, "bits": 4, "mode": "affine"}
    )
    refused = tensor.why_not(quantised, 2)
    assert refused == [
        "the input of mlp.down_proj is 1856 wide, 29 quantisation groups of 64, which do not divide by 2"
    ]
    assert tensor.why_not({**quantised, "quantization": None}, 2) == []


def test_each_reason_is_told_once_however_many_layers_have_it():
    refused = tensor.why_not(llama(num_hidden_layers=5, num_attention_heads=9, num_key_value_heads=3), 2)
    assert len(refused) == len(set(refused)) == 2


def test_muse_spark_is_refused_where_its_shard_would_drop_columns_silently():
    config = config_of("muse_spark")
    config["text_config"]["moe_intermediate_size"] = 95
    assert any("experts.down_proj is 95 wide" in text for text in tensor.why_not(config, 2))


def test_muse_spark_cuts_its_vocabulary_too():
    config = config_of("muse_spark")
    config["text_config"]["vocab_size"] = 385
    assert tensor.why_not(config, 2) == ["a vocabulary of 385 tokens does not divide by 2"]


def test_a_family_that_keeps_the_head_whole_may_have_any_vocabulary():
    assert tensor.why_not(llama(vocab_size=385), 2) == []


@pytest.mark.parametrize(("kv_heads", "ranks", "allowed"), [(1, 2, True), (1, 3, True), (2, 3, False), (2, 6, True)])
def test_qwen3_5_repeats_kv_heads_that_are_fewer_than_the_ranks(kv_heads, ranks, allowed):
    config = config_of("qwen3_5")
    config["text_config"]["num_key_value_heads"] = kv_heads
    assert (tensor.why_not(config, ranks) == []) == allowed


def test_qwen3_5_does_not_repeat_the_heads_of_linear_attention():
    config = config_of("qwen3_5")
    config["text_config"] |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    assert any("2 key heads of linear attention" in text for text in tensor.why_not(config, 3))


def test_step3p5_checks_the_heads_of_its_sliding_layers_too():
    config = config_of("step3p5")
    config["attention_other_setting"] = {"num_attention_heads": 9, "num_attention_groups": 3}
    assert {"9 attention heads do not divide by 2", "3 KV heads do not divide by 2"} <= set(tensor.why_not(config, 2))


def test_the_index_heads_of_sparse_attention_stay_whole_and_need_not_divide():
    config = config_of("deepseek_v32") | {"index_n_heads": 5}
    assert tensor.why_not(config, 2) == []


@pytest.mark.parametrize("name", ["qwen3_next", "muse_glimmer", "gemma3_text", "gemma4_text", "llama4", "mixtral"])
def test_a_family_without_a_shard_is_refused_by_name(name):
    assert tensor.why_not(config_of(name), 2) == [f"mlx-lm cannot cut {name} by width (it has no shard())"]


def test_a_shard_that_nobody_tried_is_refused():
    model = blank(config_of("llama"))
    model.__class__ = type("Model", (type(model),), {"__module__": "mlx_lm.models.brand_new"})
    assert tensor.reasons(model, 2) == ["cutting brand_new by width was never tried here"]


@pytest.mark.parametrize("ranks", [1, 9])
def test_the_number_of_ranks_is_two_to_eight(ranks):
    assert tensor.why_not(llama(), ranks) == [f"tensor parallel is for 2 to 8 ranks, not {ranks}"]


def test_a_refused_model_is_left_as_it_was():
    model = blank(llama(num_attention_heads=9, num_key_value_heads=3))
    with pytest.raises(tensor.SplitError, match="9 attention heads do not divide by 2; 3 KV heads"):
        tensor.shard(model, Ranks(2))
    assert model.layers[0].self_attn.n_heads == 9


def test_mistral3_is_cut_inside_its_language_model():
    model = blank(config_of("mistral3"))
    before = bytes_of(model.parameters())
    tensor.shard(model, Ranks(2))
    assert bytes_of(model.parameters()) < 0.6 * before


@pytest.mark.parametrize("name", SHARDED)
def test_cutting_on_paper_evaluates_nothing_and_what_is_refused_by_mlx_lm_was_refused_before(name):
    config = config_of(name)
    able = [ranks for ranks in tensor.SIZES if not tensor.why_not(config, ranks)]
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    held = tensor.rank_bytes(tensor.build(config), lambda: tensor.build(config), able)
    assert mx.get_peak_memory() - before < 100_000
    assert list(held) == able
    assert all(held[a] > held[b] for a, b in pairwise(able))


def test_a_name_that_mlx_lm_maps_to_another_file_is_that_family():
    assert family_of(tensor.build(llama(model_type="mistral"))) == "llama"
