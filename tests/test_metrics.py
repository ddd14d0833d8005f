"""What Prometheus scrapes."""

from __future__ import annotations

import httpx
import pytest
from api_server import *  # noqa: F403
from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import StepFailed
from cluster.serve.metrics import Metrics
from parallel import wire

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hello"}]}


def values(text: str) -> dict[str, float]:
    """Every sample by its name and labels."""
    return {
        " ".join([sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scraped(http: httpx.AsyncClient) -> dict[str, float]:
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return values(response.text)


async def test_an_answered_request_is_counted_with_its_tokens_and_times(http, engine, chat):
    engine.says(chat._encode("Hello the end", special=False))
    engine.cached = 2
    assert (await http.post(CHAT, json=ASK)).status_code == 200
    seen = await scraped(http)
    count = len(engine.script[0][0])
    assert seen[f"cluster_requests_total outcome=ok route={CHAT}"] == 1
    assert seen["cluster_prompt_tokens_total"] == len(engine.submits[0].prompt)
    assert seen["cluster_cached_prompt_tokens_total"] == 2
    assert seen["cluster_output_tokens_total"] == count
    assert seen["cluster_time_to_first_token_seconds_count"] == 1
    assert seen["cluster_inter_token_seconds_count"] == count  # the end token came after the last one, too
    assert seen["cluster_request_seconds_count"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_every_end_has_its_outcome(http, engine, chat, stream):
    engine.fail = (0, StepFailed("no"))
    await http.post(CHAT, json={**ASK, "stream": stream})
    await http.post(CHAT, json={**ASK, "stream": stream, "temperature": 9})
    seen = await scraped(http)
    assert seen[f"cluster_requests_total outcome=failed route={CHAT}"] == 1
    assert seen[f"cluster_requests_total outcome=refused route={CHAT}"] == 1


async def test_a_client_that_left_is_counted_as_cancelled(base_url, http, engine, chat):
    engine.says(chat._encode("Hello the end", special=False))
    engine.hold(at=1)
    async with (
        httpx.AsyncClient(base_url=base_url, verify=False) as leaver,
        leaver.stream("POST", CHAT, json={**ASK, "stream": True}) as response,
    ):
        assert response.status_code == 200
    await engine.until("abort")
    assert (await scraped(http))[f"cluster_requests_total outcome=cancelled route={CHAT}"] == 1


def test_the_engines_numbers_are_those_of_its_last_beat():
    stats = wire.Stats(waiting=3, running=2, kv_bytes=50, prefix_hit_tokens=25, prompt_tokens=100, steps=10, step_s=0.5)
    ready = wire.Ready(0, 1, "m", 1, 1, 400, 1, 1, "any")
    seen = values(Metrics(lambda: (stats, ready)).render().decode())
    assert (seen["cluster_queue"], seen["cluster_running"]) == (3, 2)
    assert (seen["cluster_kv_used_bytes"], seen["cluster_kv_limit_bytes"]) == (50, 400)
    assert seen["cluster_prefix_hit_ratio"] == 0.25
    assert (seen["cluster_engine_steps_total"], seen["cluster_engine_step_seconds_total"]) == (10, 0.5)
    assert seen["cluster_step_mean_seconds"] == 0.05
    assert seen["cluster_engine_up"] == 1


def test_without_an_engine_the_scrape_still_answers():
    seen = values(Metrics(lambda: (wire.Stats(), None)).render().decode())
    assert (seen["cluster_engine_up"], seen["cluster_prefix_hit_ratio"]) == (0, 0)
