"""The sizes of the models in models/shapes, each read once per run by the real child process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cluster.plan import model_info
from parallel import wire

SHAPES = Path(__file__).parent / "models/shapes"
DEEPSEEK, KIMI = "deepseek-v3-671b-4bit", "kimi-k2-1t-4bit"
MISTRAL, MUSE = "mistral-128b-8bit", "muse-spark-816b-a42b-nvfp4"
NAMES = (DEEPSEEK, KIMI, MISTRAL, MUSE)


@cache
def shape(name: str) -> wire.ModelInfo:
    return model_info.read(SHAPES / f"{name}.json")
