"""Settings for other programs that talk to the running cluster, printed by `cluster client NAME`. Writes no file."""

from __future__ import annotations

import json
from typing import Any

OUTPUT_CEILING = 32_000


def opencode(url: str, model: str, context: int, *, needs_key: bool) -> str:
    """An opencode.json with one provider: this cluster. `context` in tokens.

    opencode starts to compact a conversation when it exceeds `context` less `output`, so the output gets a quarter at
    most. The key is named, not written: opencode reads it from CLUSTER_API_KEY.
    """
    options: dict[str, Any] = {"baseURL": f"{url}/v1"}
    if needs_key:
        options["apiKey"] = "{env:CLUSTER_API_KEY}"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "cluster",
        "options": options,
        "models": {
            model: {"name": model, "limit": {"context": context, "output": min(max(1, context // 4), OUTPUT_CEILING)}}
        },
    }
    document = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"cluster": provider},
        "model": f"cluster/{model}",
    }
    return json.dumps(document, indent=2, ensure_ascii=False)
