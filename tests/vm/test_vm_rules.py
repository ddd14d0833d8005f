"""Virtual Macs without any compiler: the facts, the refusals, the map, the comparison and the command line."""

from __future__ import annotations

import ast
import json
import plistlib
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cluster import errors
from cluster.vm import commands, compat, facts, macho, profile
from cluster.vm.run import Profile, Run, compare

RECORDED = Path(__file__).parent.parent / "macs" / "vm1" / "guest"
GUEST = {
    "model": "VirtualMac2,1",
    "chip": "Apple M1 Ultra (Virtual)",
    "hv_vmm": "1",
    "macos": "26.5.2",
    "build": "25F84",
}
KNOWN = dict(
    zip(compat.KEY, ("M1 Ultra", "25G76", "26.5.2", "25F84", "llama.cpp", "b10167", "1009/65536"), strict=True)
)


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.out").read_text()


def test_a_recorded_guest_is_a_virtual_machine_and_bare_metal_is_not():
    vm = facts.virtual_machine(
        *map(recorded, ("hv_vmm", "hw_model")), "Apple Paravirtual device", recorded("cpu_brand")
    )
    assert vm and vm.host_chip == "M4 Max" and len(vm.evidence) == 3 and not vm.fast_synch_has_effect
    assert facts.virtual_machine("kern.hv_vmm_present: 0", "Mac15,14\n", "Apple M3 Ultra", "Apple M3 Ultra") is None
    assert facts.virtual_machine("", "", "") is None


@pytest.mark.parametrize("seen", [("1", "", ""), ("", "VirtualMac2,1", ""), ("0", "", "Apple Paravirtual device")])
def test_one_sign_is_enough(seen):
    assert facts.virtual_machine(*seen)


def test_a_guest_is_placed_alone_or_in_a_ring_pipeline_only():
    vm = facts.virtual_machine("1", "VirtualMac2,1")
    assert vm.why_not_placed(hosts=1, strategy="single", backend="") == ""
    assert vm.why_not_placed(hosts=3, strategy="pipeline", backend="ring") == ""
    assert "RDMA" in vm.why_not_placed(hosts=3, strategy="pipeline", backend="jaccl-ring")
    assert "tensor" in vm.why_not_placed(hosts=3, strategy="tensor", backend="ring")


def test_the_reader_is_one_file_of_standard_library_that_python_3_9_parses():
    tree = ast.parse(Path(profile.__file__).read_text(), feature_version=(3, 9))
    imports = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imports == {"ctypes", "json", "subprocess", "sys"}


def program(flags=2, entitlements=None, cpu=0x0100000C, kind=0, filetype=2, segment=b"__TEXT", platform=0) -> bytes:
    """A Mach-O executable with one segment and a signature."""
    directory = struct.pack(">4I22sB5s", 0xFADE0C02, 44, 0x20400, flags, b"", platform, b"")
    text = plistlib.dumps(entitlements or {})
    blobs = directory + struct.pack(">2I", 0xFADE7171, 8 + len(text)) + text
    signature = struct.pack(">7I", 0xFADE0CC0, 28 + len(blobs), 2, 0, 28, 5, 72) + blobs
    header = struct.pack("<8I", 0xFEEDFACF, cpu, kind, filetype, 2, 88, 0, 0)
    return header + struct.pack("<2I64s4I", 0x19, 72, segment, 0x1D, 16, 120, len(signature)) + signature


def fat(*images: bytes) -> bytes:
    at = [8 + 20 * len(images) + sum(map(len, images[:index])) for index in range(len(images))]
    table = b"".join(struct.pack(">5I", 0, 0, at[index], len(image), 0) for index, image in enumerate(images))
    return struct.pack(">2I", 0xCAFEBABE, len(images)) + table + b"".join(images)


