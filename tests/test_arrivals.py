"""What runs on hosts, here in this process or as it is sent there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.ship import arrivals
from cluster.ship.arrivals import Sums, look, receive

DATA = bytes(range(256)) * 10_000
NAME = "model-00001-of-00002.safetensors"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def send(folder: Path, data: bytes, *, wanted: bytes = DATA, offset: int = 0) -> dict[str, Any]:
    """What `receive` says to a sender of `data` that then ends."""
    job = {"folder": str(folder), "name": NAME, "size": len(wanted), "sum": sha(wanted), "offset": offset}
    path = folder.parent / "sent"
    path.write_bytes(data)
    with path.open("rb") as source:
        return receive(job, source.fileno())


def test_a_file_appears_under_its_name_only_when_it_is_whole_and_right(tmp_path: Path):
    folder = tmp_path / "m"
    said = send(folder, DATA[:1_500_000])
    assert (said["end"], said["at"]) == ("short", 1_500_000)
    assert os.listdir(folder) == [f".{NAME}.part"]
    assert send(folder, DATA[1 << 20 :], offset=1 << 20)["end"] == "done"
    assert os.listdir(folder) == [NAME]
    assert (folder / NAME).read_bytes() == DATA


def test_a_file_with_another_sum_is_thrown_away(tmp_path: Path):
    assert send(tmp_path / "m", b"x" + DATA[1:])["end"] == "damaged"
    assert os.listdir(tmp_path / "m") == []


def test_a_file_that_was_there_stays_until_the_new_one_is_whole(tmp_path: Path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / NAME).write_bytes(b"old")
    send(folder, DATA[:100])
    assert (folder / NAME).read_bytes() == b"old"


def test_less_than_the_sender_thinks_is_told(tmp_path: Path):
    assert send(tmp_path / "m", DATA, offset=1 << 20)["end"] == "moved"


def test_a_second_receiver_of_the_same_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "LOCK_S", 0.0)
    (tmp_path / "m").mkdir()
    with arrivals.locked(str(tmp_path / "m" / f".{NAME}.part"), 0):
        assert send(tmp_path / "m", DATA)["end"] == "busy"


def test_a_sender_that_falls_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "IDLE_S", 0.05)
    read, write = os.pipe()
    job = {"folder": str(tmp_path / "m"), "name": NAME, "size": 10, "sum": sha(b""), "offset": 0}
    said = receive(job, read)
    os.close(read)
    os.close(write)
    assert said["end"] == "short" and "no byte came" in said["words"]


def files(**contents: bytes) -> dict[str, tuple[int, str]]:
    return {name.replace("__", "."): (len(data), sha(data)) for name, data in contents.items()}


def test_look_tells_what_is_missing_what_differs_and_what_came_in_part(home: Path):
    place = home / ".cache/cluster/models/a/m"
    place.mkdir(parents=True)
    (place / "good").write_bytes(b"good")
    (place / "bad").write_bytes(b"BAD")
    (place / ".late.part").write_bytes(b"la")
    said = look({"name": "a/m", "files": files(good=b"good", bad=b"bad", late=b"late")})
    assert said["folder"] == str(place)
    assert said["wrong"] == ["bad", "late"]
    assert said["parts"] == {"bad": 0, "late": 2}
    assert said["free"] > 0


@pytest.mark.parametrize(
    "place",
    [
        ".lmstudio/models/a/m",
        ".cache/lm-studio/models/a/m",
        ".cache/huggingface/hub/models--a--m/snapshots/0123",
    ],
)
def test_a_complete_folder_of_another_program_is_found(home: Path, place: str):
    (home / place).mkdir(parents=True)
    (home / place / "config.json").write_bytes(b"{}")
    said = look({"name": "a/m", "files": files(config__json=b"{}")})
    assert (said["folder"], said["wrong"]) == (str(home / place), [])


def test_a_folder_of_another_program_with_other_contents_is_left_alone(home: Path):
    other = home / ".lmstudio/models/a/m"
    other.mkdir(parents=True)
    (other / "config.json").write_bytes(b"[]")
    said = look({"name": "a/m", "files": files(config__json=b"{}")})
    assert said["folder"] == str(home / ".cache/cluster/models/a/m")
    assert said["wrong"] == ["config.json"]


def test_weights_that_are_no_part_of_the_model_are_told(home: Path):
    place = home / "models/m"
    place.mkdir(parents=True)
    for name in (NAME, "model-00002-of-00002.safetensors", "model-00003-of-00003.safetensors", "notes.txt"):
        (place / name).write_bytes(b"")
    job = {"name": "m", "models": "~/models", "files": files(), "all": [NAME, "model-00002-of-00002.safetensors"]}
    assert look(job)["foreign"] == ["model-00003-of-00003.safetensors"]


def test_a_sum_is_computed_again_only_when_the_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, record = tmp_path / "file", str(tmp_path / "sums.json")
    file.write_bytes(DATA)
    assert Sums(record).of(str(file)) == sha(DATA)
    known = sha(DATA)
    monkeypatch.setattr(arrivals.hashlib, "sha256", lambda: pytest.fail("read again"))
    assert Sums(record).of(str(file)) == known
    monkeypatch.undo()
    before = file.stat()
    file.write_bytes(DATA[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert Sums(record).of(str(file)) == sha(DATA[::-1])


def test_damage_that_kept_size_and_time_is_seen_when_asked_to_read_again(tmp_path: Path):
    file, record = tmp_path / "file", str(tmp_path / "sums.json")
    file.write_bytes(DATA)
    Sums(record).of(str(file))
    before = file.stat()
    file.write_bytes(DATA[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Sums(record).of(str(file)) == sha(DATA)
    assert Sums(record).of(str(file), again=True) == sha(DATA[::-1])


def test_an_unreadable_record_is_no_record(tmp_path: Path):
    (tmp_path / "file").write_bytes(DATA)
    (tmp_path / "sums.json").write_text("{")
    assert Sums(str(tmp_path / "sums.json")).of(str(tmp_path / "file")) == sha(DATA)


def test_sums_of_files_that_are_gone_are_forgotten(tmp_path: Path):
    record = tmp_path / "sums.json"
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(DATA)
    Sums(str(record)).of(str(tmp_path / "one"))
    (tmp_path / "one").unlink()
    Sums(str(record)).of(str(tmp_path / "two"))
    assert list(json.loads(record.read_text())) == [str(tmp_path / "two")]


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.12", "3.13"])
def test_other_pythons_run_it_as_it_is_sent(home: Path, version: str):
    from cluster.ship.streams import script

    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no Python {version} here")
    job = json.dumps({"name": "m", "files": files(config__json=b"{}")})
    argv = script(Path(arrivals.__file__), [python], "look", job)
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["wrong"] == ["config.json"]


def test_it_ends_when_nobody_reads_what_it_says(tmp_path: Path):
    job = {"folder": str(tmp_path / "m"), "name": NAME, "size": 10, "sum": sha(b""), "offset": 0}
    argv = [sys.executable, arrivals.__file__, "receive", json.dumps(job)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(argv, **pipes) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=10) == 1
