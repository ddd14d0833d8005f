"""Random load on a running server for a long time: `python tests/soak.py --url URL --minutes 30 [--at-once 12]`.

Short and long prompts, some that share a start, streams, n > 1, clients that leave half way. Every request must end
with an answer or be cancelled by us; a random twentieth of the greedy answers is asked for again alone at the end and
must be equal where no other token was nearly as likely; then nothing may be left in the engine. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

SHARED = " ".join(f"Rule {i}: answer number {i * 7 % 13} with care." for i in range(60))
NEAR = 1e-3  # between the two best log-probabilities: batches may round such a choice the other way


@dataclass
class Tally:
    """What happened; `kept` are greedy (prompt, max_tokens, answer, how close the closest choice was)."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    tokens: int = 0
    kept: list[tuple[str, int, str]] = field(default_factory=list)


def make_request(rng: random.Random, longest: int) -> dict[str, Any]:
    """One completion request; about a third is greedy and can be asked for again."""
    words = " ".join(rng.choice(SHARED.split()) for _ in range(rng.choice((3, 10, 40, longest // 3))))
    prompt = SHARED[: rng.randrange(len(SHARED))] + words if rng.random() < 0.4 else words
    body: dict[str, Any] = {"prompt": prompt[: 3 * longest], "max_tokens": rng.choice((1, 8, 24, 64))}
    if rng.random() < 0.35:
        body["temperature"] = 0
    else:
        body |= {"temperature": rng.choice((0.3, 0.8, 1.2)), "top_p": rng.choice((1.0, 0.9)), "seed": rng.randrange(99)}
        if rng.random() < 0.2:
            body["n"] = rng.choice((2, 3))
        if rng.random() < 0.1:
            body["frequency_penalty"] = 0.5
    return body


async def one(client: httpx.AsyncClient, rng: random.Random, tally: Tally, longest: int) -> None:
    """Send one request; leave some streams half way."""
    body = make_request(rng, longest)
    leave_after = rng.randrange(1, 20) if rng.random() < 0.15 else None
    if leave_after is None and rng.random() < 0.5:
        response = await client.post("/v1/completions", json=body)
        if response.status_code != 200:
            tally.outcomes[f"status {response.status_code}"] += 1
            tally.failures.append(f"{response.status_code}: {response.text[:200]}")
            return
        answer = response.json()
        tally.outcomes["answered"] += 1
        tally.tokens += answer["usage"]["completion_tokens"]
        if body["temperature"] == 0:
            tally.kept.append((body["prompt"], body["max_tokens"], answer["choices"][0]["text"]))
        return
    ended = 0
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                tally.outcomes["streamed"] += 1
                return
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                tally.outcomes["stream error"] += 1
                tally.failures.append(str(event["error"])[:200])
                return
            ended += 1
            tally.tokens += 1
            if leave_after is not None and ended >= leave_after:
                tally.outcomes["left"] += 1
                return
    tally.outcomes["broken off"] += 1
    tally.failures.append("a stream ended without [DONE]")


async def differs(client: httpx.AsyncClient, prompt: str, max_tokens: int, text: str) -> bool:
    """Whether the greedy answer, asked for alone, is another one although every choice was clear."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2}
    choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    if choice["text"] == text:
        return False
    clear = (sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"] if len(top) > 1)
    return all(best - second > NEAR for best, second, *_ in clear)


async def run(url: str, minutes: float, at_once: int, longest: int, seed: int) -> int:
    rng, tally = random.Random(seed), Tally()
    end = time.monotonic() + 60 * minutes
    limits = httpx.Limits(max_connections=at_once + 2)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:

        async def worker() -> None:
            while time.monotonic() < end:
                try:
                    await one(client, rng, tally, longest)
                except httpx.HTTPError as error:
                    tally.outcomes["no answer"] += 1
                    tally.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(rng.random() * 0.3)

        async def report() -> None:
            while time.monotonic() < end:
                await asyncio.sleep(60)
                print(f"{(end - time.monotonic()) / 60:.0f} minutes left: {dict(tally.outcomes)}", flush=True)

        await asyncio.gather(report(), *(worker() for _ in range(at_once)))
        again = rng.sample(tally.kept, max(1, len(tally.kept) // 20)) if tally.kept else []
        wrong = [prompt for prompt, count, text in again if await differs(client, prompt, count, text)]
        await asyncio.sleep(3)
        metrics = dict(
            line.rsplit(" ", 1)
            for line in (await client.get("/metrics")).text.splitlines()
            if line[:1] not in ("#", "")
        )
    left = {name: float(metrics[f"cluster_{name}"]) for name in ("queue", "prefilling", "running", "kv_buckets")}
    leaked = float(metrics["cluster_kv_used_bytes"]) - float(metrics["cluster_prefix_cache_bytes"])
    print(f"{sum(tally.outcomes.values())} requests, {tally.tokens} tokens: {dict(tally.outcomes)}")
    print(f"{len(again)} of {len(tally.kept)} greedy answers asked for again alone: {len(wrong)} differ")
    print(f"left in the engine: {left}, KV beside the prefix cache: {leaked:.0f} bytes")
    for failure in tally.failures[:10]:
        print("failure:", failure)
    return int(bool(tally.failures or wrong or any(left.values()) or leaked))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="like http://127.0.0.1:8080")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--longest", type=int, default=600, help="words of the longest prompts, about")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    return asyncio.run(run(args.url.removesuffix("/v1"), args.minutes, args.at_once, args.longest, args.seed))


if __name__ == "__main__":
    sys.exit(main())
