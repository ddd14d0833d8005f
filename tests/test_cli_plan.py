"""`cluster plan` as typed: what it prints, its exit codes, and what it fetches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import hub_stand_in
import huggingface_hub
import pytest
from hub_stand_in import Hub
from huggingface_hub import constants
from recorded_macs import MACS
from shapes import KIMI, MISTRAL, NAMES, SHAPES
from typer.testing import CliRunner

from cluster.cli import app
from cluster.errors import BadSetting, ClusterError, HubUnreachable, NoPlan, NoSuchModel, NotAModelFolder, NotMlxFormat
from cluster.ship import weights


def run(*arguments: str) -> tuple[str, ClusterError | None]:
    """(stdout, the error that `cluster` would print)."""
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    error = result.exception
    assert error is None or isinstance(error, ClusterError), error
    return result.stdout, error


def shape(name: str) -> str:
    return str(SHAPES / f"{name}.json")


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_a_sum_per_host_and_a_reason_for_what_was_not_chosen(name):
    text, error = run(shape(name), "--recorded", str(MACS / "mesh4-double"), "--parallel", "pipeline")
    assert error is None
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    columns = {row[0]: len(row) - 1 for row in rows}
    for title in ("host", "layers", "weights", "+ KV", "+ activations", "+ reserve", "= needs", "has", "spare"):
        assert columns[title] == 4, title
    assert "bytes per token (2 cables)" in text
    assert "Not chosen:" in text
    assert "tokens/s for one stream" in text


def test_json_has_the_ranks_in_order_with_layers_and_sums():
    text, _ = run(shape(KIMI), "--recorded", str(MACS / "mesh4-double"), "--split", "30,31", "--json")
    found = json.loads(text)
    assert [(rank["start"], rank["stop"]) for rank in found["chosen"]["ranks"]] == [(31, 61), (0, 31)]
    assert {option["strategy"] for option in found["others"]} == {"single", "tensor"}
    assert all(option["why_not"] for option in found["others"])


def test_what_does_not_fit_is_an_error_and_in_json_has_every_sum():
    text, error = run(shape(MISTRAL), "--recorded", str(MACS / "mesh2"), "--json")
    assert isinstance(error, NoPlan)
    assert error.exit_code == 1
    found = json.loads(text)
    assert found["chosen"] is None
    assert all(rank["budget"]["spare"] < 0 for option in found["others"] for rank in option["ranks"])


@pytest.mark.parametrize("flags", [("--split", "a,b"), ("--context", "0"), ("--slots", "-1"), ("--parallel", "magic")])
def test_a_wrong_flag_is_wrong_usage(flags):
    _, error = run(shape(KIMI), "--recorded", str(MACS / "mesh2"), *flags)
    assert isinstance(error, BadSetting)
    assert error.exit_code == 2


# ---------------------------------------------------------------- MODEL


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub_stand_in.serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_of_a_repository_only_the_config_is_fetched(hub: Hub):
    config = Path(shape(MISTRAL)).read_bytes()
    hub.repositories["anna/large"] = {"config.json": config, "model.safetensors": b"x" * 1000}
    source = weights.config_only("anna/large")
    assert source.read_bytes() == config
    assert hub.bodies() == ["config.json"]


def test_a_hub_that_is_gone_is_asked_once_and_the_cached_config_taken(hub: Hub, monkeypatch):
    hub.repositories["anna/large"] = {"config.json": b"{}", "model.safetensors": b"x" * 1000}
    cached = weights.config_only("anna/large")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", pytest.fail)  # it would try again for half a minute
    assert weights.config_only("anna/large") == cached
    with pytest.raises(HubUnreachable, match="anna/other is not complete in the local cache"):
        weights.config_only("anna/other")


def test_a_repository_without_a_config_is_no_model(hub: Hub):
    hub.repositories["anna/text"] = {"README.md": b""}
    with pytest.raises(NotAModelFolder, match=r"anna/text has no config\.json"):
        weights.config_only("anna/text")


@pytest.mark.parametrize(
    ("name", "kind"), [("model.gguf", NotMlxFormat), ("nowhere", NoSuchModel), ("empty", NotAModelFolder)]
)
def test_what_is_no_model_is_refused_before_any_mac_is_looked_at(name, kind, tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    _, error = run(name, "--hosts", "never-asked")
    assert isinstance(error, kind)


def test_a_config_file_and_a_folder_are_taken_where_they_are(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert weights.config_only(str(tmp_path)) == tmp_path
    assert weights.config_only(str(tmp_path / "config.json")) == tmp_path / "config.json"
