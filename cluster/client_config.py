"""Settings for other programs that talk to the running cluster, printed by `cluster client NAME`. Writes no file."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

OUTPUT_CEILING = 32_000
# opencode's own prompt and the definitions of its tools are about 8000 tokens, before any file is read.
OPENCODE_CONTEXT = 16_000
SMALL_AGENT = {
    "mode": "primary",
    "description": "Questions and answers without tools, for a model with a short context",
    "prompt": "Answer each question in one short sentence.",
    "permission": {"*": "deny"},
}


def opencode(url: str, model: str, context: int, takes: Collection[str], *, needs_key: bool) -> str:
    """An opencode.json with one provider: this cluster. `context` in tokens; `takes` as /health tells it.

    opencode starts to compact a conversation when it exceeds `context` less `output`, so the output gets a quarter at
    most. An agent's temperature is sent only to a model that says it takes one. A model without tools, or whose context
    is too short for opencode's own agent, gets an agent of its own, with a short prompt and no tools. The key is named,
    not written: opencode reads it from CLUSTER_API_KEY.
    """
    options: dict[str, Any] = {"baseURL": f"{url}/v1"}
    if needs_key:
        options["apiKey"] = "{env:CLUSTER_API_KEY}"
    limit = {"context": context, "output": min(max(1, context // 4), OUTPUT_CEILING)}
    able = {"temperature": True, "tool_call": "tools" in takes, "reasoning": "reasoning" in takes}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "cluster",
        "options": options,
        "models": {model: {"name": model, **able, "limit": limit}},
    }
    document: dict[str, Any] = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"cluster": provider},
        "model": f"cluster/{model}",
    }
    if context < OPENCODE_CONTEXT or "tools" not in takes:
        document |= {"default_agent": "small", "agent": {"small": SMALL_AGENT}}
    return json.dumps(document, indent=2, ensure_ascii=False)
