from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from sse_server import Request, answer_fully, serving
from typer.testing import CliRunner

from cluster.benchmark import bench
from cluster.benchmark.bench import Kind, engine_text, load_servers, numbers, ratios, servers_text, table
from cluster.benchmark.load import Server
from cluster.benchmark.scenarios import Load, Prompts, Run
from cluster.errors import BadSetting, BenchFailed

app = typer.Typer()
app.command()(bench.bench)


def load() -> Load:
    return Load(Prompts(seed=1), max_tokens=4, timeout_s=20.0)


def run_of(url: str, tokens_per_s: float) -> Run:
    return Run(url, 0, 1, 1, {}, "", 8, 0, 0, "usage", 1.0, tokens_per_s, 0.1, 0.1, 0.1, 0.1, 0.1)


def refused(*argv: str) -> BadSetting:
    result = CliRunner().invoke(app, list(argv))
    assert isinstance(result.exception, BadSetting), result.output
    return result.exception


def test_a_list_of_numbers_is_read_and_anything_else_is_refused_by_its_flag() -> None:
    assert numbers("--concurrency", "1, 8,32") == [1, 8, 32]
    for text in ("", "8,", "0", "-1", "two"):
        with pytest.raises(BadSetting, match="--concurrency"):
            numbers("--concurrency", text)


def test_columns_align_numbers_to_the_right_and_words_to_the_left() -> None:
    assert table([["name", "rate"], ["a", "10.5"], ["long name", "-"]]) == (
        "name       rate\na          10.5\nlong name     -"
    )


def test_ratios_are_made_pair_by_pair_and_a_side_without_a_figure_leaves_its_pair_out() -> None:
    runs = [run_of(url, rate) for url, rate in (("a", 3), ("b", 2), ("a", 4), ("b", 4), ("a", 5), ("b", 0))]
    assert ratios(runs, "tokens_per_s") == {"pairs": [1.5, 1.0, None], "median": 1.25}


def test_flags_of_the_other_mode_are_refused_by_name() -> None:
    assert "--vs needs --url" in refused("--vs", "http://b").message
    assert "--rounds needs --url" in refused("--rounds", "2").message
    assert "--batch-size does not go" in refused("--url", "http://a", "-b", "8").message
    assert "MODEL does not go" in refused("some/model", "--url", "http://a").message


async def test_two_servers_are_compared_level_by_level() -> None:
    async with serving(answer_fully) as a, serving(answer_fully) as b:
        result = await load_servers(Kind.load, load(), [Server(a.url), Server(b.url)], [(1, 1), (3, 6)], rounds=2)
        urls = [a.url, b.url]
    assert [level["concurrency"] for level in result["levels"]] == [1, 3]
    assert [run["url"] for run in result["levels"][1]["runs"]] == urls * 2
    assert [run["tokens"] for run in result["levels"][1]["runs"]] == [24] * 4
    assert len(result["levels"][1]["ratios"]["tokens_per_s"]["pairs"]) == 2
    assert json.loads(json.dumps(result)) == result
    text = servers_text(result)
    assert f"A = {urls[0]}" in text and f"B = {urls[1]}" in text
    assert text.count("\n      1") == 4 and "3 at once, tok/s A/B: " in text


@pytest.mark.parametrize("kind", [Kind.ttft, Kind.long_prompt])
async def test_the_other_scenarios_compare_what_they_are_for(kind: Kind) -> None:
    async with serving(answer_fully) as server:
        result = await load_servers(kind, load(), [Server(server.url), Server(server.url + "/v1")], [(2, 2)], rounds=1)
    name = "ttft_p50_s" if kind is Kind.ttft else "gap_max_s"
    assert result["levels"][0]["ratios"][name]["median"] > 0
    assert f"2 streams, {bench.RATIOS[kind][name]} A/B: " in servers_text(result)


async def test_one_address_given_twice_keeps_its_two_sides_apart() -> None:
    async with serving(answer_fully) as server:
        result = await load_servers(Kind.load, load(), [Server(server.url)] * 2, [(1, 1)], rounds=1)
    rows = [line.split() for line in servers_text(result).splitlines() if line.split()[1:2] == ["1"]]
    assert [row[2] for row in rows] == ["A", "B"]


async def test_a_server_that_refuses_the_first_request_fails_with_what_it_said() -> None:
    async def reply(request: Request) -> None:
        await request.send(b"HTTP/1.0 404 Not Found\r\n\r\nno such model")

    async with serving(reply) as server:
        with pytest.raises(BenchFailed, match=r"404 \(no such model\)") as caught:
            await load_servers(Kind.load, load(), [Server(server.url)], [(1, 1)], rounds=1)
    assert "--model" in caught.value.hint


async def test_an_address_that_is_none_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(BadSetting, match="localhost:8080"):
        await load_servers(Kind.load, load(), [Server("localhost:8080")], [(1, 1)], rounds=1)


def timing(rate: float, steady: float | None) -> dict[str, Any]:
    return {"prompt_tps": 100.0, "generation_tps": steady, "total_tps": rate, "peak_bytes": 2_000_000_000}


def test_the_engines_table_has_the_ratio_to_the_bare_loop() -> None:
    case: dict[str, Any] = {"prompt_tokens": 64, "generation_tokens": 16, "batch": 8, "temperature": 0.7}
    case |= {"engine": timing(90.0, None), "bare": timing(100.0, 120.0), "trials": {"engine": [{}] * 3}}
    text = engine_text({"name": "m", "device": "cpu", "mlx": "1", "cases": [case]})
    rows = {line.split()[1]: line.split() for line in text.splitlines() if line.strip().startswith("8 ")}
    assert rows["engine"][-4:] == ["100.0", "-", "90.0", "2.00"]
    assert rows["ratio"][-4:] == ["1.00", "-", "0.90", "1.00"]


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(bench, "BENCH_COMMAND", (sys.executable, "-c", code))


def test_the_timing_process_gets_the_folder_and_every_flag(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "import json, sys; print(json.dumps({'argv': sys.argv[1:]}))")
    result = bench.time_engine(
        str(tiny_model), prompt_tokens=5, tokens=6, batches=[1, 8], temperature=0.7, prefill_step_size=64, trials=2
    )
    assert result["name"] == "tiny-llama"
    assert result["argv"] == [
        str(tiny_model), "-p", "5", "-g", "6", "-n", "2", "--prefill-step-size", "64", "--temperature", "0.7",
        "-b", "1", "8",
    ]  # fmt: skip


def test_a_timing_process_that_dies_fails_with_its_exit_code(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "raise SystemExit(7)")
    result = CliRunner().invoke(app, [str(tiny_model), "-b", "1"])
    assert isinstance(result.exception, BenchFailed) and "exit code 7" in result.exception.message
