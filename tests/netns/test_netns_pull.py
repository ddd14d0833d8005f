"""A model's files onto machines over real ssh: what each needs, from whom, and what happens when something breaks."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import psutil
import pytest
from netns.machines import Machine, Network
from sharded_model import LAYERS, build_sharded_model, shard

from cluster.errors import CopyFailed, FolderOccupied, HostUnreachable, NotEnoughDisk
from cluster.ship.pull import Model, ensure, read_model

pytestmark = pytest.mark.netns

NAME = "publisher/sharded"
PLACE = f".cache/cluster/models/{NAME}"
TRACE = 'echo "$(hostname) $*" >> {log}\nexec /usr/bin/dd "$@"\n'
BROKEN = 'case "$*" in *{name}*) /usr/bin/dd "$@" count=2; exec sleep 600;; esac\nexec /usr/bin/dd "$@"\n'
HELD = 'case "$*" in *{name}*) touch {begun}; until [ -e {go} ]; do sleep 0.05; done;; esac\nexec /usr/bin/dd "$@"\n'


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sharded_model(tmp_path_factory.mktemp("sharded") / "model")


@pytest.fixture
def model(original: Path, tmp_path: Path, cluster_home: Path) -> Model:
    """The model here; the machines, on the same disk, must not see it."""
    folder = Path(shutil.copytree(original, tmp_path / "here" / "sharded"))
    return read_model(NAME, folder, cache=cluster_home / "cache")


def add(network: Network, model: Model, *names: str) -> list[Machine]:
    machines = [network.add(name) for name in names]
    for machine in machines:
        mount(machine, model.folder.parent)
        program(machine.bin / "dd", TRACE, network)
    program(network.bin / "dd", TRACE, network)
    return machines


def mount(machine: Machine, folder: Path, *options: str) -> None:
    """An empty disk in memory over a folder of the machine."""
    assert machine.start(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]).wait() == 0


def program(path: Path, text: str, network: Network, **names: object) -> None:
    path.write_text("#!/bin/sh\n" + text.format(log=network.folder / "copies", **names))
    path.chmod(0o755)


def copies(network: Network) -> list[tuple[str, str, int]]:
    """(machine that read, file, MiB skipped) of every stream, in order."""
    log = network.folder / "copies"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(line[0], Path(line[1]).name, int(line[3].removeprefix("skip="))) for line in lines]


def weights(machine: Machine) -> list[str]:
    return sorted(path.name for path in (machine.home / PLACE).glob("model*.safetensors"))


def leftovers(machine: Machine) -> list[str]:
    return [path.name for path in (machine.home / PLACE).iterdir() if path.name.startswith(".")]


def same(machine: Machine, model: Model, names: list[str]) -> bool:
    return all((machine.home / PLACE / name).read_bytes() == (model.folder / name).read_bytes() for name in names)


def test_a_pipeline_host_gets_the_files_of_its_layers_and_can_load_them(network: Network, model: Model):
    from parallel.loading import load_stage

    first, last = add(network, model, "studio-a", "studio-b")
    with network.inside():
        folders = ensure(model, {"studio-a": (0, 2), "studio-b": (2, 4)})
    assert folders == {name: str(network.folder / name / PLACE) for name in ("studio-a", "studio-b")}
    assert weights(first) == [shard(0), shard(1)]
    assert weights(last) == [shard(2), shard(3)]
    assert same(first, model, [shard(0), shard(1), "config.json", "tokenizer.json"])
    assert leftovers(first) == leftovers(last) == []
    assert load_stage(Path(folders["studio-a"]), 0, 2)[0].first
    assert load_stage(Path(folders["studio-b"]), 2, 4)[0].last


def test_a_whole_model_leaves_here_once_and_is_passed_on_between_the_hosts(network: Network, model: Model):
    machines = add(network, model, "studio-a", "studio-b", "studio-c")
    with network.inside():
        ensure(model, dict.fromkeys(network.machines))
    assert all(same(machine, model, list(model.files)) for machine in machines)
    here = os.uname().nodename
    assert sorted(name for host, name, _ in copies(network) if host == here) == [shard(i) for i in range(LAYERS)]
    assert len(copies(network)) == 3 * LAYERS


def test_hosts_that_cannot_log_into_each_other_are_served_from_here_and_it_is_said(network: Network, model: Model):
    machines = add(network, model, "studio-a", "studio-b")
    for machine in machines:
        machine.command("ssh", "echo 'Permission denied (publickey).' >&2; exit 255\n")
    notes: list[str] = []
    with network.inside():
        ensure(model, dict.fromkeys(network.machines), note=notes.append)
    assert all(same(machine, model, list(model.files)) for machine in machines)
    assert "studio-a does not get into studio-b by ssh; what it could pass on comes from here" in notes


def test_the_second_run_copies_nothing_and_reads_no_weights(network: Network, model: Model):
    (machine,) = add(network, model, "studio-a")
    with network.inside():
        ensure(model, {"studio-a": None})
        before = copies(network)
        told: list[tuple[str, int, int]] = []
        ensure(model, {"studio-a": None}, progress=lambda host, what, done, total: told.append((what, done, total)))
    assert copies(network) == before
    assert {what for what, _, _ in told} <= {"checking"}
    assert (machine.home / ".cache/cluster/sums.json").exists()


def test_a_folder_of_another_program_that_has_the_model_is_taken_as_it_is(network: Network, model: Model):
    (machine,) = add(network, model, "studio-a")
    there = machine.home / ".lmstudio/models" / NAME
    shutil.copytree(model.folder, there)
    with network.inside():
        assert ensure(model, {"studio-a": None}) == {"studio-a": str(there)}
    assert copies(network) == []


def test_hosts_may_keep_models_in_different_folders(network: Network, model: Model):
    add(network, model, "studio-a", "studio-b")
    with network.inside():
        folders = ensure(model, dict.fromkeys(network.machines), models={"studio-b": "~/big disk/models"})
    assert folders["studio-a"] == str(network.folder / "studio-a" / PLACE)
    assert folders["studio-b"] == str(network.folder / "studio-b/big disk/models" / NAME)
    assert (Path(folders["studio-b"]) / shard(0)).exists()


def test_a_corrupted_weight_file_is_found_and_that_file_alone_is_copied_again(network: Network, model: Model):
    (machine,) = add(network, model, "studio-a")
    with network.inside():
        ensure(model, {"studio-a": None})
        done = len(copies(network))
        file = machine.home / PLACE / shard(1)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        ensure(model, {"studio-a": None})
    assert [name for _, name, _ in copies(network)[done:]] == [shard(1)]
    assert same(machine, model, [shard(1)])


def test_damage_that_left_size_and_time_as_they_were_is_found_when_asked_to_read_all_again(
    network: Network, model: Model
):
    (machine,) = add(network, model, "studio-a")
    file = machine.home / PLACE / shard(1)
    with network.inside():
        ensure(model, {"studio-a": None})
        before = file.stat()
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        ensure(model, {"studio-a": None})
        assert not same(machine, model, [shard(1)])
        ensure(model, {"studio-a": None}, again=True)
    assert same(machine, model, [shard(1)])


def test_missing_disk_space_is_said_for_all_hosts_before_the_first_byte(network: Network, model: Model):
    machines = add(network, model, "studio-a", "studio-b", "studio-c")
    for machine in machines[:2]:
        (machine.home / "small").mkdir()
        mount(machine, machine.home / "small", "-o", "size=6m")
    small = dict.fromkeys(("studio-a", "studio-b"), "~/small")
    with network.inside(), pytest.raises(NotEnoughDisk) as raised:
        ensure(model, dict.fromkeys(network.machines), models=small)
    assert "studio-a needs 0.02 GB more in" in raised.value.message
    assert "studio-b needs" in raised.value.message and "studio-c" not in raised.value.message
    assert copies(network) == []
    assert not (machines[2].home / PLACE).exists()


def test_a_disk_that_fills_up_meanwhile_is_told_by_host_and_the_rest_comes_later(network: Network, model: Model):
    (machine,) = add(network, model, "studio-a")
    disk, begun, go = machine.home / "disk", network.folder / "begun", network.folder / "go"
    disk.mkdir()
    mount(machine, disk, "-o", "size=40m")
    program(network.bin / "dd", HELD, network, name=shard(2), begun=begun, go=go)
    with network.inside():

        def fill() -> None:
            while not begun.exists():
                threading.Event().wait(0.02)
            machine.start(["dd", "if=/dev/zero", f"of={disk}/other", "bs=1M"]).wait()
            go.touch()

        other = threading.Thread(target=fill)
        other.start()
        with pytest.raises(NotEnoughDisk, match="studio-a: the disk became full while publisher/sharded was copied"):
            ensure(model, {"studio-a": None}, models={"studio-a": str(disk)})
        other.join()
        assert machine.start(["rm", f"{disk}/other"]).wait() == 0
        folders = ensure(model, {"studio-a": None}, models={"studio-a": str(disk)}, again=True)
    assert folders == {"studio-a": str(disk / NAME)}


def test_a_copy_that_broke_off_goes_on_where_it_was(network: Network, model: Model):
    (machine,) = add(network, model, "studio-a")
    program(network.bin / "dd", BROKEN, network, name=shard(1))
    part = machine.home / PLACE / f".{shard(1)}.part"
    with network.inside():

        def cut() -> None:
            while not (part.exists() and part.stat().st_size == 2 << 20):
                threading.Event().wait(0.02)
            machine.kill()

        other = threading.Thread(target=cut)
        other.start()
        with pytest.raises((HostUnreachable, CopyFailed), match="studio-a"):
            ensure(model, {"studio-a": None})
        other.join()
        assert shard(1) not in weights(machine)
        machine.boot()
        mount(machine, model.folder.parent)
        program(network.bin / "dd", TRACE, network)
        ensure(model, {"studio-a": None})
    assert next(skip for _, name, skip in copies(network) if name == shard(1)) == 2
    assert same(machine, model, list(model.files))
    assert leftovers(machine) == []


def test_a_host_that_dies_while_passing_on_is_replaced_and_the_part_that_came_counts(network: Network, model: Model):
    first, second = add(network, model, "studio-a", "studio-b")
    with network.inside():
        ensure(model, {"studio-a": None})
        program(first.bin / "dd", BROKEN, network, name=shard(1))
        part = second.home / PLACE / f".{shard(1)}.part"
        notes: list[str] = []

        def cut() -> None:
            while not (part.exists() and part.stat().st_size == 2 << 20):
                threading.Event().wait(0.02)
            for process in psutil.Process(first.pid).children(recursive=True):
                if process.name() == "sleep":
                    process.kill()  # and with it what was reading there

        other = threading.Thread(target=cut)
        other.start()
        ensure(model, dict.fromkeys(network.machines), note=notes.append)
        other.join()
    assert any(f"studio-b: {shard(1)} from studio-a: the sender ended" in note for note in notes)
    assert (os.uname().nodename, shard(1), 2) in copies(network)
    assert same(second, model, list(model.files))


def test_weights_of_another_model_in_the_folder_are_not_loaded_along(network: Network, model: Model):
    (machine,) = add(network, model, "studio-a")
    (machine.home / PLACE).mkdir(parents=True)
    (machine.home / PLACE / "model-00009-of-00009.safetensors").write_bytes(b"other")
    with network.inside(), pytest.raises(FolderOccupied, match="model-00009-of-00009"):
        ensure(model, {"studio-a": None})
    assert copies(network) == []


def test_stopping_ends_everything_here_and_there(network: Network, model: Model):
    (machine,) = add(network, model, "studio-a")
    program(network.bin / "dd", BROKEN, network, name=shard(1))
    part, stop = machine.home / PLACE / f".{shard(1)}.part", threading.Event()
    with network.inside():

        def end() -> None:
            while not (part.exists() and part.stat().st_size == 2 << 20):
                threading.Event().wait(0.02)
            stop.set()

        other = threading.Thread(target=end)
        other.start()
        with pytest.raises(CopyFailed, match="studio-a: stopped"):
            ensure(model, {"studio-a": None}, stop=stop)
        other.join()
        for _ in range(200):
            if "python3" not in machine.processes():
                break
            threading.Event().wait(0.05)
    assert "python3" not in machine.processes()
