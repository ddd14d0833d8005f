"""MODEL on the command line -> a local folder in MLX format: a folder, an LM Studio model, a Hugging Face repository.

Downloads go through huggingface_hub (its cache, tokens, mirrors and offline mode); what arrives is checked by
reading names and headers only. It loads no weights and never imports mlx. Called by the supervisor before a launch.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import (
    ClusterError,
    DamagedShard,
    DownloadFailed,
    HubUnreachable,
    MissingShards,
    NoSuchModel,
    NotAModelFolder,
    NotMlxFormat,
    RepositoryGated,
    RepositoryNotFound,
)
from cluster.ship import demo
from cluster.ship.downloads import Progress, check_disk

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")  # under the home folder: PUBLISHER/MODEL
PATTERNS = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
HUB_TIMEOUT_S = 10.0
MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`name` as clients see it (repository, or the folder's last part); `folder` holds config.json and weights."""

    name: str
    folder: Path


def resolve(model: str | None, *, cache: Path, progress: Progress) -> ResolvedModel:
    """The model's folder, downloaded if need be; None means the demo model.

    A folder wins over a name, an LM Studio folder over a download. `progress` may be called from other threads.
    Raises a ClusterError that names the path or repository.
    """
    if model is None:
        return ResolvedModel(demo.NAME, demo.demo_model(cache=cache, progress=progress))
    path = Path(model).expanduser()
    if path.is_dir():
        check_folder(path)
        return ResolvedModel(path.resolve().name, path.resolve())
    if path.is_file():
        raise _wrong_format(model, [path.name])
    if found := _in_lm_studio(model):
        check_folder(found)
        return ResolvedModel(f"{found.parent.name}/{found.name}", found)
    if not REPOSITORY.fullmatch(model):
        raise NoSuchModel(
            f"{model} is neither a folder nor a Hugging Face name (PUBLISHER/MODEL).", hint=_nearest(model, path)
        )
    folder = _download(model, progress)
    check_folder(folder)
    return ResolvedModel(model, folder)


