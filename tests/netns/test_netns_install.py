"""The environment onto machines over real ssh, from the coordinator alone: they reach no package index."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from netns.machines import Machine, Network

from cluster.errors import CopyFailed, HostNotInstallable, HostUnreachable, InstallFailed, VersionsDiffer
from cluster.macs.ssh import open_shell
from cluster.ship import wheelhouse
from cluster.ship.install import facts_here, install, python_of, versions
from cluster.ship.same import Facts, check

pytestmark = pytest.mark.netns

ENVIRONMENT = ".local/share/cluster/env"
PINNED = {"mlx": "mlx/core.py", "mlx-lm": "mlx_lm/__init__.py"}


def build_wheel(folder: Path, name: str, version: str, file: str) -> str:
    """A package of one file that knows its version; the line of a lock that pins it."""
    stem = f"{name.replace('-', '_')}-{version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(file, f"__version__ = {version!r}\n" + "# padding\n" * 200_000)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of two small packages that say they are this environment's mlx and mlx-lm, and an index that has them."""
    index = tmp_path / "index"
    index.mkdir()
    lines = [build_wheel(index, name, metadata.version(name), file) for name, file in PINNED.items()]
    lines.append("nowhere==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:" + "0" * 64 + "\n")
    monkeypatch.setattr(wheelhouse, "lock_text", lambda: "# made by a test\n" + "".join(lines))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


@pytest.fixture
def cache(cluster_home: Path) -> Path:
    return cluster_home / "cache"


def ask(machine: Machine, code: str) -> str:
    with open_shell(machine.name) as shell:
        return shell.run([python_of(machine.name), "-c", code]).out.strip()


def test_hosts_get_this_environment_below_their_own_home_and_the_second_run_has_nothing_to_do(
    network: Network, pinned: Path, cache: Path
):
    machines = [network.add("studio-a"), network.add("studio-b")]
    notes: list[str] = []
    told: list[tuple[str, str, int, int]] = []
    hosts = ["studio-a", "studio-b"]
    with network.inside():
        found = install(hosts, cache=cache, note=notes.append, progress=lambda *step: told.append(step))
        for machine in machines:
            place = ask(machine, "import sys, cluster; print(sys.prefix, cluster.__file__)")
            assert [word.startswith(f"{machine.home}/{ENVIRONMENT}") for word in place.split()] == [True, True]
        for wheel in (*pinned.glob("*.whl"), *cache.rglob("*.whl")):
            wheel.unlink()  # the second run needs none
        again: list[str] = []
        install(hosts, cache=cache, note=again.append)
    here = facts_here()
    assert [(one.mlx, one.mlx_lm, one.ours) for one in found] == [(here.mlx, here.mlx_lm, here.ours)] * 2
    assert any(note.startswith("studio-a: Python 3.11") and "3 packages, needs" in note for note in notes)
    assert ("studio-b", "installing", 3, 3) in told
    folder = machines[0].home / ".local/share/cluster"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"env", os.readlink(folder / "env")}
    assert [note for note in again if "Python:" not in note] == [f"{host}: already as here" for host in hosts]


def test_what_differs_on_one_host_is_named_and_made_equal_without_making_the_environment_anew(
    network: Network, pinned: Path, cache: Path
):
    hosts = ["studio-a", "studio-b"]
    machine = [network.add(host) for host in hosts][1]
    with network.inside():
        install(hosts, cache=cache)
        before = os.readlink(machine.home / ENVIRONMENT)
        made = (machine.home / ENVIRONMENT / "ready").stat().st_mtime_ns
        older = "import cluster, mlx.core, pathlib; pathlib.Path(cluster.__file__).write_text('# older')"
        ask(machine, older)
        with pytest.raises(VersionsDiffer, match=r"cluster: .* on this machine and studio-a, .* on studio-b"):
            check(versions(hosts))
        found = install(hosts, cache=cache)
        assert found[0].ours == found[1].ours == facts_here().ours
        assert os.readlink(machine.home / ENVIRONMENT) == before
        assert (machine.home / ENVIRONMENT / "ready").stat().st_mtime_ns == made
        ask(machine, "import mlx.core, pathlib; pathlib.Path(mlx.core.__file__).write_text('__version__ = \"0.31.0\"')")
        with pytest.raises(VersionsDiffer) as raised:
            check(versions(hosts))
        lock = "from pathlib import Path; import cluster; print(Path(cluster.__file__).with_name('requirements.lock'))"
        scripts = (
            "from importlib.metadata import entry_points as e; print([p.name for p in e(group='console_scripts')])"
        )
        assert Path(ask(machine, lock)).read_text().startswith("# made by a test"), "it can install others"
        assert "'cluster'" in ask(machine, scripts)
    assert f"mlx: {facts_here().mlx} on studio-a, 0.31.0 on studio-b" in raised.value.message
    assert "cluster install" in raised.value.hint


def test_a_host_without_the_environment_is_told_so(network: Network):
    network.add("studio-a")
    with network.inside():
        facts = versions(["studio-a"])
    assert facts[1] == Facts("studio-a", None, "", "", "", "")
    with pytest.raises(VersionsDiffer, match="none on studio-a"):
        check(facts)


def test_every_host_that_lacks_a_python_is_named_and_none_is_changed(network: Network, pinned: Path, cache: Path):
    network.add("studio-a")
    for name in ("studio-b", "studio-c"):
        machine = network.add(name)
        hide = "mkdir -p /run/none; for p in /usr/bin/python3*; do mount --bind /bin/false $p; done"
        assert machine.start(["sh", "-c", hide]).wait() == 0
    with network.inside(), pytest.raises(HostNotInstallable) as raised:
        install(["studio-a", "studio-b", "studio-c"], cache=cache)
    assert "studio-b has no usable Python 3.11 (no Python)" in raised.value.message
    assert "studio-c has no usable Python 3.11" in raised.value.message
    assert "studio-a" not in raised.value.message
    assert not (network.machines["studio-a"].home / ".local").exists()


def test_a_small_disk_is_told_before_anything_is_copied(network: Network, pinned: Path, cache: Path):
    machine = network.add("studio-a")
    machine.command("df", "echo Filesystem; echo /dev/disk3s1 1000 995 5 99% /\n")
    with network.inside(), pytest.raises(HostNotInstallable, match=r"studio-a needs .* MB in its home folder"):
        install(["studio-a"], cache=cache)
    assert not (machine.home / ".local").exists()


def test_an_installation_that_broke_off_is_completed_by_the_next(network: Network, pinned: Path, cache: Path):
    machine = network.add("studio-a")
    making = threading.Event()

    def step(host: str, what: str, done: int, total: int) -> None:
        if what == "installing" and not making.is_set():
            making.set()
            threading.Thread(target=machine.kill).start()

    with network.inside():
        with pytest.raises((HostUnreachable, CopyFailed, InstallFailed), match="studio-a"):
            install(["studio-a"], cache=cache, progress=step)
        assert not (machine.home / ENVIRONMENT).exists()
        machine.boot()
        assert install(["studio-a"], cache=cache)[0].ours == facts_here().ours
    assert not list((machine.home / ".local/share/cluster").glob("wheels"))
