"""The layer and the reader against GNU's Objective-C runtime and a stand-in for Metal; the layer built for macOS."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from cluster.errors import ProgramRefused
from cluster.vm import build, macho, profile
from cluster.vm.run import PROFILES, Profile, Run, run

HERE = Path(__file__).parent
GCC = ("gcc", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wno-unused", "-Wno-unused-parameter")
MAC = ("clang", "-target", "arm64-apple-macos13", "-fuse-ld=lld", "-isysroot")
LIBRARIES = ("usr/lib/libSystem", "usr/lib/libobjc", "System/Library/Frameworks/Metal.framework/Metal")
STUB = "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: /{}\nexports:\n"
STUB += "  - targets: [ arm64-macos ]\n    symbols: [ {} ]\n...\n"
GATES = {"BareMetal": "not paravirtual", "Nameless": "not paravirtual", "Lacking": "lacks a method"}
GATES |= {"Odd": "another type", "Narrow": "another type", "Enough": "already enough", "Flapping": "not as meant"}
HEADER, DIRECTORY = b"\xcf\xfa\xed\xfe", b"\xfa\xde\x0c\x02"
PATCHES = [  # what to find in the program, how far from there to write what, and why it would then stay stock
    (HEADER, 0, HEADER, ""),
    (HEADER, 4, b"\x07", "no arm64 program"),  # Intel
    (HEADER, 8, b"\x02", "no arm64 program"),  # arm64e
    (HEADER, 12, b"\x06", "no arm64 program"),  # a library
    (b"\xfa\xde\x0c\xc0", 8, b"\xff", "cannot be read"),  # more parts of the signature than there are
    (b"__PAGEZERO", 0, b"__RESTRICT", "__RESTRICT"),
    (DIRECTORY, 12, b"\0\x01\0\x02", "the hardened runtime"),
    (DIRECTORY, 12, b"\0\0\x28\x02", "restrictions, library validation"),
    (DIRECTORY, 38, b"\x0e", "part of macOS"),
]
FAMILIES = ["", "x", "1009x", "5001", "1000", "2000", "-1009", " 1009", "9" * 30]
SETTINGS = [("0", 1009, 65536, "not a virtual machine")]  # what the kernel says; family and memory; the reason
SETTINGS += [("1", family, 65536, "FAMILY is not a number") for family in FAMILIES]
SETTINGS += [("1", 1009, memory, "MEMORY is not a number") for memory in ("", "64k", "1048577", "-1")]


@pytest.fixture(autouse=True)
def without_the_blas_that_the_suite_itself_preloads(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)


def tool(*argv: str | Path) -> str:
    """Run a compiler; skip the test if it is not installed (tests/vm/debian-packages.txt)."""
    if not shutil.which(argv[0]):
        pytest.skip(f"needs {argv[0]}")
    done = subprocess.run([*argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    """A folder with layer.so, libstandin.so and `program`."""
    folder = tmp_path_factory.mktemp("bench")
    if not Path(tool("gcc", "-print-prog-name=cc1obj").strip()).is_file():
        pytest.skip("needs gobjc")
    shared, linked = ("-shared", "-fPIC", "-Wno-cast-function-type"), ("-DPROGRAM", folder / "libstandin.so")
    tool(*GCC, *shared, build.SOURCE, "-o", folder / "layer.so", "-lobjc")
    tool(*GCC, *shared, HERE / "standin.m", "-o", folder / "libstandin.so", "-lobjc")
    tool(*GCC, HERE / "standin.m", *linked, "-o", folder / "program", "-lobjc", "-lpthread")
    return folder


def go(bench: Path, what: str = "create", wanted: Profile = PROFILES["original"], *, raised: bool = True) -> Run:
    layer = bench / "layer.so" if raised else None
    return run([str(bench / "program"), what], layer, wanted, keep=True, preload="LD_PRELOAD")


@pytest.mark.parametrize("device", ["Ordinary", "Inheriting"])
@pytest.mark.parametrize("what", ["create", "all", "threads"])
def test_a_paravirtual_device_answers_the_profile_and_its_base_class_does_not(bench, monkeypatch, device, what):
    monkeypatch.setenv("STANDIN", device)
    done = go(bench, what)
    assert (done.status, done.stock, done.output) == (0, "", "10 65536 00 32768\n")
    assert "installed: Apple family 1009, threadgroup memory 65536" in done.log


@pytest.mark.parametrize(("device", "why"), GATES.items())
def test_a_device_that_is_not_as_expected_stays_stock_with_the_reason(bench, monkeypatch, device, why):
    monkeypatch.setenv("STANDIN", device)
    done = go(bench)
    assert why in done.stock and f"stays stock: {done.stock}" in done.log
    assert done.output == go(bench, raised=False).output


@pytest.mark.parametrize(("hv_vmm", "family", "memory", "why"), SETTINGS)
def test_bare_metal_and_malformed_settings_stay_stock(bench, monkeypatch, hv_vmm, family, memory, why):
    monkeypatch.setenv("HV_VMM", hv_vmm)
    done = go(bench, wanted=(family, memory))
    assert why in done.stock and done.output == "00 32768 00 32768\n"


def test_nothing_is_lowered_when_less_memory_is_asked_for(bench):
    assert go(bench, wanted=(1009, 1024)).output == "10 32768 00 32768\n"


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
    answers = ["Apple Paravirtual device", "Ordinary", 1005, 2002, 3003, 0, 32768, 12009340928]
    assert list(seen.values()) == answers


@pytest.fixture(scope="session")
def mac(tmp_path_factory):
    """Debian's clang with a stub SDK: macos.h under every name, and libraries that export what it declares."""
    root = tmp_path_factory.mktemp("sdk")
    names = re.findall(r"(\w+)\(", (HERE / "macos.h").read_text() + build.SOURCE.read_text())
    added = ("dyld_stub_binder", "_memchr", "___stack_chk_fail", "___stack_chk_guard")  # what the compiler adds
    symbols = ", ".join({*added, *(f"_{name}" for name in names)})
    headers = [f"usr/include/{name}" for name in re.findall("<(.*)>", build.SOURCE.read_text())]
    stubs = {f"{library}.tbd": STUB.format(library, symbols) for library in LIBRARIES}
    for name, text in {**stubs, **dict.fromkeys(headers, f'#include "{HERE}/macos.h"\n')}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return (*MAC, root)


