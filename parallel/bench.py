"""`python -m parallel.bench FOLDER ...`: the engine timed in process, beside the same model alone in a bare loop.

Progress goes to stderr, one JSON object to stdout. `cluster bench MODEL` starts it as a child (the coordinator never
holds mlx) and prints the table. No HTTP and no text: what the API adds is the difference to `cluster bench --url`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from parallel import loading, warmup, wire
from parallel.engine.loop import Engine

WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One point to time: `batch` prompts of `prompt_tokens` random ids, `generation_tokens` each, no stop ids."""

    prompt_tokens: int
    generation_tokens: int
    batch: int
    temperature: float = 0.0
    prefill_step_size: int = 2048

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Other ids for every seed, so that nothing is found in the prefix cache."""
        draw = np.random.default_rng(seed)
        ids: list[list[int]] = draw.integers(0, vocabulary, (self.batch, self.prompt_tokens)).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class Timing:
    """Rates of one trial, per second, and the peak of MLX's memory in bytes.

    `prompt_tps` runs until every row has its first token. `generation_tps` is measured while all rows decode; None
    when early rows end before late ones begin. `total_tps` is all output over all time.
    """

    prompt_tps: float
    generation_tps: float | None
    total_tps: float
    peak_bytes: int


class Trial:
    """Collects when each row's tokens came; the clock starts when it is made."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._times: dict[int, list[float]] = {row: [] for row in range(case.batch)}
        mx.clear_cache()
        mx.reset_peak_memory()
        self._began_s = time.perf_counter()

    def token(self, row: int, now_s: float) -> None:
        """One more token of `row`."""
        self._times[row].append(now_s)

    def timing(self) -> Timing:
        """The rates, once all tokens are there. Raises RuntimeError when some are missing."""
        case, rows = self._case, list(self._times.values())
        if any(len(times) != case.generation_tokens for times in rows):
            counts = sorted({len(times) for times in rows})
            raise RuntimeError(f"rows have {counts} tokens, not {case.generation_tokens}")
        return rates(rows, case.prompt_tokens, self._began_s, mx.get_peak_memory())


def rates(rows: list[list[float]], prompt_tokens: int, began_s: float, peak_bytes: int) -> Timing:
    """Timing from the arrival times of each row's tokens."""
    tokens = sum(len(times) for times in rows)
    all_run_s = max(times[0] for times in rows)
    first_end_s = min(times[-1] for times in rows)
    full = sum(all_run_s < t <= first_end_s for times in rows for t in times)
    steady = full >= tokens / 4 and first_end_s > all_run_s
    return Timing(
        prompt_tps=len(rows) * prompt_tokens / (all_run_s - began_s),
        generation_tps=full / (first_end_s - all_run_s) if steady else None,
        total_tps=tokens / (max(times[-1] for times in rows) - began_s),
        peak_bytes=peak_bytes,
    )


def time_bare(model: Any, case: Case, prompts: list[list[int]]) -> Timing:
    """The model alone: chunked prefill of all rows at once, then decode steps, each built while the last one runs.

    No scheduler, no joins, no per-row settings, no padding: the most that an engine on this model can reach.
    """
    trial = Trial(case)
    tokens = mx.array(prompts)
    cache = make_prompt_cache(model)
    for start in range(0, case.prompt_tokens - 1, case.prefill_step_size):
        end = min(start + case.prefill_step_size, case.prompt_tokens - 1)
        model(tokens[:, start:end], cache=cache)
        mx.eval([layer.state for layer in cache])

    def decode(last: mx.array) -> mx.array:
        logits = model(last[:, None], cache=cache)[:, -1, :]
        if case.temperature == 0:
            return mx.argmax(logits, axis=-1)
        return mx.random.categorical(logits * (1 / case.temperature))

    current = decode(tokens[:, -1])
    mx.async_eval(current)
    for made in range(1, case.generation_tokens + 1):
        if made < case.generation_tokens:
            following = decode(current)
            mx.async_eval(following)
        current.tolist()
        now_s = time.perf_counter()
        for row in range(case.batch):
            trial.token(row, now_s)
        current = following if made < case.generation_tokens else current
    return trial.timing()


