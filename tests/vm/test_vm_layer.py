"""The layer and the reader against GNU's Objective-C runtime and a stand-in for Metal; the layer built for macOS."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster.errors import ProgramRefused
from cluster.vm import build, macho, profile
from cluster.vm.run import PROFILES, Profile, Run, run

HERE = Path(__file__).parent
GCC = ("gcc", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wno-unused", "-Wno-unused-parameter")
RAISED, STOCK = "10 65536 00 32768\n", "00 32768 00 32768\n"  # families 1009 and 1010 and memory: the device, its base
OTHERS = {"BareMetal": "not paravirtual", "Nameless": "not paravirtual", "Lacking": "lacks a method"}
OTHERS |= {"Odd": "another type", "Narrow": "another type", "Enough": "already enough", "Flapping": "not as meant"}
FAMILIES, MEMORIES = (
    ["", "x", "1009x", "5001", "1000", "2000", "-1009", " 1009", "9" * 30],
    ["", "64k", "1048577", "-1"],
)
MALFORMED = [(family, 65536, "CLUSTER_VM_FAMILY") for family in FAMILIES]
MALFORMED += [(1009, memory, "CLUSTER_VM_THREADGROUP_MEMORY") for memory in MEMORIES]


def tool(*argv: str | Path) -> str:
    """Run a compiler; skip the test if it is not installed (tests/vm/debian-packages.txt)."""
    if not shutil.which(argv[0]):
        pytest.skip(f"needs {argv[0]}")
    done = subprocess.run([*argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with layer.so, libstandin.so and `program`."""
    folder = tmp_path_factory.mktemp("bench")
    if not Path(tool("gcc", "-print-prog-name=cc1obj").strip()).is_file():
        pytest.skip("needs gobjc")
    for source, made, options in (
        (build.SOURCE, "layer.so", ("-shared", "-fPIC", "-Wno-cast-function-type")),
        (HERE / "standin.m", "libstandin.so", ("-shared", "-fPIC")),
        (HERE / "standin.m", "program", ("-DPROGRAM", folder / "libstandin.so", "-lpthread")),
    ):
        tool(*GCC, source, "-o", folder / made, *options, "-lobjc")
    return folder


def go(bench: Path, what: str = "create", wanted: Profile = PROFILES["original"]) -> Run:
    return run([str(bench / "program"), what], bench / "layer.so", wanted, keep=True, preload="LD_PRELOAD")


@pytest.mark.parametrize("device", ["Ordinary", "Inheriting"])
@pytest.mark.parametrize("what", ["create", "all", "threads"])
def test_a_paravirtual_device_answers_the_profile_and_its_base_class_does_not(bench, monkeypatch, device, what):
    monkeypatch.setenv("STANDIN", device)
    done = go(bench, what)
    assert (done.status, done.stock, done.output) == (0, "", RAISED)
    assert [event["event"] for event in done.events] == ["armed", "installed"]
    assert "Apple family 1009, threadgroup memory 65536" in done.log


@pytest.mark.parametrize("device", OTHERS)
def test_a_device_that_is_not_as_expected_stays_stock_with_the_reason(bench, monkeypatch, device):
    monkeypatch.setenv("STANDIN", device)
    done = go(bench)
    assert OTHERS[device] in done.stock and done.stock in done.log
    assert done.output == run([str(bench / "program")], None, PROFILES["llama"], keep=True).output


def test_bare_metal_stays_stock(bench, monkeypatch):
    monkeypatch.setenv("HV_VMM", "0")
    done = go(bench)
    assert (done.stock, done.output) == ("this is not a virtual machine", STOCK)


@pytest.mark.parametrize(("family", "memory", "variable"), MALFORMED)
def test_malformed_settings_stay_stock(bench, monkeypatch, family, memory, variable):
    monkeypatch.setattr(Profile, "__post_init__", lambda self: None)
    done = go(bench, wanted=Profile(family, memory))
    assert variable in done.stock and done.output == STOCK


def test_nothing_is_lowered_when_less_memory_is_asked_for(bench):
    assert go(bench, wanted=Profile(1009, 1024)).output == "10 32768 00 32768\n"