ALLOWED = dict.fromkeys(macho.ALLOWS, True)
INTEL, NEWER = program(cpu=0x01000007), program(kind=0x80000002)
TAKEN = [(program(), "arm64"), (NEWER, "arm64e"), (fat(INTEL, NEWER, program()), "arm64")]
TAKEN += [(program(0x12000, ALLOWED), "arm64")]
REFUSED = {
    "script for /usr/bin/env python3": [b"#!/usr/bin/env python3\nprint()"],
    "script": [b"#!"],
    "no program for Apple silicon": [b"", INTEL, program(filetype=6)],
    "__RESTRICT": [program(segment=b"__RESTRICT")],
    "part of macOS or restricted": [program(platform=14), program(0x802)],
    "allow-dyld-environment-variables": [program(0x10000)],
    "disable-library-validation": [program(0x10000, {macho.ALLOWS[0]: True})],
    "library validation": [program(0x2000)],
    "cannot be read": [program(0x10000, ALLOWED).replace(b"<dict>", b"<dict"), program()[:150], fat(program())[:20]],
    "a load command of 0 bytes": [program().replace(struct.pack("<2I", 0x19, 72), bytes(8))],
}


@pytest.fixture
def guest(monkeypatch, tmp_path):
    """A guest with the file `it`, whose runs are `runs`; the commands are kept in `argv`."""
    it = SimpleNamespace(file=tmp_path / "it", runs=[], argv=[])
    monkeypatch.setattr(commands, "_guest", lambda: GUEST)
    monkeypatch.setattr(commands.build, "build", lambda cache, architecture: cache / architecture)
    monkeypatch.setattr(compat, "runtime", lambda argv: ("llama.cpp", "b1"))
    monkeypatch.setattr(commands, "run_program", lambda argv, *_, **__: it.argv.append(argv) or it.runs.pop(0))
    it.go = lambda *options: CliRunner().invoke(commands.app, ["run", *options, "--", str(it.file), "-n", "8"])
    it.file.write_bytes(program())
    it.file.chmod(0o755)
    return it


@pytest.mark.parametrize(("data", "architecture"), TAKEN)
def test_an_ordinary_program_is_taken_and_its_slice_known(tmp_path, data, architecture):
    (tmp_path / "it").write_bytes(data)
    assert macho.architecture(tmp_path / "it") == architecture


@pytest.mark.parametrize(("data", "why"), [(data, why) for why, files in REFUSED.items() for data in files])
def test_a_program_that_would_silently_stay_stock_is_refused_with_the_reason(guest, data, why):
    guest.file.write_bytes(data)
    refused = guest.go().exception
    assert isinstance(refused, errors.ProgramRefused) and why in str(refused)


def test_protected_and_set_user_id_programs_are_refused(guest):
    with pytest.raises(macho.Refusal, match="System Integrity Protection"):
        macho.architecture(Path("/usr/bin/env"))
    guest.file.chmod(0o4755)
    with pytest.raises(macho.Refusal, match="set-user-id"):
        macho.architecture(guest.file)


@pytest.mark.parametrize("numbers", [(5001, 32768), (1000, 0), (1009, -1), (1009, 1 << 21)])
def test_a_profile_out_of_range_and_metal3_are_refused(numbers):
    with pytest.raises(errors.BadSetting):
        Profile(*numbers)


STATES = [
    ({}, [], "reported"),
    ({"host_build": ""}, [], "untested"),
    ({"version": "b1"}, [], "untested"),
    ({"guest_macos": "14.6"}, ["llama-cli", "--no-mmap"], "untested"),
    ({"guest_macos": "14.6"}, ["llama-bench", "-mmp", "0"], "untested"),
    ({"runtime": "mlx", "version": ""}, [], "no gain"),
]


@pytest.mark.parametrize(("change", "argv", "state"), STATES)
def test_the_map_knows_what_was_reported(change, argv, state):
    assert compat.look_up(compat.load(compat.SHIPPED), {**KNOWN, **change}, argv)["state"] == state


@pytest.mark.parametrize(("part", "value"), [("profile", "5001/65536"), ("guest_macos", "14.6")])
def test_the_map_refuses_metal3_and_mapped_models_in_a_macos_14_guest(part, value):
    with pytest.raises(errors.CombinationRefused, match="wrong results"):
        compat.look_up(compat.load(compat.SHIPPED), {**KNOWN, part: value}, ["llama-cli"])