def config_only(model: str) -> Path:
    """Where MODEL's config.json is: a folder here, the file itself, or the Hub's cache, into which it alone is fetched.

    For planning before a download; no weights are needed. Raises a ClusterError that names the path or repository.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".json":
            raise _wrong_format(model, [path.name])
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            check_folder(path)  # says why not
        return path
    if found := _in_lm_studio(model):
        return found
    if not REPOSITORY.fullmatch(model):
        raise NoSuchModel(
            f"{model} is neither a folder nor a Hugging Face name (PUBLISHER/MODEL).", hint=_nearest(model, path)
        )
    return _fetch_config(model)


# ---------------------------------------------------------------- folders


def check_folder(folder: Path) -> None:
    """Raise ClusterError unless `folder` holds a config and complete safetensors weights, judged by their headers."""
    names = sorted(path.name for path in folder.iterdir())
    if "config.json" not in names:
        if any(name.endswith(".gguf") for name in names):
            raise _wrong_format(str(folder), names)
        inner = [path.parent.name for path in sorted(folder.glob("*/config.json"))]
        hint = f"Did you mean {folder / inner[0]}?" if inner else "Give the folder that holds the model's config.json."
        raise NotAModelFolder(f"{folder} has no config.json, so it is not a model in MLX format.", hint=hint)
    config = _read_json(folder / "config.json")
    if not isinstance(config, dict) or "model_type" not in config:
        raise NotAModelFolder(
            f"{folder / 'config.json'} names no model_type.", hint="Download or convert the model again."
        )
    shards = [name for name in names if fnmatch(name, "model*.safetensors")]
    index = folder / "model.safetensors.index.json"
    named = sorted(set(_weight_map(index).values())) if index.exists() else []
    if missing := [name for name in named if name not in names]:
        raise MissingShards(
            f"{folder} lacks {len(missing)} of {len(named)} weight files: {', '.join(missing)}.",
            hint="Copy or download them into the folder; a download that was cut off goes on when started again.",
        )
    if not shards:
        raise _wrong_format(str(folder), names)
    for name in shards:
        _check_shard(folder / name)


def _weight_map(index: Path) -> dict[str, str]:
    content = _read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise NotAModelFolder(f"{index} has no weight_map.", hint="Download or convert the model again.")
    return weight_map


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotAModelFolder(f"{path} is not readable JSON: {error}.", hint="Download the model again.") from error


def _check_shard(path: Path) -> None:
    """A safetensors file: a uint64 length, that many bytes of JSON, then exactly the bytes that the JSON describes."""
    size = path.stat().st_size
    wanted = None
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if 0 < header_bytes <= min(size - 8, MAX_HEADER_BYTES):
            try:
                header = json.loads(file.read(header_bytes))
                ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
                wanted = 8 + header_bytes + max(ends, default=0)
            except (ValueError, LookupError, TypeError, AttributeError):
                wanted = None
    if wanted != size:
        seen = f"has {size} bytes, its header says {wanted}" if wanted else f"({size} bytes) has no readable header"
        raise DamagedShard(
            f"{path} {seen}.", hint=f"Delete it and fetch it again: rm '{path.resolve()}', then the same command."
        )


def _wrong_format(what: str, names: Iterable[str]) -> NotMlxFormat:
    names = list(names)
    kinds = {"GGUF": "*.gguf", "PyTorch": "*.bin", "PyTorch checkpoint": "*.pt*", "PyTorch state": "*.pth"}
    seen = [kind for kind, pattern in kinds.items() if any(fnmatch(name, pattern) for name in names)]
    held = f"it holds {' and '.join(seen)} weights only" if seen else "it holds no model*.safetensors file"
    return NotMlxFormat(
        f"{what} is not in MLX format: {held}.",
        hint="Take an MLX version (the Hub has many under mlx-community/), or convert it: `python -m mlx_lm convert`.",
    )


# ---------------------------------------------------------------- names


def _lm_studio_models() -> list[Path]:
    roots = [Path.home() / root for root in LM_STUDIO]
    return [path for root in roots for path in sorted(root.glob("*/*")) if path.is_dir()]


def _in_lm_studio(model: str) -> Path | None:
    """The LM Studio folder for PUBLISHER/MODEL, or for MODEL alone where one publisher has it."""
    matches = [path for path in _lm_studio_models() if model in (path.name, f"{path.parent.name}/{path.name}")]
    publishers = sorted({path.parent.name for path in matches})
    if len(publishers) > 1:
        choices = ", ".join(f"{publisher}/{model}" for publisher in publishers)
        raise NoSuchModel(f"LM Studio has {len(publishers)} models named {model}.", hint=f"Give one of: {choices}.")
    return matches[0] if matches else None


def _nearest(model: str, path: Path | None = None) -> str:
    """A hint with the nearest names on this machine: LM Studio, the Hub's cache, the same parent folder."""
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    names = [name.removeprefix("models--").replace("--", "/", 1) for name in (folder.name for folder in cached)]
    names += [f"{folder.parent.name}/{folder.name}" for folder in _lm_studio_models()]
    if path is not None and path.parent.is_dir():
        names += [str(Path(model).parent / entry.name) for entry in path.parent.iterdir() if entry.is_dir()]
    by_lower = {name.lower(): name for name in names}
    by_lower |= {name.rpartition("/")[2].lower(): name for name in names}
    near = difflib.get_close_matches(model.lower(), by_lower, n=3, cutoff=0.6)
    if choices := list(dict.fromkeys(by_lower[name] for name in near)):
        return f"Did you mean {' or '.join(choices)}?"
    return "Give a folder, or a name like mlx-community/Llama-3.2-1B-Instruct-4bit."


# ---------------------------------------------------------------- the Hub


@contextlib.contextmanager
def _refusals(repository: str) -> Iterator[None]:
    """What the Hub refuses for any file, as errors of ours."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise _gated(repository) from error
    except RepositoryNotFoundError as error:
        raise _not_found(repository) from error
    except HFValidationError as error:
        raise NoSuchModel(f"{repository} is not a possible repository name.", hint=_nearest(repository)) from error
    except LocalEntryNotFoundError as error:
        raise _unreachable(repository, error) from error


class _HubSilent(Exception):
    """The Hub gives no answer; the message says why."""


def _ask(repository: str) -> ModelInfo:
    """What the Hub knows of a repository, asked once: a download of a file would try again for half a minute.

    Raises _HubSilent, and what `_refusals` translates.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return HfApi().model_info(repository, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, HFValidationError):
        raise
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        raise _HubSilent(_first_line(error)) from error


