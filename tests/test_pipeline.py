"""Stages chained in one process against the whole model: every architecture, several splits, chunks, buckets."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matrix
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architectures import build, config_of
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from parallel import pipeline
from parallel.engine import kv

SHARED = 14  # tokens of the prefix that two prompts share


# ---------------------------------------------------------------- one run of whatever is chained


def prompts() -> dict[str, list[int]]:
    draw = random.Random(7)
    tokens = [draw.randrange(1, 384) for _ in range(60)]
    return {
        "long": tokens[:23],
        "sharing": tokens[:SHARED] + tokens[23:29],
        "short": tokens[30:35],
        "joining": tokens[40:51],
    }


@dataclass
class Row:
    """A sequence: what to feed next, its greedy tokens and the logits they came from."""

    id: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)

    @property
    def next(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    def take(self, logits: np.ndarray) -> None:
        self.logits.append(logits)
        self.tokens.append(int(logits.argmax()))


class Chain:
    """Stages of one model, one after the other; solos and buckets are lists with one entry per stage."""

    def __init__(self, stages: list[pipeline.Stage]) -> None:
        self.stages = stages

    def open(self) -> list[kv.Solo]:
        return [kv.new_solo(stage) for stage in self.stages]

    def prefill(self, solos: list[kv.Solo], tokens: list[int], chunk: int) -> None:
        for at in range(0, len(tokens), chunk):
            self._run([mx.array([tokens[at : at + chunk]])], [solos])

    def decode(self, batches: list[Batch]) -> None:
        """One token for every row; each stage runs all batches before the next stage does."""
        for batch in batches:
            for bucket in batch.buckets:
                bucket.advance()
        inputs = [mx.array([[row.next] for row in batch.in_order()]) for batch in batches]
        outputs = self._run(inputs, [[bucket.caches for bucket in batch.buckets] for batch in batches])
        for batch, logits in zip(batches, outputs, strict=True):
            for row, line in zip(batch.in_order(), np.array(logits[:, -1].astype(mx.float32)), strict=True):
                row.take(line)

    def _run(self, flowing: list[mx.array], caches: list[list[kv.Solo]]) -> list[mx.array]:
        for number, stage in enumerate(self.stages):
            flowing = [stage(x, cache=cache[number]) for x, cache in zip(flowing, caches, strict=True)]
            mx.eval(flowing, *(kv.arrays(cache[number]) for cache in caches))
        return flowing


class Batch:
    """Rows that decode together: one bucket per stage."""

    def __init__(self, chain: Chain) -> None:
        self.buckets = [kv.Bucket() for _ in chain.stages]
        self.rows: dict[int, Row] = {}

    def in_order(self) -> list[Row]:
        return [self.rows[id] for id in self.buckets[0].rows]

    def join(self, entering: list[tuple[Row, list[kv.Solo]]]) -> None:
        for number, bucket in enumerate(self.buckets):
            ids = [row.id for row, _ in entering]
            lengths = [len(row.prompt) - 1 for row, _ in entering]
            bucket.join(ids, [solos[number] for _, solos in entering], lengths)
        self.rows |= {row.id: row for row, _ in entering}

    def drop(self, row: Row) -> None:
        for bucket in self.buckets:
            bucket.drop({row.id})
        del self.rows[row.id]

    def absorb(self, other: Batch) -> None:
        for bucket, its in zip(self.buckets, other.buckets, strict=True):
            bucket.absorb(its)
        self.rows |= other.rows


def serve(chain: Chain, chunk: int) -> dict[str, Row]:
    """Two interleaved micro-batches of unequal rows; a prefix hit, a join, a leave and a merge."""
    rows = {name: Row(i, prompt) for i, (name, prompt) in enumerate(prompts().items())}
    stage = chain.stages[0]
    solos = {"long": chain.open()}
    chain.prefill(solos["long"], rows["long"].prompt[:SHARED], chunk)
    if stage.reuse == "off":
        solos["sharing"] = chain.open()
        chain.prefill(solos["sharing"], rows["sharing"].prompt[:-1], chunk)
    else:
        solos["sharing"] = [kv.fork(solo, SHARED) for solo in solos["long"]]
        chain.prefill(solos["sharing"], rows["sharing"].prompt[SHARED:-1], chunk)
    chain.prefill(solos["long"], rows["long"].prompt[SHARED:-1], chunk)
    for name in ("short", "joining"):
        solos[name] = chain.open()
        chain.prefill(solos[name], rows[name].prompt[:-1], chunk)

    one, two = Batch(chain), Batch(chain)
    if not stage.batchable:
        one.join([(rows["long"], solos["long"])])
        two.join([(rows["sharing"], solos["sharing"])])
        for _ in range(6):
            chain.decode([one, two])
        return {name: row for name, row in rows.items() if row.tokens}
    one.join([(rows["long"], solos["long"]), (rows["short"], solos["short"])])
    two.join([(rows["sharing"], solos["sharing"])])
    for _ in range(3):
        chain.decode([one, two])
    two.join([(rows["joining"], solos["joining"])])
    for _ in range(2):
        chain.decode([two, one])
    one.drop(rows["long"])
    chain.decode([one, two])
    two.absorb(one)
    for _ in range(2):
        chain.decode([two])
    return rows


@functools.lru_cache(maxsize=4)
def alone(name: str) -> dict[str, Row]:
    """What the whole model makes of each prompt by itself, prefilled in one piece."""
    model, rows = build(name), {}
    for key, prompt in prompts().items():
        row, caches = Row(0, prompt), make_prompt_cache(model)
        logits = model(mx.array([prompt]), cache=caches)
        for _ in range(8):
            row.take(np.array(logits[0, -1].astype(mx.float32)))
            logits = model(mx.array([[row.next]]), cache=caches)
        rows[key] = row
    return rows


def stages_of(name: str, split: tuple[int, ...]) -> list[pipeline.Stage]:
    layers = len(build(name).layers)
    return [pipeline.Stage(build(name), start, stop) for start, stop in matrix.ranges(split, layers)]


def compare(name: str, split: tuple[int, ...], chunk: int) -> None:
    rows = serve(Chain(stages_of(name, split)), chunk)
    for key, row in rows.items():
        expected = alone(name)[key]
        assert len(row.tokens) >= 3
        worst = max(np.abs(a - b).max() for a, b in zip(row.logits, expected.logits, strict=False))
        assert worst <= matrix.TOLERANCE, f"{key}: logits differ by {worst}"
        assert row.tokens == expected.tokens[: len(row.tokens)], key


def told(case: tuple[str, tuple[int, ...], int]) -> str:
    name, split, chunk = case
    return f"{name}-{'+'.join(map(str, split))}-chunks-of-{chunk}"


@pytest.mark.parametrize("case", matrix.cases(matrix.QUICK), ids=told)
def test_stages_give_every_row_what_the_whole_model_gives_it_alone(case):
    compare(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", matrix.cases(matrix.FULL), ids=told)
def test_stages_of_any_split_and_chunk_size_do_so_too(case):
    compare(*case)


def test_the_models_page_is_what_the_matrix_says():
    page = (Path(__file__).parent.parent / "docs/models.md").read_text()
    assert page == matrix.document(), "run: python tests/matrix.py > docs/models.md"


# ---------------------------------------------------------------- what a stage holds


def names_of(stage: pipeline.Stage) -> set[str]:
    return {name for name, _ in tree_flatten(stage.parameters())}


def test_each_weight_is_on_one_stage_where_the_head_is_its_own():
    first, middle, last = (names_of(stage) for stage in stages_of("qwen3", (2, 1, 3)))
    assert first | middle | last == {name for name, _ in tree_flatten(build("qwen3").parameters())}
    assert len(first) + len(middle) + len(last) == len(first | middle | last)
    assert "model.embed_tokens.weight" in first
    assert {"model.norm.weight", "lm_head.weight"} <= last
    assert {name.split(".")[2] for name in middle} == {"2"}


def test_an_embedding_that_is_also_the_head_is_on_the_first_and_the_last_stage():
    first, middle, last = (names_of(stage) for stage in stages_of("llama", (2, 1, 3)))
    assert first & last == {"model.embed_tokens.weight"}
    assert "model.embed_tokens.weight" not in middle


def test_weights_beside_the_language_model_are_on_no_stage():
    model = build("qwen3")
    model.vision_tower = build("llama")
    stage = pipeline.Stage(model, 3, 6)
    assert not any(name.startswith("vision") for name in names_of(stage))


def test_one_stage_of_all_layers_is_the_whole_model():
    tokens = mx.array([[1, 2, 3]])
    stage = pipeline.Stage(build("gemma3_text"), 0, 6)
    assert mx.array_equal(stage(tokens, cache=stage.make_cache()), build("gemma3_text")(tokens))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_stages_of_quantised_weights_are_the_quantised_model(name):
    def quantised() -> Any:
        model = build(name)
        nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, module: hasattr(module, "to_quantized"))
        return model

    first, last = pipeline.Stage(quantised(), 0, 2), pipeline.Stage(quantised(), 2, 6)
    tokens = mx.array([[5, 6, 7, 8]])
    logits = last(first(tokens, cache=first.make_cache()), cache=last.make_cache())
    assert mx.array_equal(logits, quantised()(tokens))


# ---------------------------------------------------------------- what enters a stage


def test_token_ids_enter_the_first_stage_and_hidden_states_the_others():
    first, second = stages_of("qwen3", (3, 3))
    assert (first.first, first.last, second.first, second.last) == (True, False, False, True)
    assert first.boundary == (1, mx.int32)
    assert second.boundary == (128, mx.float32)
    assert (first.blank(2, 5).shape, second.blank(2, 5).shape) == ((2, 5), (2, 5, 128))
    handed_on = first(first.blank(2, 5), cache=first.make_cache())
    assert (handed_on.shape, handed_on.dtype) == ((2, 5, 128), mx.float32)
    assert second(handed_on, cache=second.make_cache()).shape == (2, 5, 384)


def in_bfloat16(name: str) -> Any:
    model = build(name)
    model.set_dtype(mx.bfloat16)
    return model


def test_bfloat16_weights_make_bfloat16_hidden_states_but_for_muse_spark():
    assert pipeline.Stage(in_bfloat16("llama"), 2, 6).boundary == (128, mx.bfloat16)
    assert pipeline.Stage(in_bfloat16("muse_spark"), 2, 6).boundary == (96, mx.float32)


def test_a_stage_that_failed_can_be_called_again():
    stage = pipeline.Stage(build("llama"), 3, 6)
    good = mx.ones((1, 2, 128))
    expected = stage(good, cache=stage.make_cache())
    with pytest.raises(ValueError, match="norm"):
        stage(mx.ones((1, 2, 64)), cache=stage.make_cache())
    assert mx.array_equal(stage(good, cache=stage.make_cache()), expected)


def test_a_cache_has_an_entry_for_each_local_layer():
    whole = [type(cache) for cache in make_prompt_cache(build("muse_spark"))]
    kinds = [[type(cache) for cache in kv.new_solo(stage)] for stage in stages_of("muse_spark", (2, 1, 3))]
    assert [len(part) for part in kinds] == [2, 1, 3]
    assert [kind for part in kinds for kind in part] == whole


def test_every_stage_says_of_prefix_reuse_what_holds_for_the_whole_model():
    stages = [*stages_of("gpt_oss", (2, 1, 3)), pipeline.Stage(build("gpt_oss"), 1, 2)]
    assert kv.reuse_of(stages[-1]) == "any"  # one full attention layer by itself
    assert {stage.reuse for stage in stages} == {"boundary"}
    assert {stage.batchable for stage in stages_of("llama4", (3, 1, 4))} == {False}


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (4, 7)])
def test_layers_that_are_not_there_are_refused(start, stop):
    with pytest.raises(ValueError, match="6 layers"):
        pipeline.Stage(build("llama"), start, stop)


# ---------------------------------------------------------------- which models can be stages


@pytest.mark.parametrize("name", matrix.REQUIRED + matrix.FURTHER)
def test_what_is_tried_is_allowed(name):
    assert pipeline.why_not(config_of(name)) == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kimi_k3", "kimi_k3 hands several tensors"),
        ("deepseek_v41", "deepseek_v41 hands several tensors"),
        ("gemma4_text", "embeddings of the tokens; use a single machine"),
    ],
)
def test_what_does_not_work_is_refused_by_name(name, reason):
    assert reason in pipeline.why_not(config_of(name))


def test_a_refusal_names_the_strategy_that_works():
    assert pipeline.why_not(config_of("kimi_k3")).endswith("; use tensor parallel or a single machine")
    assert pipeline.why_not({"model_type": "olmo2"}) == (
        "pipeline stages of olmo2 models have not been tested; use a single machine"
    )
    assert pipeline.why_not({"model_type": "no_such"}) == "mlx-lm has no model file for no_such"
    assert "without a model_type" in pipeline.why_not({})


def test_a_gemma4_that_shares_kv_is_refused():
    shares = config_of("gemma4_text.31B") | {"num_kv_shared_layers": 2}
    assert pipeline.why_not(shares) == "this gemma4 variant shares KV between layers; use a single machine"


def test_other_names_of_an_architecture_are_known():
    assert pipeline.why_not({"model_type": "mistral"}) == ""
    assert pipeline.why_not({"model_type": "kimi_k2"}) == ""