def test_children_inherit_neither_the_layer_nor_its_settings(bench):
    done = go(bench, "child")
    assert done.stock == "" and "PATH=" in done.output
    assert "LD_PRELOAD" not in done.output and "CLUSTER_VM" not in done.output


def test_a_program_that_asks_for_no_device_or_ignores_the_layer_is_said_to_be_stock(bench, monkeypatch):
    done = go(bench, "idle")
    assert done.status == 3 and "never asked for a Metal device" in done.stock
    assert "dyld ignored" in run(["true"], bench / "layer.so", PROFILES["llama"], preload="READ_BY_NO_LOADER").stock
    monkeypatch.setenv("LD_PRELOAD", "")
    with pytest.raises(ProgramRefused, match="already set"):
        go(bench)


def test_the_reader_reports_the_stock_profile_through_the_same_runtime(bench):
    seen = profile.read(ctypes.CDLL("libobjc.so.4"), ctypes.CDLL(str(bench / "libstandin.so")))
    assert (seen.pop("device"), seen.pop("class")) == ("Apple Paravirtual device", "Ordinary")
    assert seen.pop("unified_memory") is True
    assert list(seen.values()) == [1005, 2002, 3003, 0, 32768, 12009340928]


@pytest.fixture(scope="session")
def mac(tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """Debian's clang with a stub SDK: macos.h under every name, and libraries that export what it declares."""
    root = tmp_path_factory.mktemp("sdk")
    names = re.findall(r"(\w+)\(", (HERE / "macos.h").read_text())
    hidden = ("_memchr", "___stack_chk_fail", "___stack_chk_guard", "dyld_stub_binder")  # what the compiler adds
    exports = {
        "usr/lib/libSystem": ", ".join([*(f"_{name}" for name in names), *hidden]),
        "usr/lib/libobjc": "_objc_retain",
    }
    exports["System/Library/Frameworks/Metal.framework/Metal"] = "_MTLCreateSystemDefaultDevice, _MTLCopyAllDevices"
    for header in ("fcntl", "pthread", "stdio", "stdlib", "string", "unistd", "sys/sysctl", "objc/runtime"):
        (root / f"usr/include/{header}.h").parent.mkdir(parents=True, exist_ok=True)
        (root / f"usr/include/{header}.h").write_text(f'#include "{HERE}/macos.h"\n')
    for library, symbols in exports.items():
        (root / library).parent.mkdir(parents=True, exist_ok=True)
        text = f"--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: /{library}\nexports:\n"
        (root / f"{library}.tbd").write_text(f"{text}  - targets: [ arm64-macos ]\n    symbols: [ {symbols} ]\n...\n")
    return ("clang", "-target", "arm64-apple-macos13", "-arch", "arm64", "-isysroot", root, "-fuse-ld=lld")


def test_the_layer_builds_for_macos_without_warnings_and_interposes_two_functions(mac, tmp_path):
    tool(*mac, *build.FLAGS, "-Werror", build.SOURCE, "-o", tmp_path / "layer", *build.LIBRARIES)
    said = tool("llvm-objdump", "--macho", "--private-headers", "--section-headers", tmp_path / "layer")
    assert re.search(r"__interpose +0*20 ", said)  # two pairs of pointers
    assert "minos 13.0" in said and "LC_CODE_SIGNATURE" in said
    assert re.findall(r"LC_LOAD_DYLIB\n.*\n +name /\S*/(\w+)", said) == ["libobjc", "Metal", "libSystem"]


def test_a_linked_program_is_read_and_refused_once_its_signature_says_hardened(mac, tmp_path):
    program = tmp_path / "program"
    (tmp_path / "main.c").write_text("int main(void) { return 0; }")
    tool(*mac, tmp_path / "main.c", "-o", program)
    assert macho.architecture(program) == "arm64"
    linked = program.read_bytes()
    at = linked.index(b"\xfa\xde\x0c\x02") + 12
    program.write_bytes(linked[:at] + (0x10002).to_bytes(4, "big") + linked[at + 4 :])
    with pytest.raises(macho.Refusal, match="hardened runtime"):
        macho.architecture(program)