def _download(repository: str, progress: Progress) -> Path:
    """The repository's snapshot folder in huggingface_hub's cache; complete files are never fetched twice."""
    import httpx2
    from huggingface_hub import snapshot_download

    try:
        with _refusals(repository):
            try:
                info = _ask(repository)
            except _HubSilent as silent:
                return _from_cache(repository, silent)
            sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
            done, total = _room_for(repository, str(info.sha), sizes)
            label = f"Downloading {repository}"
            progress(label, done, total)
            bar = _bar(lambda count: progress(label, min(done + count, total), total))
            folder = Path(snapshot_download(repository, allow_patterns=PATTERNS, tqdm_class=bar))
            progress(label, total, total)
            return folder
    except (httpx2.HTTPError, OSError, RuntimeError) as error:
        raise DownloadFailed(
            f"The download of {repository} broke off: {_first_line(error)}",
            hint="Run the same command again; files that had arrived in full are kept.",
        ) from error


def _fetch_config(repository: str) -> Path:
    """The cached snapshot if its weights are complete, else its config.json alone, fetched if need be."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    with _refusals(repository):
        try:
            info = _ask(repository)
        except _HubSilent as silent:
            cached = try_to_load_from_cache(repository, "config.json")
            if not isinstance(cached, str):
                raise _unreachable(repository, silent) from silent
            config = Path(cached)
        else:
            names = {sibling.rfilename for sibling in info.siblings or []}
            if "config.json" not in names:
                raise _no_config(repository)
            config = Path(hf_hub_download(repository, "config.json", etag_timeout=HUB_TIMEOUT_S))
            if "hf_quant_config.json" in names:  # only some exports have it
                with contextlib.suppress(EntryNotFoundError, OSError):
                    hf_hub_download(repository, "hf_quant_config.json", etag_timeout=HUB_TIMEOUT_S)
    try:
        check_folder(config.parent)
    except ClusterError:
        return config
    return config.parent


def _no_config(repository: str) -> NotAModelFolder:
    return NotAModelFolder(f"{repository} has no config.json, so it is not a model in MLX format.")


def _gated(repository: str) -> RepositoryGated:
    return RepositoryGated(
        f"{repository} is gated: its terms must be accepted first.",
        hint=f"Accept them at https://huggingface.co/{repository}, then run `hf auth login` or set HF_TOKEN.",
    )


def _not_found(repository: str) -> RepositoryNotFound:
    return RepositoryNotFound(
        f"The Hugging Face Hub has no model {repository}, or it is private.",
        hint=f"{_nearest(repository)} For a private one, run `hf auth login` or set HF_TOKEN.",
    )


def _from_cache(repository: str, cause: Exception) -> Path:
    """Without the Hub: the cached snapshot if it is complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=PATTERNS, local_files_only=True))
    except LocalEntryNotFoundError:
        raise _unreachable(repository, cause) from cause


def _unreachable(repository: str, cause: Exception) -> HubUnreachable:
    return HubUnreachable(
        f"{repository} is not complete in the local cache and the Hugging Face Hub gave no answer: "
        f"{_first_line(cause)}",
        hint="Check the connection (HF_HUB_OFFLINE, HF_ENDPOINT and proxy settings count), or give a local folder.",
    )


def _room_for(repository: str, revision: str, sizes: dict[str, int]) -> tuple[int, int]:
    """(bytes already cached, bytes in total) of the wanted files. Raises ClusterError before the first byte."""
    from huggingface_hub import constants, try_to_load_from_cache

    wanted = {name: size for name, size in sizes.items() if any(fnmatch(name, pattern) for pattern in PATTERNS)}
    if not any(fnmatch(name, "model*.safetensors") for name in wanted):
        raise _wrong_format(repository, sizes)
    if "config.json" not in wanted:
        raise _no_config(repository)
    cached = sum(
        size
        for name, size in wanted.items()
        if isinstance(try_to_load_from_cache(repository, name, revision=revision), str)
    )
    total = sum(wanted.values())
    check_disk(Path(constants.HF_HUB_CACHE), total - cached, repository)
    return cached, total


def _bar(report: Callable[[int], None]) -> Any:
    """A progress bar class for huggingface_hub that draws nothing and reports bytes as they are written."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc,unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self.counts_bytes = kwargs.get("unit") == "B"
            self.seen = 0

        def update(self, n: float | None = 1) -> None:
            self.seen += int(n or 0)
            if self.counts_bytes:
                report(self.seen)

    return Bar


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{lines[0].strip()}" if lines else type(error).__name__
