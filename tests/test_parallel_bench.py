from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from parallel import bench, loading, warmup, wire
from parallel.bench import Case, Timing, median, rates, time_bare, time_engine


def test_rates_take_decoding_from_where_all_rows_run_to_where_the_first_ends() -> None:
    rows = [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]
    timing = rates(rows, prompt_tokens=10, began_s=0.0, peak_bytes=7)
    assert timing == Timing(prompt_tps=10.0, generation_tps=4 / 2, total_tps=8 / 5, peak_bytes=7)


def test_rows_that_hardly_overlap_have_no_decoding_rate() -> None:
    rows = [[1.0, 2.0, 3.0, 4.0], [4.0, 5.0, 6.0, 7.0]]
    assert rates(rows, prompt_tokens=10, began_s=0.0, peak_bytes=0).generation_tps is None


def test_the_median_is_taken_rate_by_rate_and_the_peak_is_the_highest() -> None:
    timings = [Timing(1.0, 9.0, 5.0, 10), Timing(2.0, 7.0, 6.0, 30), Timing(3.0, 8.0, 4.0, 20)]
    assert median(timings) == Timing(2.0, 8.0, 5.0, 30)
    assert median([*timings, Timing(1.0, None, 1.0, 1)]).generation_tps is None


def test_prompts_differ_from_trial_to_trial_and_row_to_row() -> None:
    case = Case(prompt_tokens=20, generation_tokens=2, batch=3)
    prompts = case.prompts(1000, seed=1) + case.prompts(1000, seed=2)
    assert case.prompts(1000, seed=1) == prompts[:3]
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert all(len(prompt) == 20 and all(0 <= id < 1000 for id in prompt) for prompt in prompts)


def test_the_engine_and_the_bare_loop_make_the_same_tokens(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared must be the same work; the prompt takes several chunks on both sides."""
    model, config = loading.load_model(tiny_model)
    case = Case(prompt_tokens=21, generation_tokens=6, batch=3, prefill_step_size=8)
    prompts = case.prompts(config["vocab_size"], seed=1)
    plan = wire.RankPlan(str(tiny_model), "", 0, "", chunk_tokens=8)
    engine = warmup.engine_alone(model, plan, 0)
    bare: list[Any] = []
    by_engine: list[list[int]] = [[] for _ in prompts]

    greedy, step = mx.argmax, engine.step

    def seen_argmax(logits: mx.array, axis: int) -> mx.array:
        tokens = greedy(logits, axis=axis)
        bare.append(tokens.tolist())
        return tokens

    def seen_step() -> list[wire.Message]:
        messages = step()
        for message in messages:
            for token in message.rows if isinstance(message, wire.Tokens) else []:
                by_engine[token.id].append(token.token)
        return messages

    with monkeypatch.context() as patch:
        patch.setattr(mx, "argmax", seen_argmax)
        time_bare(model, case, prompts)
    monkeypatch.setattr(engine, "step", seen_step)
    time_engine(engine, case, prompts)
    assert by_engine == [list(row) for row in zip(*bare, strict=True)]
    assert len(bare) == 6


def test_a_request_that_the_engine_refuses_fails_the_trial(tiny_model: Path) -> None:
    model, _ = loading.load_model(tiny_model)
    plan = wire.RankPlan(str(tiny_model), "", 0, "", context=64)
    engine = warmup.engine_alone(model, plan, 0)
    case = Case(prompt_tokens=100, generation_tokens=4, batch=1)
    with pytest.raises(RuntimeError, match="100 tokens"):
        time_engine(engine, case, case.prompts(100, seed=1))


def test_the_command_prints_one_json_object(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([str(tiny_model), "-p", "10", "-g", "4", "-b", "1", "3", "-n", "2", "--temperature", "0.7"])
    result = json.loads(capsys.readouterr().out)
    assert [case["batch"] for case in result["cases"]] == [1, 3]
    for case in result["cases"]:
        assert case["engine"]["total_tps"] > 0 and case["bare"]["total_tps"] > 0
        assert len(case["trials"]["engine"]) == len(case["trials"]["bare"]) == 2