def time_engine(engine: Engine, case: Case, prompts: list[list[int]]) -> Timing:
    """The engine as the rank runs it: all requests are there at once, and it decides. Raises RuntimeError."""
    trial = Trial(case)
    sampling = wire.Sampling(temperature=case.temperature)
    for row, prompt in enumerate(prompts):
        engine.add(wire.Submit(row, prompt, case.generation_tokens, sampling=sampling))
    _check(engine.events())
    while not engine.idle:
        messages = engine.step()
        now_s = time.perf_counter()
        _check(messages)
        for message in messages:
            if isinstance(message, wire.Tokens):
                for token in message.rows:
                    trial.token(token.id, now_s)
    timing = trial.timing()
    engine.clear_prefixes()
    while not engine.idle:
        engine.step()
    return timing


def _check(messages: list[Any]) -> None:
    for message in messages:
        if isinstance(message, wire.RequestFailed):
            raise RuntimeError(f"the engine failed a request: {message.message}")


def median(timings: list[Timing]) -> Timing:
    """Each rate's median over trials; the highest peak."""
    steady = [t.generation_tps for t in timings if t.generation_tps is not None]
    return Timing(
        prompt_tps=statistics.median(t.prompt_tps for t in timings),
        generation_tps=statistics.median(steady) if len(steady) == len(timings) else None,
        total_tps=statistics.median(t.total_tps for t in timings),
        peak_bytes=max(t.peak_bytes for t in timings),
    )


def measure(folder: Path, cases: list[Case], trials: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Time every case, engine and bare loop in turn, after a short run of each that compiles what they need."""
    model, config = loading.load_model(folder)
    vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
    loading.wire_memory("auto")
    plan = wire.RankPlan(
        model=str(folder),
        host="",
        port=0,
        secret_file="",
        slots=max(32, *(case.batch for case in cases)),
        chunk_tokens=cases[0].prefill_step_size,
    )
    engine = warmup.engine_alone(model, plan, loading.context_of(folder))
    results = []
    for case in cases:
        say(f"prompt {case.prompt_tokens}, generation {case.generation_tokens}, batch {case.batch}: warming up")
        short = Case(
            case.prompt_tokens, WARMUP_TOKENS, case.batch, case.temperature, prefill_step_size=case.prefill_step_size
        )
        time_engine(engine, short, short.prompts(vocabulary, seed=0))
        time_bare(model, short, short.prompts(vocabulary, seed=0))
        sides: dict[str, list[Timing]] = {"engine": [], "bare": []}
        for trial in range(1, trials + 1):
            prompts = case.prompts(vocabulary, seed=trial)
            sides["engine"].append(time_engine(engine, case, prompts))
            sides["bare"].append(time_bare(model, case, prompts))
            done = {name: f"{timings[-1].total_tps:.1f}" for name, timings in sides.items()}
            say(f"  trial {trial} of {trials}: total tok/s engine {done['engine']}, bare {done['bare']}")
        middle = {name: asdict(median(timings)) for name, timings in sides.items()}
        every = {name: [asdict(t) for t in timings] for name, timings in sides.items()}
        results.append({**asdict(case), **middle, "trials": every})
    device = mx.device_info().get("device_name", mx.default_device())
    return {"model": str(folder), "mlx": version("mlx"), "device": str(device), "cases": results}


def main(argv: list[str] | None = None) -> None:
    """The command line; its flags are those of mlx_lm.benchmark, with lists of batch sizes."""
    parser = argparse.ArgumentParser(prog="python -m parallel.bench", description="Time the engine in process.")
    parser.add_argument("model", type=Path, help="a folder in MLX format")
    parser.add_argument("-p", "--prompt-tokens", type=int, default=512)
    parser.add_argument("-g", "--generation-tokens", type=int, default=128)
    parser.add_argument("-b", "--batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("-n", "--num-trials", type=int, default=3)
    parser.add_argument("--prefill-step-size", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args(argv)
    cases = [
        Case(args.prompt_tokens, args.generation_tokens, batch, args.temperature, args.prefill_step_size)
        for batch in args.batch_size
    ]
    result = measure(args.model, cases, args.num_trials, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
