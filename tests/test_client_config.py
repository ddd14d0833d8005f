"""Settings printed for other programs."""

from __future__ import annotations

import json

import pytest

from cluster.client_config import opencode

URL = "http://127.0.0.1:8080"

TAKES = ["chat", "tools"]


def test_opencode_gets_a_provider_with_the_model_and_its_limits():
    document = json.loads(opencode(URL, "org/model", 32768, TAKES, needs_key=False))
    provider = document["provider"]["cluster"]
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    assert provider["options"] == {"baseURL": f"{URL}/v1"}
    assert provider["models"]["org/model"]["limit"] == {"context": 32768, "output": 8192}
    assert document["model"] == "cluster/org/model"


def test_the_key_is_named_and_not_written():
    options = json.loads(opencode(URL, "m", 4096, TAKES, needs_key=True))["provider"]["cluster"]["options"]
    assert options["apiKey"] == "{env:CLUSTER_API_KEY}"


@pytest.mark.parametrize(("context", "output"), [(1_000_000, 32_000), (4096, 1024), (2, 1)])
def test_the_output_leaves_room_for_the_conversation(context, output):
    limit = json.loads(opencode(URL, "m", context, TAKES, needs_key=False))["provider"]["cluster"]["models"]["m"][
        "limit"
    ]
    assert limit["output"] == output


def test_an_agents_temperature_is_not_dropped():
    model = json.loads(opencode(URL, "m", 32768, TAKES, needs_key=False))["provider"]["cluster"]["models"]["m"]
    assert model["temperature"] is True


def test_a_context_too_short_for_opencodes_own_prompt_gets_an_agent_without_tools():
    short, long = (json.loads(opencode(URL, "m", context, TAKES, needs_key=False)) for context in (8192, 32768))
    assert short["agent"][short["default_agent"]]["permission"] == {"*": "deny"}
    assert "agent" not in long
    assert "default_agent" not in long


def test_a_model_says_whether_it_takes_tools_and_reasons():
    def ask(*takes):
        return json.loads(opencode(URL, "m", 32768, takes, needs_key=False))

    able = ask("chat", "tools", "reasoning")["provider"]["cluster"]["models"]["m"]
    assert (able["tool_call"], able["reasoning"]) == (True, True)
    plain = ask("chat")
    assert (plain["provider"]["cluster"]["models"]["m"]["tool_call"], plain["default_agent"]) == (False, "small")
