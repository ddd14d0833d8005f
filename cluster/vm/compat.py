"""The compatibility map: combinations of host, guest, runtime and profile that were tested, reported or are refused.

compat.yaml ships with the program; what `vm run --compare --record` finds is added to a file of the user's.
"""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from cluster.errors import CombinationRefused

SHIPPED = Path(__file__).with_name("compat.yaml")
KEY = ("host_chip", "host_build", "guest_macos", "guest_build", "runtime", "version", "profile")
STATES = ("refused", "tested", "reported", "no gain")  # the first that matches counts
UNMAPPED = re.compile(r"\n(--no-mmap|(-mmp|--mmap)\n0)\n")  # llama.cpp reads the model instead of mapping it

Row = dict[str, str]


def load(*files: Path) -> list[Row]:
    """All rows of the files that exist. Raises CombinationRefused if one of them is not a list of records."""
    rows: list[Row] = []
    for file in filter(Path.exists, files):
        try:
            rows += [{key: str(value) for key, value in row.items()} for row in yaml.safe_load(file.read_text())]
        except (OSError, yaml.YAMLError, AttributeError, TypeError) as error:
            raise CombinationRefused(f"{file} is no list of records: {error}", hint="Repair or remove it.") from error
    return rows


def runtime(argv: list[str]) -> tuple[str, str]:
    """What runs: llama.cpp with its version, mlx by its module, else the program's name."""
    name = Path(argv[0]).name
    if not name.startswith("llama-"):
        return ("mlx" if any(word.startswith("mlx") for word in argv[1:]) else name), ""
    said = subprocess.run([argv[0], "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = re.search(r"version: (\d+)", said.stderr + said.stdout)
    return "llama.cpp", f"b{found[1]}" if found else ""


def look_up(rows: list[Row], key: Row, argv: list[str], *, untested: bool = True) -> Row:
    """The row that counts here, or one with state "untested". What is not known of the key matches "*" only.

    Raises CombinationRefused for what is known to be wrong, and for the untested unless that is allowed.
    """
    found = [row for row in rows if all(fnmatchcase(key[part], row.get(part, "*")) for part in KEY)]
    if UNMAPPED.search("\n".join([*argv, ""])):
        found = [row for row in found if row.get("unless") != "--no-mmap"]
    row = min(found, key=lambda row: STATES.index(row["state"]), default={"state": "untested"})
    if row["state"] == "refused":
        raise CombinationRefused(f"This combination gives wrong results. {row['evidence']}")
    if row["state"] == "untested" and not untested:
        parts = ", ".join(f"{part.replace('_', ' ')} {key[part] or 'unknown'}" for part in KEY)
        hint = "Check it with --compare --record, or take the risk with --untested."
        raise CombinationRefused(f"Nobody has reported this combination: {parts}.", hint=hint)
    return row


def record(file: Path, row: Row) -> None:
    """Add a row to the user's file, whose folder exists."""
    with file.open("a") as rows:
        rows.write(yaml.safe_dump([row], sort_keys=False))
