"""A model's files here, and the links over which hosts pass them on; real copies are in netns/test_netns_pull.py."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
from made_macs import mesh, pair, readdressed

from cluster.cabling.topology import topology
from cluster.errors import CopyFailed, DamagedShard
from cluster.ship import pull
from cluster.ship.pull import ensure, read_model, routes


def test_a_model_is_its_files_with_their_sums_and_one_sum_for_all(tiny_model: Path, tmp_path: Path):
    model = read_model("a/tiny", tiny_model, cache=tmp_path)
    config = model.files["config.json"]
    assert (config.size, config.sum) == (
        (tiny_model / "config.json").stat().st_size,
        hashlib.sha256((tiny_model / "config.json").read_bytes()).hexdigest(),
    )
    assert "model.safetensors" in model.files
    assert model.sum == read_model("other name", tiny_model, cache=tmp_path).sum


def test_another_weight_makes_another_model(tiny_model: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny_model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    before = read_model("m", copy, cache=tmp_path).sum
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert read_model("m", copy, cache=tmp_path, again=True).sum != before


def test_a_file_of_the_hubs_cache_that_is_not_what_its_name_says_is_found(tmp_path: Path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for content, name in ((b"{}", hashlib.sha256(b"{}").hexdigest()), (b"damaged", hashlib.sha256(b"w").hexdigest())):
        (blobs / name).write_bytes(content)
    (snapshot / "config.json").symlink_to(blobs / hashlib.sha256(b"{}").hexdigest())
    read_model("m", snapshot, cache=tmp_path)
    (snapshot / "model.safetensors").symlink_to(blobs / hashlib.sha256(b"w").hexdigest())
    with pytest.raises(DamagedShard, match=r"model\.safetensors is not what the Hub has") as raised:
        read_model("m", snapshot, cache=tmp_path)
    assert str(blobs) in raised.value.hint


def test_reading_a_model_can_be_stopped(tiny_model: Path, tmp_path: Path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(CopyFailed, match="Stopped"):
        read_model("m", tiny_model, cache=tmp_path, stop=stop)


def test_this_machine_needs_no_copy(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pull, "bring", lambda *_, **__: pytest.fail("copied"))
    model = read_model("m", tiny_model, cache=tmp_path)
    assert ensure(model, {"localhost": None, "127.0.0.1": (0, 1)}) == dict.fromkeys(
        ("localhost", "127.0.0.1"), str(tiny_model)
    )


def test_hosts_pass_files_on_over_the_address_at_the_other_end_of_their_cable():
    assert routes(topology(pair().hosts)) == {("a", "b"): ("172.20.1.2", 80.0), ("b", "a"): ("172.20.1.1", 80.0)}


def test_of_several_cables_the_fastest_is_taken():
    desk = pair().plug("a", 1, "b", 1, speed=120)
    assert routes(topology(desk.hosts))["a", "b"] == ("172.20.2.2", 120.0)


def test_a_cable_whose_ends_are_in_different_subnets_is_no_link():
    desk = readdressed(pair(), "b", "en3", "172.31.9.2")
    assert routes(topology(desk.hosts)) == {}


def test_every_pair_of_a_mesh_has_its_own_link():
    assert len(routes(topology(mesh(4).hosts))) == 12
