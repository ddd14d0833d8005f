"""Sizes from config.json alone, against the same models made real; and the child process that reads them."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import pytest
from architectures import NAMES, build, config_of
from mlx.utils import tree_flatten
from shapes import DEEPSEEK, KIMI, MISTRAL, MUSE, SHAPES, shape

from cluster.errors import ModelNotUnderstood, SplitRefused
from cluster.plan import model_info
from parallel.blueprint import bytes_of, quantisation_of
from parallel.engine import kv
from parallel.model_info import describe, main, read_config
from parallel.wire import LayerInfo, ModelInfo, TensorSize

TOKENS = 20


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def info(**changes) -> ModelInfo:
    values = {
        "model_type": "llama",
        "family": "llama",
        "dtype": "bfloat16",
        "layers": [LayerInfo(100, 100, [(4, 0)])] * 4,
        "embedding": 10,
        "head": 0,
        "outside": 1,
        "tied": True,
        "hidden": 8,
        "vocabulary": 16,
        "widest": 32,
        "wire": 16,
        "context": 4096,
        "tensor": [TensorSize(2, ["9 heads do not divide by 2"]), TensorSize(3, [], 40)],
        "pipeline": "",
        "measured": False,
    }
    return ModelInfo(**(values | changes))


# ---------------------------------------------------------------- from config.json alone


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_kv_from_the_config_are_those_of_the_model_made_real(name, tmp_path):
    foretold = describe(written(tmp_path, config_of(name) | {"torch_dtype": "float32"}))
    model = build(name)
    assert foretold.weights == bytes_of(model.parameters())
    solo = kv.new_solo(model)
    mx.eval(model(mx.zeros((1, TOKENS), mx.int32), cache=solo), kv.arrays(solo))
    shape = kv.shape_of(solo)
    if name != "deepseek_v41":  # its caches do not tell their shape
        assert foretold.kv_bytes(300) == shape.exact_bytes(300)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "muse_spark", "kimi_k3", "deepseek_v41"])
def test_describing_a_model_evaluates_none_of_it(name, tmp_path):
    folder = written(tmp_path, config_of(name))
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    size = describe(folder).weights
    assert mx.get_peak_memory() - before < size / 100


def test_a_layer_with_a_window_holds_no_more_than_the_window():
    layer = LayerInfo(0, 0, [(10, 8), (3, 0)], fixed=5)
    assert [layer.kv_bytes(4), layer.kv_bytes(100)] == [5 + 40 + 12, 5 + 80 + 300]


def test_tensor_ranks_share_kv_heads_and_repeat_those_that_are_fewer():
    layer = LayerInfo(0, 0, [(8, 0)], kv_heads=4)
    assert [layer.kv_bytes(10, ranks) for ranks in (1, 2, 4, 8)] == [80, 40, 20, 20]
    assert LayerInfo(0, 0, [(8, 0)]).kv_bytes(10, 4) == 80  # a latent cache is whole on every rank


@pytest.mark.parametrize(
    ("name", "parameters", "bits"), [(DEEPSEEK, 671e9, 4.5), (KIMI, 1026e9, 4.5), (MISTRAL, 128e9, 8.5)]
)
def test_published_sizes_come_out(name, parameters, bits):
    found = shape(name)
    assert found.parameters == pytest.approx(parameters, rel=0.01)
    assert 8 * found.weights / found.parameters == pytest.approx(bits, rel=0.01)


def test_muse_spark_packs_the_experts_of_all_but_the_first_and_last_layer():
    found = shape(MUSE)
    assert found.parameters == pytest.approx(816e9, rel=0.01)
    assert found.layers[0].weights == found.layers[-1].weights > 2.5 * found.layers[1].weights
    assert found.wire == 4 * found.hidden  # its stream between layers is float32


def test_an_mla_cache_is_counted_by_its_latent_width():
    assert shape(DEEPSEEK).layers[5].kv == [((512 + 64) * 2, 0)]


def test_only_the_chosen_experts_count_as_read():
    dense, sparse = shape(DEEPSEEK).layers[0], shape(DEEPSEEK).layers[-1]
    assert dense.active == dense.weights
    experts = 3 * 7168 * 2048 * 4.5 / 8
    assert sparse.weights - sparse.active == pytest.approx((256 - 8) * experts, rel=1e-6)


def test_the_child_stays_small_for_a_trillion_parameters():
    # a process counts the memory of the one that forked it, so a small one starts the child
    starter = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", starter, *model_info.COMMAND, str(SHAPES / f"{KIMI}.json")]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak * (1 if sys.platform == "darwin" else 1024) < 500e6


# ---------------------------------------------------------------- with weights


def test_sizes_of_a_folder_with_weights_are_from_their_headers(tiny_model):
    found = describe(tiny_model)
    stored = sum(
        array.nbytes for file in tiny_model.glob("model*.safetensors") for _, array in tree_flatten(mx.load(str(file)))
    )
    assert found.measured
    assert found.weights == stored


def test_a_folder_that_lacks_some_of_its_weight_files_is_sized_by_its_config(tmp_path):
    folder = written(tmp_path, config_of("llama"))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert not describe(folder).measured


def test_a_layer_that_was_kept_unpacked_counts_in_full(tmp_path):
    packed = {"group_size": 32, "bits": 4, "mode": "affine"}
    config = config_of("llama") | {"torch_dtype": "float32", "quantization": packed}
    plain = describe(written(tmp_path, config))
    packed["model.layers.0.mlp.down_proj"] = False
    mixed = describe(written(tmp_path, config))
    assert mixed.layers[0].weights > plain.layers[0].weights
    assert mixed.layers[1].weights == plain.layers[1].weights


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("foreign", "expected"),
    [
        ({"quant_method": "mxfp4"}, (32, 4, "mxfp4")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (16, 4, "nvfp4")),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}}, (16, 4, "nvfp4")),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, (32, 4, "affine")),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, (128, 4, "affine")),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, (32, 8, "mxfp8")),
    ],
)
def test_foreign_formats_are_those_that_mlx_lm_keeps_packed(foreign, expected):
    found = quantisation_of({"quantization_config": foreign})
    assert (found["group_size"], found["bits"], found["mode"]) == expected


def test_fp8_that_mlx_lm_unpacks_counts_as_unpacked():
    assert quantisation_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}) is None


def test_what_a_foreign_format_leaves_out_stays_unpacked(tmp_path):
    foreign = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*self_attn.*"]}
    some = describe(written(tmp_path, config_of("llama") | {"quantization_config": foreign}))
    every = describe(written(tmp_path, config_of("llama") | {"quantization_config": foreign | {"ignore": []}}))
    assert some.layers[0].weights > every.layers[0].weights
    assert some.embedding == every.embedding  # such formats never pack it


def test_the_settings_that_an_export_keeps_beside_the_config_are_read(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    assert read_config(written(tmp_path, config_of("llama")))["quantization_config"]["quant_method"] == "modelopt"


def test_nested_and_flat_configs_are_read_alike(tmp_path):
    found = describe(written(tmp_path, config_of("mistral3")))
    assert (found.family, found.hidden, found.vocabulary, found.context) == ("mistral3", 128, 384, 512)


# ---------------------------------------------------------------- the child process


def test_reading_a_folder_gives_the_splits_it_allows(tmp_path):
    config = config_of("llama") | {"num_attention_heads": 9, "num_key_value_heads": 3, "torch_dtype": "bfloat16"}
    found = model_info.read(written(tmp_path, config))
    assert found.tensor_sizes == [3]
    assert not found.measured


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "nobody_knows"}, "Model type nobody_knows not supported"),
        ({"hidden_size": 8}, "names no model_type"),
        ({"model_type": "llama", "hidden_size": 8}, "cannot build llama"),
        ({"model_type": "llama", "model_file": "mine.py"}, "program of its own"),
        ([1], "not a JSON object"),
    ],
)
def test_a_config_that_cannot_be_built_is_told_in_one_line(config, words, tmp_path):
    with pytest.raises(ModelNotUnderstood, match=words) as told:
        model_info.read(written(tmp_path, config))
    assert "\n" not in told.value.message


def test_a_config_that_is_not_json_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama",}')
    with pytest.raises(ModelNotUnderstood, match="line 1 column"):
        model_info.read(tmp_path)


def test_a_child_that_hangs_is_ended_at_its_deadline(tmp_path):
    hanging = (sys.executable, "-c", "import time; time.sleep(600)")
    with pytest.raises(ModelNotUnderstood, match=r"more than 0\.2 seconds"):
        model_info.read(tmp_path, command=hanging, deadline_s=0.2)


def test_a_child_that_dies_without_a_word_is_told(tmp_path):
    with pytest.raises(ModelNotUnderstood, match="exit code 7"):
        model_info.read(tmp_path, command=(sys.executable, "-c", "raise SystemExit(7)"))


@pytest.mark.parametrize(("ranks", "code"), [("3", None), ("2", 3)])
def test_asked_for_a_number_of_ranks_the_child_says_by_its_exit_code_whether_they_can_be(ranks, code, tmp_path, capsys):
    folder = written(tmp_path, config_of("llama") | {"num_attention_heads": 9, "num_key_value_heads": 3})
    ended = None
    try:
        main([str(folder), "--ranks", ranks])
    except SystemExit as end:
        ended = end.code
    said = capsys.readouterr()
    assert ended == code
    assert json.loads(said.out)["family"] == "llama"
    assert ("9 attention heads do not divide by 2" in said.err) == (code == 3)


# ---------------------------------------------------------------- checks before ranks are started


def test_a_refused_tensor_split_tells_the_reason_and_what_works():
    with pytest.raises(SplitRefused, match="9 heads do not divide by 2") as told:
        model_info.check_tensor(info(), 2)
    assert told.value.hint == "Possible: tensor parallel on 3 ranks or a pipeline on 2 to 4 ranks."
    model_info.check_tensor(info(), 3)


def test_a_pipeline_needs_a_layer_per_stage():
    model_info.check_pipeline(info(), 4)
    with pytest.raises(SplitRefused, match="4 layers, fewer than 5 stages"):
        model_info.check_pipeline(info(), 5)


def test_a_model_that_can_be_neither_runs_on_one_machine():
    alone = info(tensor=[TensorSize(2, ["no shard()"])], pipeline="never tried as stages")
    with pytest.raises(SplitRefused, match="never tried as stages") as told:
        model_info.check_pipeline(alone, 2)
    assert told.value.hint == "Possible: one machine only."
