"""Where a model runs when nobody said where."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.errors import NoHosts
from cluster.macs import discover
from cluster.supervision.deploy import with_others

GB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with 40 GiB of weights, none of which are on the disk."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(40 * GB)
    return tmp_path


def found(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(discover, "host_names", lambda: list(names))


def test_a_model_that_this_machine_can_hold_stays_here(model, monkeypatch):
    found(monkeypatch, "a", "b")
    assert with_others(ClusterConfig(), "m", model, 64 * GB) == ClusterConfig()


def test_one_that_it_cannot_hold_is_spread_over_whom_bonjour_finds(model, monkeypatch):
    found(monkeypatch, "a", "b")
    assert with_others(ClusterConfig(), "m", model, 48 * GB).hosts == ("a", "b")


def test_one_other_machine_is_enough(model, monkeypatch):
    """Its plan may say that it is too small, with the sums."""
    found(monkeypatch, "a")
    assert with_others(ClusterConfig(), "m", model, 48 * GB).hosts == ("a",)


def test_nobody_is_an_error_with_both_sizes(model, monkeypatch):
    monkeypatch.setattr(discover, "browse", lambda timeout_s: [])
    with pytest.raises(
        NoHosts, match=r"The weights of m take 42.9 GB; this machine can give them 38.7 GB, and Bonjour"
    ):
        with_others(ClusterConfig(), "m", model, 48 * GB)


@pytest.mark.parametrize("said", [{"hosts": ("c",)}, {"local": 2}, {"hostfile": "f.json"}, {"force": True}])
def test_whoever_says_where_is_not_overruled(model, monkeypatch, said):
    found(monkeypatch, "a", "b")
    config = ClusterConfig(**said)
    assert with_others(config, "m", model, 8 * GB) == config
