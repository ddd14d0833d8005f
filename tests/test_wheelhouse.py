from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from cluster.errors import WheelsUnavailable
from cluster.ship import environment, wheelhouse
from cluster.ship.wheelhouse import fetch, lock_text, own_wheel, requirements, unpacked_bytes

LOCK = f"""\
# made by a test
both==1.0 \\
    --hash=sha256:{"0" * 64} \\
    --hash=sha256:{"1" * 64}
    # via cluster
mac-only==2.0 ; python_full_version >= '3.12' and sys_platform == 'darwin' \\
    --hash=sha256:{"2" * 64}
"""
LINUX = {"python_full_version": "3.11.2", "sys_platform": "linux"}
MAC = {"python_full_version": "3.13.5", "sys_platform": "darwin"}


def test_the_packages_of_a_host_are_those_that_its_system_and_python_want():
    assert [line.split()[0] for line in requirements(LOCK, LINUX)] == ["both==1.0"]
    assert [line.split()[0] for line in requirements(LOCK, MAC)] == ["both==1.0", "mac-only==2.0"]


def test_every_hash_of_the_lock_is_kept():
    assert requirements(LOCK, LINUX)[0].count("--hash=sha256:") == 2


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_the_projects_own_lock_has_mlx_for_macs_and_for_linux(system: str):
    markers = environment.survey()["markers"] | {"sys_platform": system}
    names = [line.partition("==")[0] for line in requirements(lock_text(), markers)]
    assert {"mlx", "mlx-lm", "numpy", "mlx-metal" if system == "darwin" else "mlx-cpu"} < set(names)
    assert len(names) == len(set(names))


def test_an_installation_without_a_lock_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(wheelhouse.cluster, "__file__", str(tmp_path / "cluster" / "__init__.py"))
    with pytest.raises(WheelsUnavailable, match=r"has no requirements\.lock") as raised:
        lock_text()
    assert "checkout" in raised.value.hint


def test_our_wheel_installs_what_runs_here(tmp_path: Path):
    wheel = own_wheel(tmp_path)
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    code = f"import sys; sys.path.insert(0, {str(target)!r}); import environment; print(environment.ours())"
    place = Path(environment.__file__).parent
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=place, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == environment.ours()
    assert (target / "bin" / "cluster").exists()
    assert (target / "cluster" / "requirements.lock").read_text() == lock_text()
    assert (target / "cluster" / "vm" / "compat.yaml").exists()


def test_the_same_files_make_the_same_wheel(tmp_path: Path):
    (tmp_path / "again").mkdir()
    assert own_wheel(tmp_path).read_bytes() == own_wheel(tmp_path / "again").read_bytes()


def test_the_wheels_own_list_has_every_file_with_its_size(tmp_path: Path):
    with zipfile.ZipFile(own_wheel(tmp_path)) as archive:
        record = next(name for name in archive.namelist() if name.endswith("RECORD"))
        rows = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        assert [row[0] for row in rows] == archive.namelist()
        assert [int(row[2]) for row in rows[:-1]] == [entry.file_size for entry in archive.infolist()[:-1]]


def index(folder: Path) -> str:
    """A package that pip can fetch from `folder`, as a pinned line."""
    wheel = folder / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small.py", "x = 1\n" * 100)
        archive.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        archive.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("small-1.0.dist-info/RECORD", "")
    return f"small==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


def get(lines: list[str], house: Path) -> None:
    stop = threading.Event()
    fetch(lines, house, python="3.13", platforms=["macosx_26_0_arm64"], told=lambda count: None, stop=stop)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_wheels_for_another_system_are_fetched_once(packages: Path, tmp_path: Path):
    house = tmp_path / "house"
    line = index(packages)
    get([line], house)
    assert (house / "requirements.txt").read_text() == line + "\n"
    for wheel in packages.iterdir():
        wheel.unlink()
    get([line], house)
    assert unpacked_bytes(list(house.glob("*.whl"))) > 600


def test_a_package_that_is_not_the_pinned_one_is_refused(packages: Path, tmp_path: Path):
    index(packages)
    with pytest.raises(WheelsUnavailable, match=r"Python 3\.13 on macosx_26_0_arm64 could not be fetched"):
        get([f"small==1.0 --hash=sha256:{'0' * 64}"], tmp_path / "house")
    assert not list((tmp_path / "house").glob("*.whl"))


def test_a_package_that_no_index_has_is_named(packages: Path, tmp_path: Path):
    with pytest.raises(WheelsUnavailable, match="nowhere==1"):
        get([f"nowhere==1.0 --hash=sha256:{'0' * 64}"], tmp_path / "house")