def test_a_recorded_combination_is_tested_from_then_on(tmp_path):
    key, file = {**KNOWN, "version": "b1"}, tmp_path / "new" / "mine.yaml"
    compat.record(file, {"state": "tested", **key, "evidence": "a"})
    compat.record(file, {"state": "tested", **key, "version": "b2", "evidence": "b"})
    assert compat.look_up(compat.load(compat.SHIPPED, file), key, [])["evidence"] == "a"
    file.write_text("- 3")
    with pytest.raises(errors.CombinationRefused, match=r"mine\.yaml"):
        compat.load(file)


UP = [{"event": "installed", "reason": ""}]
SPEED = "prompt eval time = 9 ms / 5 tokens ( 2.4 ms, {} tokens per second)\n eval time = 1 ( 7.5 tokens per second)"
WRONG = [
    (Run(0, 9, "abc", ""), Run(0, 1, "abX", "", UP), errors.WrongAnswer, "2 equal characters"),
    (Run(0, 9, "abc", ""), Run(0, 1, "ab", "", UP), errors.WrongAnswer, "2 equal characters"),
    (Run(0, 9, "abc", ""), Run(0, 1, "abc", "", []), errors.ComparisonFailed, "stayed stock"),
    (Run(0, 9, " ", ""), Run(0, 1, " ", "", UP), errors.ComparisonFailed, "no text"),
    (Run(0, 9, "a", ""), Run(139, 1, "a", "", UP), errors.ComparisonFailed, "139"),
]


def test_a_comparison_shows_both_speeds_of_the_same_text():
    runs = Run(0, 9, "abc", SPEED.format("40.5")), Run(0, 1, "abc", SPEED.format("400"), UP)
    shown = {"seconds": (9, 1), "prompt eval": (40.5, 400), "eval": (7.5, 7.5)}
    assert compare(["llama-cli"], lambda argv, raising: runs[raising]) == shown
    runs = Run(0, 9, "a", ""), Run(0, 1, "b", "", UP)
    assert compare(["other"], lambda argv, raising: runs[raising]) == {"seconds": (9, 1)}


@pytest.mark.parametrize(("stock", "raised", "error", "why"), WRONG)
def test_a_faster_wrong_answer_and_a_comparison_of_nothing_are_errors(stock, raised, error, why):
    with pytest.raises(error, match=why):
        compare(["/x/llama-cli"], lambda argv, raising: raised if raising else stock)


def test_an_untested_combination_runs_after_it_was_compared_and_recorded(guest):
    assert "Nobody has reported" in str(guest.go().exception)
    guest.file = guest.file.rename(guest.file.with_name("llama-cli"))
    guest.runs = [Run(0, 9, "abc", ""), Run(0, 1, "abc", "", UP)]
    compared = guest.go("--compare", "--record", "--host-build", "25G1")
    assert compared.exit_code == 0 and "seconds 9.00 -> 1.00\ntext the same" in compared.output
    assert guest.argv[0][1:] == ["-n", "8", "--temp", "0", "--seed", "1"]
    guest.runs = [Run(7, 1, "", "", [{"event": "refused", "reason": "because"}])]
    ran = guest.go("--host-build", "25G1")
    assert ran.exit_code == 7 and "tested" in ran.output and "stock profile: because" in ran.output
    assert "b1" in CliRunner().invoke(commands.app, ["compat"]).output


def test_the_command_line_refuses_plainly_where_there_is_no_guest():
    refused = CliRunner().invoke(commands.app, ["run", "--", "true"]).exception
    assert isinstance(refused, errors.NotAMacGuest)
    assert str(refused) == "cluster vm run works only inside a macOS guest; this is Linux."
    unreadable = CliRunner().invoke(commands.app, ["profile"]).exception
    assert isinstance(unreadable, errors.ProfileUnreadable) and "not a Mac" in str(unreadable)


def test_the_profile_of_another_host_says_what_follows_from_being_a_guest(monkeypatch):
    seen = {**GUEST, "device": "Apple Paravirtual device", "apple_family": 1005}
    monkeypatch.setattr(commands, "SSH", (sys.executable, "-c", f"print({json.dumps(seen)!r})"))
    assert json.loads(CliRunner().invoke(commands.app, ["profile", "--host", "a", "--json"]).output)["virtual_machine"]
    shown = CliRunner().invoke(commands.app, ["profile", "--host", "a"]).output
    assert "apple family             1005" in shown and facts.CONSEQUENCES[0] in shown
