"""Virtual Macs without any compiler: the facts, the refusals, the map, the comparison and the command line."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cluster import errors
from cluster.vm import commands, compat, facts, macho
from cluster.vm.run import Run, compare

PARAVIRTUAL = "Apple Paravirtual device"
RECORDED = Path(__file__).parent.parent / "macs" / "vm1" / "guest"
REPORTED = "M1 Ultra", "25G76", "26.5.2", "25F84", "llama.cpp", "b10167", "1009/65536"


def test_a_recorded_guest_is_a_virtual_machine_and_bare_metal_is_not():
    hv_vmm, model, chip = ((RECORDED / f"{name}.out").read_text() for name in ("hv_vmm", "hw_model", "cpu_brand"))
    vm = facts.virtual_machine(hv_vmm, model, PARAVIRTUAL, chip)
    assert vm and vm.host_chip == "M4 Max" and len(vm.evidence) == 3 and not vm.fast_synch_has_effect
    for one_sign in (hv_vmm, "", ""), ("", model, ""), ("0", "", PARAVIRTUAL):
        assert facts.virtual_machine(*one_sign)
    assert facts.virtual_machine("kern.hv_vmm_present: 0", "Mac15,14\n", "Apple M3 Ultra", "Apple M3 Ultra") is None
    assert facts.virtual_machine("", "", "") is None


def test_a_guest_is_placed_alone_or_in_a_ring_pipeline_only():
    vm = facts.virtual_machine("1", "VirtualMac2,1")
    assert vm.why_not_placed(hosts=1, strategy="single", backend="") == ""
    assert vm.why_not_placed(hosts=3, strategy="pipeline", backend="ring") == ""
    assert "RDMA" in vm.why_not_placed(hosts=3, strategy="pipeline", backend="jaccl-ring")
    assert "tensor" in vm.why_not_placed(hosts=3, strategy="tensor", backend="ring")


def test_scripts_and_protected_set_user_id_and_unreadable_programs_would_stay_stock(tmp_path):
    (tmp_path / "script").write_text("#!/usr/bin/env python3\nprint()")
    (tmp_path / "raised").touch(0o4755)
    assert "script for /usr/bin/env python3" in macho.why_stock(tmp_path / "script")
    assert "set-user-id" in macho.why_stock(tmp_path / "raised")
    assert "System Integrity Protection" in macho.why_stock(Path("/usr/bin/env"))
    assert "cannot be read" in macho.why_stock(tmp_path / "missing")


STATES = [
    ({}, "", "reported"),
    ({"host_build": ""}, "", "untested"),
    ({"version": "b1"}, "", "untested"),
    ({"guest_macos": "14.6"}, "llama-cli --no-mmap", "untested"),
    ({"guest_macos": "14.6"}, "llama-bench -mmp 0", "untested"),
    ({"runtime": "mlx", "version": ""}, "", "no gain"),
    ({"guest_macos": "14.6"}, "llama-cli --mmap 1", "refused"),
    ({"profile": "5001/65536"}, "", "refused"),
]


@pytest.mark.parametrize(("change", "command", "state"), STATES)
def test_the_map_knows_what_was_reported_and_refuses_what_is_known_to_be_wrong(change, command, state):
    key = {**dict(zip(compat.KEY, REPORTED, strict=True)), **change}
    refused = pytest.raises(errors.CombinationRefused, match="wrong results")
    with refused if state == "refused" else nullcontext():
        assert compat.look_up(compat.load(compat.SHIPPED), key, command.split())["state"] == state


LOG = "prompt eval time = 9 ms / 5 tokens ( 2.4 ms, {} tokens per second)\n eval time = 1 ( 7.5 tokens per second)"
TABLE = "| llama 1B Q4_0 | 99 |   pp512 |  {} ± 0.24 |"
COMPARED = [
    ("llama-cli", ("abc", LOG.format(40.5)), ("abc", LOG.format(400)), [9, 1, 40.5, 400, 7.5, 7.5]),
    ("llama-bench", (TABLE.format(71.6), ""), (TABLE.format(515), ""), [9, 1, 71.6, 515]),
    ("other", ("a", ""), ("b", ""), [9, 1]),
]
WRONG = [
    ("abc", Run(0, 1, "abX", "", ""), errors.WrongAnswer, "2 equal characters"),
    ("abc", Run(0, 1, "ab", "", ""), errors.WrongAnswer, "2 equal characters"),
    ("abc", Run(0, 1, "abc", "", "it had to"), errors.ComparisonFailed, "stayed stock"),
    (" ", Run(0, 1, " ", "", ""), errors.ComparisonFailed, "no text"),
    ("a", Run(139, 1, "a", "", ""), errors.ComparisonFailed, "139"),
]


@pytest.mark.parametrize(("name", "stock", "raised", "figures"), COMPARED)
def test_a_comparison_shows_both_speeds(name, stock, raised, figures):
    shown = compare([name], lambda argv, raising: Run(0, 1, *raised, "") if raising else Run(0, 9, *stock, "unasked"))
    assert [figure for pair in shown.values() for figure in pair] == figures


@pytest.mark.parametrize(("text", "raised", "error", "why"), WRONG)
def test_a_faster_wrong_answer_and_a_comparison_of_nothing_are_errors(text, raised, error, why):
    with pytest.raises(error, match=why):
        compare(["/x/llama-cli"], lambda argv, raising: raised if raising else Run(0, 9, text, "", "unasked"))


@pytest.fixture
def guest(monkeypatch, tmp_path):
    """A guest with llama-cli, whose runs are `runs`; the commands are kept in `argv`."""
    it = SimpleNamespace(file=tmp_path / "llama-cli", runs=[], argv=[])
    monkeypatch.setenv("CLUSTER_HOME", str(tmp_path))
    monkeypatch.setattr(commands, "_guest", lambda: dict(host_chip="M9", guest_macos="26.5.2", guest_build="25F84"))
    monkeypatch.setattr(commands.build, "build", lambda cache: cache)
    monkeypatch.setattr(compat, "runtime", lambda argv: ("llama.cpp", "b1"))
    monkeypatch.setattr(commands, "run", lambda argv, *_, **__: it.argv.append(argv) or it.runs.pop(0))
    it.go = lambda *options: CliRunner().invoke(commands.app, ["run", *options, "--", str(it.file), "-n", "8"])
    it.file.write_bytes(macho.PROGRAM + bytes(16))
    it.file.chmod(0o755)
    return it


def test_an_untested_combination_runs_after_it_was_compared_and_recorded(guest):
    assert "Nobody has reported" in str(guest.go().exception)
    guest.runs = [Run(0, 9, "abc", "", "never asked"), Run(0, 1, "abc", "", "")]
    compared = guest.go("--compare", "--record", "--host-build", "25G1")
    assert compared.exit_code == 0 and "seconds 9.00 -> 1.00\ntext the same" in compared.output
    assert guest.argv[0][1:] == ["-n", "8", "--temp", "0", "--seed", "1"]
    guest.runs = [Run(7, 1, "", "", "because")]
    ran = guest.go("--host-build", "25G1")
    assert ran.exit_code == 7 and "tested" in ran.output and "stock profile: because" in ran.output
    assert "host chip: M9" in CliRunner().invoke(commands.app, ["compat"]).output
    commands._recorded().write_text("- 3")
    assert "vm-compat.yaml is no list" in str(guest.go().exception)


def test_a_script_metal3_and_a_record_of_nothing_are_refused_before_anything_runs(guest):
    assert "Metal3 (5001)" in str(guest.go("--family", "5001", "--untested").exception)
    assert guest.go("--record").exit_code == 2
    guest.file.write_text("#!/bin/sh")
    assert "is a script for /bin/sh" in str(guest.go("--untested").exception)
    assert guest.argv == []


def test_the_command_line_refuses_plainly_where_there_is_no_guest():
    refused = CliRunner().invoke(commands.app, ["run", "--", "true"]).exception
    assert repr(refused) == "NotAMacGuest('cluster vm run works only inside a macOS guest; this is Linux.')"
    unreadable = CliRunner().invoke(commands.app, ["profile"]).exception
    assert isinstance(unreadable, errors.ProfileUnreadable) and "not a Mac" in str(unreadable)


def test_the_profile_of_another_host_says_what_follows_from_being_a_guest(monkeypatch):
    seen = {"hv_vmm": "1", "model": "VirtualMac2,1", "chip": "Apple M4 Max (Virtual)", "apple_family": 1005}
    monkeypatch.setattr(commands, "SSH", (sys.executable, "-c", f"print({json.dumps(seen)!r})"))
    assert json.loads(CliRunner().invoke(commands.app, ["profile", "--host", "a", "--json"]).output)["virtual_machine"]
    shown = CliRunner().invoke(commands.app, ["profile", "--host", "a"]).output
    assert "apple family             1005" in shown and facts.VirtualMachine.consequences[0] in shown
