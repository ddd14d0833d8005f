"""`cluster bench`: load a server over HTTP (`scenarios.py`), or time the engine in a child process (`parallel.bench`).

Parses, runs, prints. Progress goes to stderr, the table or JSON to stdout. `cli.py` registers `bench` as a command;
docs/benchmarks.md says how the figures are to be repeated and read.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from cluster.benchmark.load import Server
from cluster.benchmark.scenarios import Load, Prompts, Run, Scenario, in_turn, run_batch, run_long_prompt, run_ttft
from cluster.config import load_config
from cluster.errors import BadSetting, BenchFailed
from cluster.paths import Folders

BENCH_COMMAND = (sys.executable, "-m", "parallel.bench")
LEVEL_STRIDE = 1_000_000  # prompt numbers of one concurrency level
WARMUP_OFFSET = 900_000  # in a level: past the numbers of its rounds
WARMUP_TOKENS = 4


class Kind(StrEnum):
    """What is done to a server."""

    load = "load"
    ttft = "ttft"
    long_prompt = "long-prompt"


RATIOS: dict[Kind, dict[str, str]] = {  # what matters in each: Run's field -> its heading
    Kind.load: {"tokens_per_s": "tok/s", "ttft_p50_s": "ttft p50", "gap_p50_s": "gap p50"},
    Kind.ttft: {"ttft_p50_s": "ttft p50", "ttft_p99_s": "ttft p99"},
    Kind.long_prompt: {"gap_max_s": "gap max", "ttft_p50_s": "ttft p50"},
}


def bench(
    model: Annotated[str | None, typer.Argument(help="Time the engine on this model; default: the demo model.")] = None,
    url: Annotated[str | None, typer.Option(help="Load this OpenAI-compatible server instead.")] = None,
    vs: Annotated[str | None, typer.Option(help="With --url: a second server, loaded in turn with the first.")] = None,
    scenario: Annotated[
        Kind | None, typer.Option(help="load; ttft of short requests, or a long-prompt, beside running streams (load).")
    ] = None,
    concurrency: Annotated[str | None, typer.Option(help="Requests open at once, like 1,8,32 (that).")] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Running streams in ttft and long-prompt (8).")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Measured requests of a run (load: as many as open at once; ttft: 8).")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, max=80, help="Runs of each server (1; with --vs 3).")] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", "--generation-tokens", "-g", min=2, help="Tokens per answer (128).")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", "-p", min=1, help="Tokens per prompt (engine 512; --url short).")
    ] = None,
    long_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="The long prompt's tokens (3000).")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    served: Annotated[str | None, typer.Option("--model", help="The model's name at --url (default_model).")] = None,
    vs_served: Annotated[str | None, typer.Option("--vs-model", help="The model's name at --vs (as --model).")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="CLUSTER_API_KEY", help="Sent to --url and --vs.")] = None,
    timeout: Annotated[float | None, typer.Option(min=1, help="Seconds that a request may take (600).")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the prompts (drawn, so that no server has them cached).")] = None,
    batch_size: Annotated[str | None, typer.Option("--batch-size", "-b", help="Engine: rows, like 1,8,32 (1).")] = None,
    prefill_step_size: Annotated[int | None, typer.Option(min=1, help="Engine: tokens per chunk (2048).")] = None,
    num_trials: Annotated[int | None, typer.Option("--num-trials", "-n", min=1, help="Engine: trials (3).")] = None,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Engine: over several ranks, as a pipeline.")] = False,
    tensor: Annotated[bool, typer.Option("--tensor", help="Engine: over several ranks, tensor parallel.")] = False,
    local: Annotated[int | None, typer.Option(min=2, help="With these two: ranks on this machine (2).")] = None,
    hosts: Annotated[str | None, typer.Option(help="With these two: the hosts of the ranks.")] = None,
    hostfile: Annotated[str | None, typer.Option(help="With these two: the hosts of this file.")] = None,
    python: Annotated[str | None, typer.Option(help="The interpreter on the hosts, as in `up`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, every run in full.")] = False,
) -> None:
    """Measure: the engine in process beside the model alone, or with --url any OpenAI-compatible server."""
    of_engine = {
        "MODEL": model, "--batch-size": batch_size, "--prefill-step-size": prefill_step_size, "--num-trials": num_trials
    }  # fmt: skip
    of_server = {
        "--vs": vs, "--scenario": scenario, "--concurrency": concurrency, "--streams": streams, "--requests": requests,
        "--rounds": rounds, "--long-prompt-tokens": long_prompt_tokens, "--model": served, "--vs-model": vs_served,
        "--timeout": timeout, "--seed": seed,
    }  # fmt: skip
    if url is None:
        _refuse(of_server, "needs --url", "Without --url the engine itself is timed, in process.")
        if pipeline or tensor:
            from cluster.benchmark.bench_ranks import Work, time_ranks

            settings = load_config(
                {
                    "model": model,
                    "local": local or (None if hosts or hostfile else 2),
                    "hosts": hosts,
                    "hostfile": hostfile,
                    "python": python,
                    "parallel": "tensor" if tensor else "pipeline",
                    "prefill_step_size": prefill_step_size,
                    "self_check": False,
                }
            )
            batches = numbers("--batch-size", batch_size or "1")
            work = Work(prompt_tokens or 512, tokens or 128, batches, temperature, num_trials or 3)
            result = time_ranks(settings, work, _tell)
            typer.echo(json.dumps(result, indent=2) if as_json else ranks_text(result))
            return
        result = time_engine(
            model,
            prompt_tokens=prompt_tokens or 512,
            tokens=tokens or 128,
            batches=numbers("--batch-size", batch_size or "1"),
            temperature=temperature,
            prefill_step_size=prefill_step_size or 2048,
            trials=num_trials or 3,
        )
        text = engine_text(result)
    else:
        _refuse(of_engine, "does not go with --url", "With --url the server decides; leave it out.")
        servers = [Server(url, served or "default_model", api_key or "")]
        if vs is not None:
            servers.append(Server(vs, vs_served or served or "default_model", api_key or ""))
        load = Load(
            Prompts(random.getrandbits(32) if seed is None else seed),
            max_tokens=tokens or 128,
            temperature=temperature,
            prompt_tokens=prompt_tokens or 0,
            long_prompt_tokens=long_prompt_tokens or 3000,
            timeout_s=timeout or 600.0,
        )
        kind = scenario or Kind.load
        levels = numbers("--concurrency", concurrency or "1,8,32") if kind is Kind.load else [streams or 8]
        plan = [(level, requests or (level if kind is Kind.load else 8)) for level in levels]
        result = _run(load_servers(kind, load, servers, plan, rounds or (3 if vs else 1)))
        text = servers_text(result)
    typer.echo(json.dumps(result, indent=2) if as_json else text)


def _refuse(flags: dict[str, Any], why: str, hint: str) -> None:
    for flag, value in flags.items():
        if value is not None:
            raise BadSetting(f"{flag} {why}.", hint=hint)


def numbers(flag: str, text: str) -> list[int]:
    """The whole numbers above 0 in a list like 1,8,32. Raises BadSetting."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise BadSetting(f"{flag} is {text!r}, which is no list of numbers above 0.", hint=f"Like {flag} 1,8,32.")
    return found


