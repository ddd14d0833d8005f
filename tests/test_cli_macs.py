"""The commands over several Macs: which hosts the flags mean, what discover and probe print, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from netns.machines import Network
from typer.testing import CliRunner, Result

from cluster import cli_macs
from cluster.errors import BadSetting, ClusterError, ConfigUnreadable, NoHosts, RecordingUnreadable
from cluster.macs import discover, probe
from cluster.macs.discover import Found

MACS = Path(__file__).parent / "macs"


def run(*arguments: str) -> Result:
    app = typer.Typer()
    cli_macs.register(app)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def failure(*arguments: str) -> ClusterError:
    error = run(*arguments).exception
    assert isinstance(error, ClusterError), error
    return error


@pytest.fixture
def named(monkeypatch, tmp_path):
    """An empty folder to work in; the names that would be probed, instead of probing them."""
    asked: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "probe_hosts", lambda names, save=None: asked.append(list(names)) or ([], []))
    monkeypatch.setattr(discover, "browse", lambda timeout_s: [])
    return asked


def test_hosts_are_split_at_commas_and_named_once(named):
    run("probe", "--hosts", "a, b,,anna@c ,a")
    assert named == [["a", "b", "anna@c"]]


def test_hosts_come_from_a_hostfile_of_mlx(named):
    Path("hosts.json").write_text('[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}]')
    run("probe", "--hostfile", "hosts.json")
    assert named == [["a", "b"]]


def test_flags_win_over_everything_else(named):
    Path("hosts.json").write_text('[{"ssh": "a", "ips": ["10.0.0.1"]}]')
    run("probe", "--hosts", "x", "--hostfile", "hosts.json")
    assert named == [["x"]]


def test_without_any_name_bonjour_is_asked_and_nobody_there_is_an_error(named):
    assert isinstance(failure("probe"), NoHosts)


def test_hosts_without_a_name_and_recordings_beside_names_are_wrong_usage(named):
    assert isinstance(failure("probe", "--hosts", " , "), BadSetting)
    assert isinstance(failure("probe", "--hosts", "a", "--recorded", str(MACS / "mesh2")), BadSetting)
    assert isinstance(failure("probe", "--recorded", "missing"), RecordingUnreadable)
    assert isinstance(failure("probe", "--config", "missing.yaml"), ConfigUnreadable)


def test_a_recorded_probe_shows_what_differs_side_by_side():
    result = run("probe", "--recorded", str(MACS / "broken"))
    assert result.exit_code == 0
    lines = {line.split("  ")[0]: line for line in result.stdout.splitlines()}
    assert lines["mlx"].split() == ["mlx", "0.32.4", "0.32.4", "0.31.2", "0.32.4"]
    assert "Mac Studio Mac15,14" in lines["model"]
    assert "after 10 min" in lines["sleep"]
    assert "there is no rdma_ctl" in result.stdout


def test_a_recorded_probe_as_json_has_every_fact():
    document = json.loads(run("probe", "--recorded", str(MACS / "mesh2"), "--json").stdout)
    assert [host["name"] for host in document["hosts"]] == ["mini-a", "mini-b"]
    assert document["hosts"][0]["rdma_devices"][2]["state"] == "PORT_ACTIVE"
    assert document["hosts"][0]["addresses"][1] == {"interface": "en0", "ip": "10.0.1.21", "prefix": 24}
    assert document["unreachable"] == []


@pytest.mark.parametrize("folder", [path.parent for path in MACS.glob("*/cluster.json")], ids=lambda path: path.name)
def test_every_recording_has_a_table(folder):
    result = run("probe", "--recorded", str(folder))
    assert result.exit_code == 0, result.exception


def test_a_machine_that_cannot_be_looked_at_is_told_and_the_exit_code_is_1(network: Network, tmp_path):
    network.add("mini-a", mac=MACS / "mesh2" / "mini-a")
    network.add("off", sshd=None)
    saved = tmp_path / "saved"
    with network.inside():
        result = run("probe", "--hosts", "mini-a,off", "--save", str(saved))
    assert result.exit_code == 1
    assert "Apple M4 Pro, 20 GPU cores" in result.stdout
    assert "off: off: " not in result.stderr
    assert "Remote Login" in result.stderr
    again = run("probe", "--recorded", str(saved))
    assert again.exit_code == 0
    assert "Apple M4 Pro, 20 GPU cores" in again.stdout
    assert "mini-a" not in again.stdout


def test_discover_lists_named_and_heard_machines(monkeypatch):
    found = [
        Found("desk", ("10.0.0.1",), configured=True, bonjour=True, uuid="U", model="Mac Studio", also=("a.local",)),
        Found(
            "b.local", ("10.0.0.2",), bonjour=True, trouble="b.local's key is not known yet.", hint="Run `ssh b.local`."
        ),
    ]
    monkeypatch.setattr(discover, "discover", lambda configured: found if configured == ["desk"] else [])
    result = run("discover", "--hosts", "desk")
    assert result.exit_code == 0
    first, second, hint = result.stdout.splitlines()[1:]
    assert (
        first.split("  ")[0] == "desk"
        and "named, Bonjour" in first
        and "a.local" in first
        and first.rstrip()[-2:] == "ok"
    )
    assert "not known yet" in second and "Run `ssh b.local`." in hint
    document = json.loads(run("discover", "--hosts", "desk", "--json").stdout)
    assert [machine["also"] for machine in document["hosts"]] == [["a.local"], []]


def test_an_empty_network_is_an_error_of_discover_too(named):
    assert isinstance(failure("discover"), NoHosts)


def test_what_is_recorded_is_not_recorded_again(tmp_path: Path) -> None:
    result = run("probe", "--recorded", str(MACS / "mesh2"), "--save", str(tmp_path / "again"))
    assert isinstance(result.exception, BadSetting)
    assert not (tmp_path / "again").exists()
