from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEV = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]


def locked(name: str) -> dict[str, list[str]]:
    """Package -> its pinned versions (one per marker)."""
    pins: dict[str, list[str]] = {}
    for package, version in re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(), re.MULTILINE):
        pins.setdefault(canonicalize_name(package), []).append(version)
    return pins


@pytest.mark.parametrize(
    ("name", "dependencies"), [("requirements.lock", PROJECT["dependencies"]), ("requirements-dev.lock", DEV)]
)
def test_every_dependency_is_pinned_to_a_version_that_it_allows(name: str, dependencies: list[str]) -> None:
    pins = locked(name)
    for requirement in map(Requirement, dependencies):
        versions = pins.get(canonicalize_name(requirement.name), [])
        assert versions, f"{requirement.name} is not in {name}: run make lock"
        assert all(requirement.specifier.contains(version) for version in versions), requirement


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_every_pin_has_a_hash_and_no_index_is_named(name: str) -> None:
    text = (ROOT / name).read_text()
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    assert not re.search(r"--(extra-)?index-url|--find-links|://|@ file", text)


def test_running_and_developing_use_the_same_versions() -> None:
    run, dev = locked("requirements.lock"), locked("requirements-dev.lock")
    assert {package: dev.get(package) for package in run} == run
