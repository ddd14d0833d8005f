"""What a host says of itself -> what is installed there; real hosts are in netns/test_netns_install.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.macs.ssh import LocalShell, Result
from cluster.ship import environment
from cluster.ship.install import SURVEY, _survey, facts_here, install, python_of, versions
from cluster.ship.same import Facts

MARKERS = {"python_version": "3.13"}


class Told(LocalShell):
    """A host whose survey prints `lines`, and which has an environment or not."""

    def __init__(self, *lines: str, link: str = "") -> None:
        super().__init__("studio-a")
        self._lines = lines
        self._link = link

    def run(self, argv, timeout_s=0.0) -> Result:
        if argv[0] == "readlink":
            return Result(0 if self._link else 1, self._link)
        return Result(0, "\n".join(self._lines)) if argv[0] == "sh" else Result(127)


def python(path: str, version: str, *, venv: bool = True, native: bool = True) -> str:
    return json.dumps({"python": path, "version": version, "venv": venv, "native": native, "markers": MARKERS})


DF = "/dev/disk3s5 971350180 500000000 470000000 52% /System/Volumes/Data"


def test_the_python_of_exactly_this_version_is_taken_before_another_one():
    found = _survey(Told(python("/a", "3.13.2"), python("/b", "3.13.5"), DF), "3.13", "3.13.5")
    assert found.python is not None and found.python["python"] == "/b"


def test_any_of_the_same_minor_version_will_do():
    found = _survey(Told(python("/old", "3.9.6"), python("/a", "3.13.2"), DF), "3.13", "3.13.5")
    assert found.python is not None and found.python["python"] == "/a"


def test_pythons_that_will_not_do_are_told_with_the_reason():
    lines = [python("/old", "3.9.6"), python("/x", "3.13.5", native=False), python("/y", "3.13.5", venv=False)]
    found = _survey(Told(*lines, DF), "3.13", "3.13.5")
    assert found.python is None
    assert found.others == ("3.9.6 at /old", "3.13.5 at /x is not native (arm64)", "3.13.5 at /y lacks venv")


def test_free_room_is_read_from_df_and_words_of_login_files_are_skipped():
    found = _survey(Told("Welcome!", python("/a", "3.13.5"), DF), "3.13", "3.13.5")
    assert found.free == 470000000 * 1024
    assert _survey(Told(), "3.13", "3.13.5").free == 0


def test_the_key_of_the_environment_that_is_there_is_known():
    assert _survey(Told(DF, link="env-0123\n"), "3.13", "3.13.5").key == "0123"
    assert _survey(Told(DF), "3.13", "3.13.5").key == ""


def test_the_survey_finds_a_python_of_this_version_and_the_disk():
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    text = Path(environment.__file__).read_text()
    told = subprocess.run(["sh", "-c", SURVEY, "sh", text, version], capture_output=True, text=True, check=True)
    *pythons, disk = told.stdout.strip().splitlines()
    found = [json.loads(line) for line in pythons]
    assert any(one["version"].startswith(version) for one in found)
    assert all(Path(one["python"]).exists() for one in found)
    assert len(disk.split()) >= 6


def test_this_machine_is_asked_with_its_own_interpreter_and_has_nothing_to_install(tmp_path: Path):
    facts = facts_here()
    assert python_of("localhost") == sys.executable
    assert python_of("studio-a") == ".local/share/cluster/env/bin/python"
    assert install(["localhost"], cache=tmp_path) == [Facts("localhost", *list(_values(facts))[1:])]


def test_a_coordinator_counts_with_this_project_only():
    coordinator, rank = versions(["localhost"], models={"localhost": "89ab"})
    assert coordinator == Facts("this machine", ours=rank.ours)
    assert rank.mlx and rank.mlx_lm and rank.model == "89ab"


def _values(facts: Facts) -> list[str | None]:
    return [getattr(facts, name) for name in ("host", "build", "python", "mlx", "mlx_lm", "ours", "model")]


def test_ours_changes_with_any_file_of_this_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in environment.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "PACKAGES", ("cluster", "parallel"))
    for package in ("cluster", "parallel"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    before = environment.ours()
    (tmp_path / "cluster" / "__pycache__").mkdir()
    (tmp_path / "cluster" / "__pycache__" / "x.pyc").write_text("1")
    assert environment.ours() == before
    (tmp_path / "parallel" / "data.yaml").write_text("1")
    assert environment.ours() != before


def test_platforms_are_tags_of_this_machine_newest_first():
    tags = environment.platforms()
    machine = environment.platform.machine()
    assert all(tag.endswith(machine) for tag in tags)
    if sys.platform == "linux":
        assert "manylinux2014_" + machine in tags
        minors = [int(tag.split("_")[2]) for tag in tags if tag.startswith("manylinux_2_")]
        assert minors == sorted(minors, reverse=True)
