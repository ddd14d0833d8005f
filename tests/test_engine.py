"""The whole engine in process on real arrays: the same answers as mlx_lm alone, whatever else is running."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import architectures
import mlx.core as mx
import psutil
import pytest
from engine_run import Said, differences, engine_for, random_mix, run_mix
from tiny_model import build_tiny_model

from parallel import wire
from parallel.engine import executor
from parallel.engine.kv import batchable
from parallel.engine.loop import Engine
from parallel.loading import load_model

SLIDING = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "max_position_embeddings": 2048,
}
RECURRENT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 2048,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> tuple[Any, int]:
    model, config = load_model(tiny_model)
    return model, config["vocab_size"]


def ask(engine: Engine, *requests: wire.Submit) -> Said:
    said = Said()
    for request in requests:
        engine.add(request)
    while not engine.idle:
        said.take(engine.step())
    return said


@pytest.mark.parametrize("seed", range(150))
def test_a_random_mix_on_a_tiny_model_answers_as_mlx_lm_does_alone(tiny: tuple[Any, int], seed: int) -> None:
    model, vocabulary = tiny
    rng = random.Random(seed)
    engine = engine_for(model, context=1024, slots=rng.choice([3, 5, 16]), chunk_tokens=rng.choice([1, 3, 17, 64, 512]))
    requests = random_mix(rng, vocabulary, rng.choice([20, 150, 600]), count=8, tokens=12)
    said, cancelled = run_mix(engine, requests, rng)
    wrong = [w for r in requests if r.id not in cancelled for w in differences(model, r, said)]
    assert wrong == []


@pytest.mark.parametrize("seed", range(200, 206))
def test_a_random_mix_in_few_shapes_answers_alike(
    tiny: tuple[Any, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: rows and tokens of a prefill are rounded up."""
    monkeypatch.setattr(executor, "few_shapes", lambda model: True)
    test_a_random_mix_on_a_tiny_model_answers_as_mlx_lm_does_alone(tiny, seed)


def test_shapes_of_prefill_are_rounded_up_by_a_quarter_at_most() -> None:
    assert {executor.rounded(rows, 1)[0] for rows in range(1, 33)} == {1, 2, 4, 8, 16, 24, 32}
    widths = [executor.rounded(1, tokens)[1] for tokens in range(1, 2049)]
    assert all(tokens <= width <= max(tokens + 31, 1.25 * tokens) for tokens, width in enumerate(widths, start=1))
    assert len(set(widths)) <= 32


OFTEN = ("deepseek_v32", "qwen3_moe")  # caches of two kinds in a layer; experts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in architectures.NAMES]
)
def test_a_random_mix_on_every_architecture_answers_as_mlx_lm_does_alone(name: str) -> None:
    model, config = architectures.build(name), architectures.config_of(name)
    if not batchable(model):
        pytest.skip(f"{name}: mlx-lm cannot batch rows of unequal length")
    vocabulary = (config.get("text_config") or config)["vocab_size"]
    for seed in range(3):
        rng = random.Random(seed)
        engine = engine_for(model, context=512, slots=16, chunk_tokens=rng.choice([17, 64, 512]))
        requests = random_mix(rng, vocabulary, rng.choice([12, 40]), count=8, tokens=8)
        said, cancelled = run_mix(engine, requests, rng)
        wrong = [w for r in requests if r.id not in cancelled for w in differences(model, r, said)]
        assert wrong == []


@pytest.mark.model
@pytest.mark.parametrize("seed", range(2))
def test_a_random_mix_on_the_demo_model_answers_as_mlx_lm_does_alone(demo_model: Path, seed: int) -> None:
    check_demo_mix(demo_model, seed)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 50))
def test_more_random_mixes_on_the_demo_model(demo_model: Path, seed: int) -> None:
    check_demo_mix(demo_model, seed)


def check_demo_mix(folder: Path, seed: int) -> None:
    model, _ = load_model(folder)
    rng = random.Random(seed)
    engine = engine_for(model, context=1024, slots=4, chunk_tokens=rng.choice([1, 17, 128, 512]) if seed % 3 else 512)
    requests = random_mix(rng, 49152, 600 if seed % 3 == 0 else 60, count=4, tokens=6)
    said, cancelled = run_mix(engine, requests, rng)
    wrong = [w for r in requests if r.id not in cancelled for w in differences(model, r, said)]
    assert wrong == []