def _tell(line: str) -> None:
    typer.echo(line, err=True)


# ---------------------------------------------------------------- a server


def _run(work: Any) -> Any:
    import uvloop

    return uvloop.run(work)


async def load_servers(
    kind: Kind, load: Load, servers: list[Server], plan: Sequence[tuple[int, int]], rounds: int
) -> dict[str, Any]:
    """Run `kind` at each (concurrency, requests) of `plan`, servers in turn; everything that was seen, for JSON.

    Raises BadSetting for an address that is none, BenchFailed when a server does not answer a first small request.
    """
    await _try_all(load, servers)
    levels = []
    for place, (concurrency, requests) in enumerate(plan):
        first = place * LEVEL_STRIDE
        for server in servers:
            await run_batch(
                load,
                server,
                round=0,
                first=first + WARMUP_OFFSET,
                concurrency=concurrency,
                requests=concurrency,
                max_tokens=WARMUP_TOKENS,
            )
        runs = await in_turn(_scenario(kind, load, concurrency, requests), servers, rounds, first, _tell_run)
        level: dict[str, Any] = {"concurrency": concurrency, "runs": [asdict(run) for run in runs]}
        if len(servers) == 2:
            level["ratios"] = {name: ratios(runs, name) for name in RATIOS[kind]}
        levels.append(level)
    return {
        "scenario": kind.value,
        "servers": [server.url for server in servers],
        "tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": load.prompts.seed,
        "client": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "levels": levels,
    }


