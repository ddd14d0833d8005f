"""Every setting of `cluster up`: its default, its check, and where its value comes from.

This is the only place that knows defaults. Precedence: flag, then environment (the API key only), then the file,
then the default. `cli.py` calls `load_config`; the rest is handed a `ClusterConfig`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import BadSetting, ConfigUnreadable, UnknownSetting

UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


def parse_size(value: object) -> int:
    """Bytes in 8000000000, "8GB" (decimal) or "8GiB" (binary). Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("a size like 8GB, 512MiB or a number of bytes")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** UNITS[unit.upper()])


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("text (in quotes, if it looks like a number)")
    return value.strip()


def _model(value: object) -> str:
    name = _text(value)
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def _whole(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return value

    return parse


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= 86400:
        raise ValueError("a number of seconds from 1 to 86400")
    return float(value)


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _one_of(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if isinstance(value, bool):  # YAML 1.1 reads an unquoted on or off as a truth value
            value = "on" if value else "off"
        if value not in choices:
            raise ValueError(f"{', '.join(choices[:-1])} or {choices[-1]}")
        return str(value)

    return parse


def _split(value: object) -> tuple[int, ...]:
    values = value.split(",") if isinstance(value, str) else value
    try:
        split = tuple(int(layers) for layers in values)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        split = ()
    if len(split) < 2 or min(split) < 1:
        raise ValueError("numbers of layers, one for each rank, like 20,10")
    return split


def _names(value: object) -> tuple[str, ...]:
    values = value.split(",") if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(name, str) for name in values):
        raise ValueError("names of hosts, like studio-a,studio-b")
    return tuple(dict.fromkeys(name.strip() for name in values if name.strip()))


def _folders(value: object) -> dict[str, str]:
    if isinstance(value, (list, tuple)):
        value = dict(str(pair).partition("=")[::2] for pair in value)
    if not isinstance(value, dict) or not all(host and folder for host, folder in value.items()):
        raise ValueError("a folder for each host, like studio-b=/Volumes/models")
    return {str(host): str(folder) for host, folder in value.items()}


def _file(value: object) -> str:
    return str(Path(_text(value)).expanduser().resolve())


def _origins(value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)):
        raise ValueError("an origin or a list of origins")
    for origin in values:
        if origin != "*" and not (isinstance(origin, str) and ORIGIN.fullmatch(origin)):
            raise ValueError('origins like http://localhost:3000, or "*"')
    return tuple(values)


def _positive_size(value: object) -> int:
    if (size := parse_size(value)) == 0:
        raise ValueError("a size above 0, like 8GB")
    return size


def _setting(default: Any, parse: Callable[[object], Any], *, secret: bool = False) -> Any:
    return field(default=default, repr=not secret, metadata={"parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The settings of one `cluster up`. None means: chosen from the model or the machine. Sizes in bytes.

    `prefix_memory` 0 switches prefix reuse off. `stall_timeout` is how long one step may run, in seconds, before its
    rank counts as stuck, however short it should be. `max_body` bounds one HTTP request body. `local` ranks run on this
    machine, or one for each host of a `hostfile` or of `hosts` ("auto": whom Bonjour finds); `split` are the layers of
    rank 0, 1, ... of a pipeline. `python` is the remote ranks' interpreter, if not the one that `cluster install` made.
    `models` is where a host keeps models, if not in this project's cache there.
    """

    model: str | None = _setting(None, _model)
    host: str = _setting("127.0.0.1", _text)
    port: int = _setting(8080, _whole(1, 65535))
    api_key: str | None = _setting(None, _text, secret=True)
    cors_origin: tuple[str, ...] = _setting((), _origins)
    context: int | None = _setting(None, _whole(16, 1 << 30))
    slots: int = _setting(32, _whole(1, 4096))
    kv_memory: int | None = _setting(None, _positive_size)
    prefix_memory: int | None = _setting(None, parse_size)
    prefill_step_size: int = _setting(2048, _whole(1, 1 << 20))
    wired_limit: str = _setting("auto", _one_of("auto", "off"))
    queue: int = _setting(256, _whole(0, 1 << 20))
    max_body: int = _setting(32_000_000, _positive_size)
    stall_timeout: float = _setting(10.0, _seconds)
    log_prompts: bool = _setting(False, _truth)
    local: int | None = _setting(None, _whole(1, 64))
    hostfile: str | None = _setting(None, _file)
    hosts: tuple[str, ...] = _setting((), _names)
    backend: str = _setting("auto", _one_of("auto", "ring", "jaccl", "jaccl-ring"))
    force: bool = _setting(False, _truth)
    python: str | None = _setting(None, _text)
    models: Mapping[str, str] | None = _setting(None, _folders)
    parallel: str = _setting("auto", _one_of("auto", "tensor", "pipeline"))
    split: tuple[int, ...] = _setting((), _split)
    fast_synch: str = _setting("auto", _one_of("auto", "on", "off"))
    self_check: bool = _setting(True, _truth)

    def without_key(self) -> dict[str, Any]:
        """All settings but the API key, as plain values: what may be written down and compared."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "api_key"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


NAMES = tuple(f.name for f in fields(ClusterConfig))
_PARSE: dict[str, Callable[[object], Any]] = {f.name: f.metadata["parse"] for f in fields(ClusterConfig)}


def flag(name: str) -> str:
    """How a setting is spelled on the command line."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def load_config(
    flags: Mapping[str, object], *, file: Path | None = None, environment_key: str | None = None
) -> ClusterConfig:
    """The settings from `flags` (None or empty: not given), the environment's API key, and a YAML `file`.

    Raises BadSetting, UnknownSetting and ConfigUnreadable, which name the flag, or the key and the file.
    """
    settled: dict[str, Any] = {}
    if file is not None:
        for name, value in _read(file).items():
            settled[name] = _parse(name, value, f"`{name.replace('_', '-')}` in {file}")
    if environment_key:
        settled["api_key"] = _parse("api_key", environment_key, "CLUSTER_API_KEY")
    for name, value in flags.items():
        if value not in (None, (), []):
            settled[name] = _parse(name, value, flag(name))
    return ClusterConfig(**settled)


def _parse(name: str, value: object, source: str) -> Any:
    try:
        return _PARSE[name](value)
    except ValueError as error:
        seen = "" if name == "api_key" else f", not {value!r}"
        raise BadSetting(f"{source} must be {error}{seen}.") from error


def _read(file: Path) -> dict[str, object]:
    """The file's settings by field name; a key may be spelled with hyphens, as its flag is. A null is left out."""
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigUnreadable(f"{file} cannot be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigUnreadable(f"{file} is not valid YAML: {' '.join(str(error).split())}.") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigUnreadable(f"{file} must hold `key: value` lines.", hint="For example: `port: 8081`.")
    settings: dict[str, object] = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name not in NAMES:
            nearest = difflib.get_close_matches(name, NAMES, n=1)
            known = ", ".join(n.replace("_", "-") for n in NAMES)
            hint = f"Did you mean `{nearest[0].replace('_', '-')}`?" if nearest else f"Known keys: {known}."
            raise UnknownSetting(f"`{key}` in {file} is not a setting.", hint=hint)
        if name in settings:
            raise BadSetting(f"`{key}` stands twice in {file}.", hint="Keep one of the two spellings.")
        settings[name] = value
    return {name: value for name, value in settings.items() if value is not None}
