"""The commands topology, doctor, hostfile and check, on recorded Macs: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from recorded_macs import MACS
from typer.testing import CliRunner, Result

from cluster.cabling.hostfile import read
from cluster.cli_macs import register
from cluster.errors import BadSetting, HostfileInvalid, NoHostfile

app = typer.Typer()
register(app)


def run(*words: str, cluster: str = "") -> Result:
    recorded = ("--recorded", str(MACS / cluster)) if cluster else ()
    return CliRunner().invoke(app, [*words, *recorded])


def test_topology_shows_cables_speeds_and_why_rdma_does_not_work() -> None:
    result = run("topology", cluster="broken")
    assert result.exit_code == 0
    assert "40 Gb/s" in result.output
    assert "st-2 has RDMA disabled" in " ".join(result.output.split())


def test_topology_shows_which_host_is_a_virtual_machine() -> None:
    assert run("topology", cluster="vm1").output.splitlines() == [
        "One Mac: guest.",
        "guest is a virtual machine, without Thunderbolt RDMA.",
    ]
    assert "virtual machine" in run("topology", "--dot", cluster="vm1").output


def test_topology_as_json_has_names_and_truth() -> None:
    found = json.loads(run("topology", "--json", cluster="ring5").output)
    assert found["ring"] == ["mini-1", "mini-2", "mini-4", "mini-5", "mini-3"]
    assert len(found["cables"]) == 5


def test_topology_draws_for_graphviz() -> None:
    assert run("topology", "--dot", cluster="mixed").output.startswith("graph cluster {")


@pytest.mark.parametrize(("cluster", "code"), [("mesh2", 0), ("mixed", 0), ("broken", 1), ("ring5", 1), ("single", 0)])
def test_doctor_exits_with_1_only_if_something_is_in_the_way(cluster: str, code: int) -> None:
    result = run("doctor", cluster=cluster)
    assert result.exit_code == code
    assert "Traceback" not in result.output


def test_doctor_as_json_has_every_field_of_a_finding() -> None:
    findings = json.loads(run("doctor", "--json", cluster="broken").output)["findings"]
    assert len(findings) == 10
    assert set(findings[0]) == {"code", "blocks", "host", "port", "seen", "why", "do"}


def test_doctor_says_so_where_nothing_is_to_be_fixed() -> None:
    assert "Nothing to fix" in run("doctor", cluster="mesh2").output


def test_fix_prints_commands_and_their_undo_and_can_be_pasted() -> None:
    output = run("doctor", "--fix", cluster="broken").output
    lines = [line for line in output.splitlines() if line]
    assert "sudo ifconfig bridge0 deletem en4" in lines
    assert "#   sudo ifconfig bridge0 addm en4" in lines
    assert all(line.startswith(("#", "sudo ")) for line in lines)


def test_hostfile_writes_the_file_and_check_finds_it_right(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    assert run("hostfile", "-o", str(file), cluster="mesh4-double").exit_code == 0
    assert read(file).backend == "jaccl"
    assert run("check", str(file)).exit_code == 0
    assert run("check", str(file), cluster="mesh4-double").exit_code == 0


def test_hostfile_prints_the_file_and_warns_of_what_blocks() -> None:
    result = run("hostfile", cluster="ring5")
    assert json.loads(result.stdout)["backend"] == "jaccl-ring"
    assert "no-ipv4-gid" in result.stderr


def test_only_takes_the_part_that_can_use_rdma_in_the_order_given() -> None:
    found = json.loads(run("hostfile", "--only", "max,ultra", cluster="mixed").stdout)
    assert (found["backend"], [host["ssh"] for host in found["hosts"]]) == ("jaccl", ["max", "ultra"])


def test_order_is_the_order_of_the_ranks() -> None:
    found = json.loads(run("hostfile", "--order", "mini-b,mini-a", cluster="mesh2").stdout)
    assert [host["ssh"] for host in found["hosts"]] == ["mini-b", "mini-a"]


@pytest.mark.parametrize("words", [("--only", "nobody"), ("--backend", "mpi")])
def test_names_and_backends_that_do_not_exist_are_refused(words: tuple[str, ...]) -> None:
    assert isinstance(run("hostfile", *words, cluster="mesh2").exception, BadSetting)


def test_nothing_is_written_where_rdma_is_to_be_mended_first(tmp_path: Path) -> None:
    result = run("hostfile", "-o", str(tmp_path / "hosts.json"), cluster="broken")
    assert isinstance(result.exception, NoHostfile)
    assert list(tmp_path.iterdir()) == []


def test_check_as_json_lists_faults_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text('{"backend": "jacl", "hosts": []}')
    result = run("check", "--json", str(tmp_path / "hosts.json"))
    found = json.loads(result.stdout)
    assert (result.exit_code, found["valid"], len(found["faults"])) == (1, False, 2)


def test_check_against_other_macs_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    run("hostfile", "-o", str(file), cluster="mesh2")
    assert isinstance(run("check", str(file), cluster="ring5").exception, HostfileInvalid)
