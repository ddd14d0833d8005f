"""Runs an engine over a random mix of requests in process, and what mlx_lm says to each prompt alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from parallel import wire
from parallel.engine.loop import Engine
from parallel.warmup import engine_alone

MARGIN = 1e-3  # below this the two best logits may swap between a batch and a run alone
TOLERANCE = 1e-3


def engine_for(model: Any, *, context: int, slots: int = 8, chunk_tokens: int = 64, prefix_bytes: int = 0) -> Engine:
    """A warm engine on `model`."""
    plan = wire.RankPlan(
        "", "", 0, "", slots=slots, chunk_tokens=chunk_tokens, kv_limit_bytes=2 << 30, prefix_bytes=prefix_bytes
    )
    return engine_alone(model, plan, context, lookahead=True)


@dataclass
class Said:
    """Everything an engine said: (token, logprob) per sample, reasons to finish, cached prompt tokens."""

    tokens: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)
    finish: dict[tuple[int, int], str] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    def take(self, messages: list[wire.Message]) -> None:
        for message in messages:
            match message:
                case wire.Tokens():
                    for token in message.rows:
                        key = (token.id, token.index)
                        logprob = token.top[0][1] if token.top else 0.0
                        self.tokens.setdefault(key, []).append((token.token, logprob))
                        if token.finish:
                            self.finish[key] = token.finish
                case wire.Started():
                    self.cached[message.id] = message.cached
                case wire.RequestFailed():
                    raise AssertionError(message.message)


def random_mix(rng: random.Random, vocabulary: int, longest: int, count: int, tokens: int) -> list[wire.Submit]:
    """Requests of mixed length; about half share a start with others, some repeat, some have n > 1."""
    shared = [rng.randrange(vocabulary) for _ in range(longest)]
    requests = []
    for id in range(1, count + 1):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, max(2, longest // 3)))]
        if rng.random() < 0.5:
            prompt = shared[: rng.randint(1, longest - len(prompt))] + prompt
        if requests and rng.random() < 0.15:
            prompt = rng.choice(requests).prompt
        greedy = wire.Sampling(temperature=0.0, logprobs=0)
        requests.append(wire.Submit(id, prompt, rng.randint(1, tokens), rng.choice([1, 1, 1, 2, 3]), greedy))
    return requests


def run_mix(engine: Engine, requests: list[wire.Submit], rng: random.Random) -> tuple[Said, set[int]]:
    """Requests join at random steps, alone or several at once, some are cancelled; what was said, who was cancelled."""
    said, cancelled, coming = Said(), set(), list(requests)
    while coming or not engine.idle:
        if coming and (engine.idle or rng.random() < 0.35):
            for _ in range(min(len(coming), rng.choice([1, 1, 1, 6]))):
                engine.add(coming.pop(0))
        if rng.random() < 0.03:
            victim = rng.choice(requests).id
            cancelled.add(victim)
            engine.abort(wire.Abort(victim))
        said.take(engine.step())
    return said, cancelled


def differences(model: Any, request: wire.Submit, said: Said) -> list[str]:
    """Where an answer is not what mlx_lm generates for the prompt alone, as far as the margin allows to tell."""
    alone = []
    for token, logprobs in generate_step(mx.array(request.prompt), model, max_tokens=request.max_tokens):
        best = mx.sort(logprobs)[-2:].tolist()
        alone.append((token, float(logprobs[token].item()), best[1] - best[0]))  # type: ignore[index, operator]
    wrong = []
    for index in range(request.n):
        answer = said.tokens.get((request.id, index), [])
        if len(answer) != request.max_tokens:
            wrong.append(f"request {request.id}: {len(answer)} tokens, not {request.max_tokens}")
        for place, ((token, logprob), (expected, wanted, margin)) in enumerate(zip(answer, alone, strict=False)):
            if token != expected:
                if margin > MARGIN:
                    wrong.append(f"request {request.id} token {place}: {token}, not {expected} (margin {margin:.4f})")
                break
            if abs(logprob - wanted) > TOLERANCE:
                wrong.append(f"request {request.id} token {place}: logprob {logprob}, not {wanted}")
    return wrong