async def _try_all(load: Load, servers: list[Server]) -> None:
    for server in reversed(servers):  # the first server's token counts are the ones that remain
        try:
            server.address()
        except ValueError as error:
            raise BadSetting(str(error), hint="Like --url http://127.0.0.1:8080.") from error
        answer = await load.prompts.measure(server, load.timeout_s)
        if answer.error:
            hints = {
                "refused": "Start it, or correct the address.",
                "401": "Give its key with --api-key.",
                "404": "Give the name of its model with --model (--vs-model).",
            }
            raise BenchFailed(
                f"{server.url} did not answer a first small request: {answer.error} ({answer.detail}).",
                hint=hints.get(answer.error, "Its log may say more."),
            )


def _scenario(kind: Kind, load: Load, concurrency: int, requests: int) -> Scenario:
    async def run(server: Server, round: int, first: int) -> Run:
        if kind is Kind.ttft:
            return await run_ttft(load, server, round=round, first=first, streams=concurrency, requests=requests)
        if kind is Kind.long_prompt:
            return await run_long_prompt(load, server, round=round, first=first, streams=concurrency)
        return await run_batch(load, server, round=round, first=first, concurrency=concurrency, requests=requests)

    return run


def _tell_run(run: Run) -> None:
    errors = f", errors {run.errors}: {run.error_detail}" if run.errors else ""
    _tell(f"round {run.round + 1}, {run.concurrency} at once, {run.url}: {run.tokens_per_s:.1f} tok/s{errors}")


def ratios(runs: Iterable[Run], name: str) -> dict[str, Any]:
    """First server over second, pair by pair, and the median; None where a side has no figure."""
    sides = [getattr(run, name) for run in runs]
    pairs = [a / b if a and b else None for a, b in zip(sides[::2], sides[1::2], strict=True)]
    known = [pair for pair in pairs if pair is not None]
    return {"pairs": pairs, "median": statistics.median(known) if known else None}


def servers_text(result: dict[str, Any]) -> str:
    """The table of `load_servers`' result, and the ratios when there were two servers."""
    kind = Kind(result["scenario"])
    words = {
        Kind.load: f"answers of at most {result['tokens']} tokens",
        Kind.ttft: "short requests one by one while streams run; ttft is theirs, gaps are the streams'",
        Kind.long_prompt: "one long prompt arrives while streams run; ttft is its, gaps are the streams' meanwhile",
    }
    servers = result["servers"]
    lines = [f"{letter} = {url}" for letter, url in zip("AB", servers, strict=False)]
    lines.append(f"{words[kind]}; temperature {result['temperature']:g}, seed {result['seed']}; times in ms\n")
    head = "streams" if kind is not Kind.load else "at once"
    rows = [
        [head, "round", "server", "tok/s", "ttft p50", "ttft p99", "gap p50", "gap p99", "gap max", "requests",
         "out", "prompt", "cached", "errors"]
    ]  # fmt: skip
    runs = [run for level in result["levels"] for run in level["runs"]]
    for place, run in enumerate(runs):  # servers took turns
        times = [run[f"{name}_s"] * 1000 for name in ("ttft_p50", "ttft_p99", "gap_p50", "gap_p99", "gap_max")]
        errors = " ".join(f"{kind}:{count}" for kind, count in run["errors"].items()) or "0"
        rows.append(
            [str(run["concurrency"]), str(run["round"] + 1), "AB"[place % len(servers)], f"{run['tokens_per_s']:.1f}"]
            + [f"{time:.1f}" for time in times]
            + [str(run[name]) for name in ("requests", "tokens", "prompt_tokens", "cached_tokens")]
            + [errors]
        )
    lines.append(table(rows))
    if any(run["counted"] == "chunks" for run in runs):
        lines.append("Tokens are counted as chunks where the server gives no usage; a chunk may hold several.")
    for level in result["levels"]:
        for name, ratio in level.get("ratios", {}).items():
            pairs = " ".join(_figure(pair, 2) for pair in ratio["pairs"])
            what = f"{level['concurrency']} {head}, {RATIOS[kind][name]} A/B"
            lines.append(f"{what}: {pairs}  median {_figure(ratio['median'], 2)}")
    return "\n".join(lines)