@pytest.mark.parametrize("config", [SLIDING, RECURRENT], ids=["sliding window", "recurrent"])
def test_caches_that_cannot_be_cut_are_reused_only_where_saved_and_answers_stay_right(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    model, loaded = load_model(build_tiny_model(tmp_path / "model", config=config))
    engine = engine_for(model, context=1024, chunk_tokens=32)
    rng = random.Random(3)
    requests = random_mix(rng, loaded["vocab_size"], 90, count=10, tokens=10)
    said, cancelled = run_mix(engine, requests, rng)
    assert [w for r in requests if r.id not in cancelled for w in differences(model, r, said)] == []
    prompt = [rng.randrange(loaded["vocab_size"]) for _ in range(70)]
    greedy = wire.Sampling(temperature=0.0, logprobs=0)
    first, again = wire.Submit(100, prompt, 8, 1, greedy), wire.Submit(101, [*prompt, 5, 6], 8, 1, greedy)
    shorter = wire.Submit(102, [*prompt[:40], 9], 8, 1, greedy)
    said = ask(engine, first)
    said.take([*ask_messages(engine, again), *ask_messages(engine, shorter)])
    assert (said.cached[101], said.cached[102]) == (69, 0)
    assert [w for r in (first, again, shorter) for w in differences(model, r, said)] == []


def ask_messages(engine: Engine, request: wire.Submit) -> list[wire.Message]:
    engine.add(request)
    messages: list[wire.Message] = []
    while not engine.idle:
        messages += engine.step()
    return messages


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_any_batch(tiny: tuple[Any, int]) -> None:
    model, vocabulary = tiny
    rng = random.Random(5)
    engine = engine_for(model, context=512, slots=16)
    params = [
        wire.Sampling(temperature=0.8, seed=1),
        wire.Sampling(temperature=1.0, top_p=0.8, seed=2),
        wire.Sampling(temperature=1.0, top_k=7, repetition=1.2, seed=3),
        wire.Sampling(temperature=0.9, min_p=0.1, frequency=0.3, seed=4),
    ]
    requests = [
        wire.Submit(i, [rng.randrange(vocabulary) for _ in range(rng.randint(5, 40))], 15, 1, p)
        for i, p in enumerate(params * 3, start=1)
    ]
    together = ask(engine, *requests).tokens
    alone = {(r.id, 0): ask(engine, r).tokens[r.id, 0] for r in requests}
    assert {k: [t for t, _ in v] for k, v in together.items()} == {k: [t for t, _ in v] for k, v in alone.items()}


def test_samples_of_one_request_differ_but_repeat_with_its_seed(tiny: tuple[Any, int]) -> None:
    model, _ = tiny
    engine = engine_for(model, context=512)
    request = wire.Submit(1, [4, 5, 6], 12, 3, wire.Sampling(temperature=1.0, seed=9))
    first, second = ask(engine, request).tokens, ask(engine, request).tokens
    assert first == second
    assert len({tuple(tokens) for tokens in first.values()}) == 3


def test_an_exception_in_a_step_fails_its_requests_and_the_engine_goes_on(tiny: tuple[Any, int]) -> None:
    model, _ = tiny
    engine = engine_for(model, context=512)
    engine._executor._mask = lambda step, logits: 1 / 0  # type: ignore[attr-defined]
    engine.add(wire.Submit(1, [4, 5, 6], 12, 1, wire.Sampling(temperature=0.0)))
    messages: list[wire.Message] = []
    while not engine.idle:
        messages += engine.step()
    assert any(isinstance(m, wire.RequestFailed) and "ZeroDivisionError" in m.message for m in messages)
    engine._executor._mask = None  # type: ignore[attr-defined]
    request = wire.Submit(2, [4, 5, 6], 12, 1, wire.Sampling(temperature=0.0, logprobs=0))
    assert differences(model, request, ask(engine, request)) == []


def test_thousands_of_requests_leave_no_row_no_entry_and_no_memory(tiny: tuple[Any, int]) -> None:
    model, vocabulary = tiny
    rng = random.Random(8)
    engine = engine_for(model, context=512, slots=16, prefix_bytes=4 << 20)
    engine.clear_prefixes()
    while not engine.idle:
        engine.step()
    gc.collect()
    baseline, rss_bytes, said = mx.get_active_memory(), 0, Said()
    for id in range(1, 2001):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 60))]
        engine.add(wire.Submit(id, prompt, rng.randint(1, 8), 1, wire.Sampling(temperature=0.0)))
        for _ in range(rng.randint(0, 4)):
            said.take(engine.step())
        if rng.random() < 0.2:
            engine.abort(wire.Abort(id - rng.randint(0, min(3, id - 1))))
        if id == 200:
            rss_bytes = settle(engine, said)
    last_rss_bytes = settle(engine, said)
    stats = engine.stats()
    assert (stats.waiting, stats.prefilling, stats.running, stats.buckets, stats.prefix_entries) == (0, 0, 0, 0, 0)
    assert mx.get_active_memory() == baseline
    assert last_rss_bytes <= 1.03 * rss_bytes


def settle(engine: Engine, said: Said) -> int:
    """Finish everything, drop every prefix, return freed buffers; gives the process's resident bytes."""
    while not engine.idle:
        said.take(engine.step())
    engine.clear_prefixes()
    while not engine.idle:
        engine.step()
    said.tokens.clear()
    gc.collect()
    mx.clear_cache()
    return int(psutil.Process().memory_info().rss)
