"""`cluster install` and `cluster pull`: which hosts and layers they mean, what they print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from made_macs import ring
from typer.testing import CliRunner, Result

from cluster import cli_ship
from cluster.errors import BadSetting, ClusterError
from cluster.macs import discover, probe
from cluster.plan import model_info, planner
from cluster.ship import install, pull
from cluster.ship.same import Facts


def run(*arguments: str) -> Result:
    app = typer.Typer()
    cli_ship.register(app)
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    asked: list[list[str]] = []

    def stand_in(hosts: list[str], **_: Any) -> list[Facts]:
        asked.append(hosts)
        return [Facts(host, None, "3.13.5", "0.32.4", "0.32.2", "0123") for host in hosts]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install, "install", stand_in)
    monkeypatch.setattr(discover, "host_names", lambda: ["found"])
    return asked


def test_install_takes_hosts_one_by_one_from_flags_or_from_bonjour(installed: list[list[str]]):
    said = run("install", "a", "b", "a")
    run("install", "--hosts", "c,d")
    run("install")
    assert installed == [["a", "b"], ["c", "d"], ["found"]]
    assert said.output.splitlines() == [f"{h}: Python 3.13.5, mlx 0.32.4, mlx-lm 0.32.2, cluster 0123" for h in "ab"]


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Three Macs in a ring; the needs and options of each pull, instead of it."""
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = []
    hosts = list(ring(3).hosts)

    def stand_in(model: Any, needs: dict[str, Any], **options: Any) -> dict[str, str]:
        calls.append((needs, options))
        return dict.fromkeys(needs, "/models/tiny")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "probe_hosts", lambda names, save=None: (hosts, []))
    monkeypatch.setattr(pull, "ensure", stand_in)
    return calls


def test_pull_brings_each_host_the_layers_that_the_plan_gives_it(pulled: list[Any], tiny_model: Path):
    said = run("pull", str(tiny_model), "--hosts", "m0,m1,m2", "--parallel", "pipeline", "--split", "1,1,1")
    assert said.exit_code == 0, said.output
    needs, options = pulled[0]
    assert sorted(needs.values()) == [(0, 1), (1, 2), (2, 3)]
    assert options["routes"]["m0", "m1"][1] == 80.0
    assert "layers 0 to 0 of tiny-llama" in said.output


def test_a_host_without_a_rank_gets_nothing(pulled: list[Any], tiny_model: Path):
    run("pull", str(tiny_model), "--hosts", "m0,m1,m2")
    assert list(pulled[0][0].values()) == [None]


def test_whole_brings_everything_to_everyone_and_asks_no_planner(
    pulled: list[Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planner, "plan", lambda *_: pytest.fail("planned"))
    monkeypatch.setattr(model_info, "read", lambda *_: pytest.fail("read"))
    run("pull", str(tiny_model), "--hosts", "m0,m1,m2", "--whole", "--models", "m1=/Volumes/Models", "--verify")
    needs, options = pulled[0]
    assert needs == {"m0": None, "m1": None, "m2": None}
    assert (options["models"], options["again"]) == ({"m1": "/Volumes/Models"}, True)


@pytest.mark.parametrize("text", ["m1", "=folder", "m1="])
def test_a_folder_without_a_host_is_refused(pulled: list[Any], tiny_model: Path, text: str):
    error = run("pull", str(tiny_model), "--models", text).exception
    assert isinstance(error, BadSetting) and isinstance(error, ClusterError)
    assert pulled == []