def test_the_layer_builds_for_macos_without_warnings_and_interposes_two_functions(mac, tmp_path):
    tool(*mac, *build.FLAGS, "-Werror", build.SOURCE, "-o", tmp_path / "layer", *build.LIBRARIES)
    said = tool("llvm-objdump", "--macho", "--private-headers", "--section-headers", tmp_path / "layer")
    assert re.search(r"__interpose +0*20 ", said)  # two pairs of pointers
    assert "minos 13.0" in said and "LC_CODE_SIGNATURE" in said
    assert re.findall(r"LC_LOAD_DYLIB\n.*\n +name /\S*/(\w+)", said) == ["libobjc", "Metal", "libSystem"]


@pytest.fixture(scope="session")
def programs(mac, tmp_path_factory):
    """A linked program, thin and as the second slice of a universal file."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "main.c").write_text("int main(void) { return 0; }")
    tool(*mac, folder / "main.c", "-o", folder / "program")
    thin = (folder / "program").read_bytes()
    return thin, struct.pack(">12I", 0xCAFEBABE, 2, 7, 3, 0, 48, 0, 0x0100000C, 0, 48, len(thin), 0) + thin


@pytest.mark.parametrize(("mark", "distance", "patch", "why"), PATCHES)
def test_a_linked_program_is_taken_until_its_header_or_signature_says_otherwise(
    programs, tmp_path, mark, distance, patch, why
):
    for data in programs:
        at = data.index(mark) + distance
        (tmp_path / "it").write_bytes(data[:at] + patch + data[at + len(patch) :])
        said = macho.why_stock(tmp_path / "it")
        assert why in said and bool(why) == bool(said)
