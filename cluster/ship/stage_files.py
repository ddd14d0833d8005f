"""Which files of a model folder a host needs: all of them, or those that its layers of a pipeline are in.

Reads names and headers only. `parallel/loading.py` accepts that the others are missing, for files in MLX format, and
names what it lacks should this be wrong. Called by `pull.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cluster.errors import DamagedShard
from cluster.ship.weights import PATTERNS

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
TOWER = re.compile(r"(^|\.)(vision|visual|audio|multi_modal|mm_|image)")  # its layers are not the text model's
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embedding|embed)\.")
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
AFTER = re.compile(r"(^|\.)(norm|final_layernorm|ln_f)\.")

Layers = tuple[int, int] | None  # [start, stop) of a pipeline; None: the whole model


def model_files(folder: Path) -> list[str]:
    """The files of the model in `folder`, by name; what lies beside them is no part of it."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in PATTERNS))


def is_weights(name: str) -> bool:
    return fnmatch(name, "model*.safetensors")


def weights_bytes(folder: Path) -> int:
    """The size of the model's weights on disk, about what they take in memory."""
    return sum((folder / name).stat().st_size for name in model_files(folder) if is_weights(name))


def needed(folder: Path, needs: Mapping[str, Layers]) -> dict[str, list[str]]:
    """The names of the files that each host needs. Raises DamagedShard for a header that cannot be read."""
    names = model_files(folder)
    headers = {name: _header(folder / name) for name in names if is_weights(name)}
    every = [tensor for header in headers.values() for tensor in header if tensor != "__metadata__"]
    splits = len(headers) > 1 and all(_by_mlx(header) for header in headers.values())
    count = max((layers[1] for layers in needs.values() if layers is not None), default=0)
    wanted = {}
    for host, layers in needs.items():
        kept = set(headers)
        if splits and layers is not None:
            own = _own(every, layers, count)
            kept = {name for name, header in headers.items() if own.intersection(header)}
        wanted[host] = [name for name in names if name in kept or name not in headers]
    return wanted


def _own(every: Sequence[str], layers: tuple[int, int], count: int) -> set[str]:
    """The tensors of one stage of a model with `count` layers: its layers, and at the ends what lies outside them."""
    start, stop = layers
    tied = not any(HEAD.search(name) for name in every)
    own = set()
    for name in every:
        layer = None if TOWER.search(name) else LAYER.search(name)
        if layer is not None:
            inside = start <= int(layer[1]) < stop
        else:
            first = start == 0 and not HEAD.search(name) and not AFTER.search(name)
            inside = first or (stop == count and (tied or not EMBEDDING.search(name)))
        if inside:
            own.add(name)
    return own


def _by_mlx(header: Mapping[str, Any]) -> bool:
    metadata = header.get("__metadata__")
    return isinstance(metadata, dict) and metadata.get("format") == "mlx"


def _header(file: Path) -> dict[str, Any]:
    """What a safetensors file says of itself: tensors by name."""
    try:
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    except (OSError, ValueError, MemoryError) as error:
        raise DamagedShard(f"{file} has no readable header.", hint="Delete it and fetch it again.") from error
    return dict(header)