# ---------------------------------------------------------------- the engine


def time_engine(
    model: str | None,
    *,
    prompt_tokens: int,
    tokens: int,
    batches: list[int],
    temperature: float,
    prefill_step_size: int,
    trials: int,
) -> dict[str, Any]:
    """Resolve `model` and time it in a child process that has a rank's environment. Raises BenchFailed and what
    `weights.resolve` raises."""
    from cluster.ship.weights import resolve
    from cluster.supervision.launch import rank_environment

    told = ""

    def progress(label: str, done: int, total: int) -> None:
        nonlocal told
        if label != told:
            told = label
            _tell(label)

    resolved = resolve(model, cache=Folders.from_environment(os.environ).cache, progress=progress)
    flags = [
        str(resolved.folder), "-p", str(prompt_tokens), "-g", str(tokens), "-n", str(trials),
        "--prefill-step-size", str(prefill_step_size), "--temperature", str(temperature),
        "-b", *map(str, batches),
    ]  # fmt: skip
    child = subprocess.run(
        [*BENCH_COMMAND, *flags], stdout=subprocess.PIPE, env=rank_environment(os.environ), check=False
    )
    if child.returncode:
        raise BenchFailed(
            f"The process that times {resolved.name} ended with exit code {child.returncode}.",
            hint="Its last words are above; a smaller --batch-size or --prompt-tokens needs less memory.",
        )
    result: dict[str, Any] = json.loads(child.stdout)
    return {**result, "name": resolved.name}


def engine_text(result: dict[str, Any]) -> str:
    """The table of `time_engine`'s result: engine, bare loop and their ratio for every batch size."""
    cases = result["cases"]
    first = cases[0]
    rows = [["batch", "", "prompt tok/s", "generation tok/s", "total tok/s", "peak GB"]]
    for case in cases:
        sides = [case["engine"], case["bare"]]
        for name, side in zip(("engine", "bare loop"), sides, strict=True):
            rates = [_figure(side[rate], 1) for rate in ("prompt_tps", "generation_tps", "total_tps")]
            rows.append([str(case["batch"]), name, *rates, f"{side['peak_bytes'] / 1e9:.2f}"])
        compared = [_ratio(sides, rate) for rate in ("prompt_tps", "generation_tps", "total_tps", "peak_bytes")]
        rows.append([str(case["batch"]), "ratio", *compared])
    return "\n".join(
        [
            f"{result['name']} on {result['device']}, mlx {result['mlx']}: prompts of {first['prompt_tokens']} tokens, "
            f"answers of {first['generation_tokens']}, temperature {first['temperature']:g}; "
            f"medians of {len(first['trials']['engine'])} trials\n",
            table(rows),
            "generation: while all rows decode (- when early rows end before late ones begin); "
            "total: all output over all time, prefill included",
        ]
    )


def ranks_text(result: dict[str, Any]) -> str:
    """The table of `time_ranks`' result, with each rank's idle share."""
    ranks = result["ranks"]
    rows = [["batch", "prompt tok/s", "generation tok/s", "total tok/s", *(f"rank {r['rank']} idle" for r in ranks)]]
    for case in result["cases"]:
        rates = [_figure(case[rate], 1) for rate in ("prompt_tps", "generation_tps", "total_tps")]
        rows.append([str(case["batch"]), *rates, *(f"{share:.0%}" for share in case["idle"])])
    return "\n".join(
        [
            f"{result['name']}, {result['strategy']} over {result['backend']} on {len(ranks)} ranks: prompts of "
            f"{result['prompt_tokens']} tokens, answers of {result['generation_tokens']}, "
            f"temperature {result['temperature']:g}; medians of {len(result['cases'][0]['trials'])} trials\n",
            table(rows),
        ]
    )


def _ratio(sides: list[dict[str, Any]], name: str) -> str:
    a, b = (side[name] for side in sides)
    return _figure(a / b if a and b else None, 2)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(rows: list[list[str]]) -> str:
    """`rows`, the heading first, in columns two spaces apart: numbers to the right, words to the left."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [all(not cell[:1].isdigit() and cell != "-" for cell in column[1:]) for column in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, words, strict=True)
        ).rstrip()
        for row in rows
    )
