from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hub_stand_in
import pytest
from hub_stand_in import Hub
from huggingface_hub import constants

import cluster.ship.downloads
from cluster.errors import (
    ClusterError,
    DamagedShard,
    DownloadFailed,
    HubUnreachable,
    MissingShards,
    NoSuchModel,
    NotAModelFolder,
    NotEnoughDisk,
    NotMlxFormat,
    RepositoryGated,
    RepositoryNotFound,
)
from cluster.ship import demo, weights
from cluster.ship.weights import resolve

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
UNWANTED = {"pytorch_model.bin", "README.md"}


def shard(payload: bytes, name: str = "w") -> bytes:
    header = json.dumps({name: {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}}).encode()
    return len(header).to_bytes(8, "little") + header + payload


def model_files() -> dict[str, bytes]:
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        SHARDS[0]: shard(bytes(200_000), "a"),
        SHARDS[1]: shard(bytes(range(250)) * 1000, "b"),
        "pytorch_model.bin": b"not wanted",
        "README.md": b"not wanted",
    }


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def quiet(label: str, done: int, total: int) -> None:
    pass


def fails(model: str | Path, kind: type[ClusterError]) -> ClusterError:
    with pytest.raises(kind) as caught:
        resolve(str(model), cache=Path("/nonexistent"), progress=quiet)
    assert type(caught.value) is kind
    assert caught.value.hint
    return caught.value


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "user"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_stand_in.serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.repositories["anna/tiny"] = model_files()
        yield hub


# ---------------------------------------------------------------- folders


def test_a_folder_with_config_and_weights_is_taken_as_it_is_and_named_after_itself(tmp_path: Path) -> None:
    folder = write(tmp_path / "my-model", model_files())
    found = resolve(str(folder) + "/", cache=tmp_path, progress=quiet)
    assert (found.name, found.folder) == ("my-model", folder)


def test_a_home_relative_path_is_expanded(home: Path, tmp_path: Path) -> None:
    folder = write(home / "m", model_files())
    assert resolve("~/m", cache=tmp_path, progress=quiet).folder == folder


def test_the_tiny_random_model_passes_the_check(tiny_model: Path, tmp_path: Path) -> None:
    assert resolve(str(tiny_model), cache=tmp_path, progress=quiet).name == "tiny-llama"


def test_without_a_model_the_demo_model_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "demo_model", lambda *, cache, progress: cache / "made")
    found = resolve(None, cache=tmp_path, progress=quiet)
    assert (found.name, found.folder) == ("SmolLM2-135M-Instruct", tmp_path / "made")


def test_a_path_that_does_not_exist_is_named_with_its_nearest_sibling(tmp_path: Path) -> None:
    write(tmp_path / "Qwen3-4B", model_files())
    error = fails(tmp_path / "Qwen3-4b-it", NoSuchModel)
    assert "Qwen3-4b-it" in error.message
    assert str(tmp_path / "Qwen3-4B") in error.hint


def test_a_folder_without_config_points_at_the_model_inside_it(tmp_path: Path) -> None:
    write(tmp_path / "outer" / "inner", model_files())
    error = fails(tmp_path / "outer", NotAModelFolder)
    assert "config.json" in error.message
    assert str(tmp_path / "outer" / "inner") in error.hint


@pytest.mark.parametrize("config", [b"{", b"[]", b'{"hidden_size": 1}', b"\xff\xfe"])
def test_a_config_that_is_no_model_config_is_refused(tmp_path: Path, config: bytes) -> None:
    write(tmp_path / "m", {**model_files(), "config.json": config})
    assert "config.json" in fails(tmp_path / "m", NotAModelFolder).message


def test_every_shard_that_the_index_names_and_the_folder_lacks_is_listed(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", model_files())
    for name in SHARDS:
        (folder / name).unlink()
    error = fails(folder, MissingShards)
    assert "2 of 2" in error.message
    assert all(name in error.message for name in SHARDS)


def test_an_index_without_a_weight_map_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m", {**model_files(), "model.safetensors.index.json": b"[]"})
    assert "weight_map" in fails(tmp_path / "m", NotAModelFolder).message


@pytest.mark.parametrize("size", [0, 7, 20, 1000])
def test_a_truncated_shard_is_found_by_its_header(tmp_path: Path, size: int) -> None:
    folder = write(tmp_path / "m", model_files())
    (folder / SHARDS[1]).write_bytes(model_files()[SHARDS[1]][:size])
    error = fails(folder, DamagedShard)
    assert SHARDS[1] in error.message
    assert f"{size} bytes" in error.message
    assert "rm '" in error.hint


def test_a_text_file_in_the_place_of_a_shard_is_damage(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", model_files())
    (folder / SHARDS[0]).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n")
    assert "no readable header" in fails(folder, DamagedShard).message


@pytest.mark.parametrize(
    ("name", "kind"), [("pytorch_model.bin", "PyTorch"), ("model.gguf", "GGUF"), ("other.txt", "no model*.safetensors")]
)
def test_other_weight_formats_are_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    write(tmp_path / "m", {"config.json": b'{"model_type": "llama"}', name: b"x"})
    assert kind in fails(tmp_path / "m", NotMlxFormat).message


def test_a_gguf_file_or_a_folder_of_them_is_refused_as_gguf(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"model-Q4.gguf": b"GGUF"})
    assert "GGUF" in fails(folder, NotMlxFormat).message
    assert "GGUF" in fails(folder / "model-Q4.gguf", NotMlxFormat).message


# ---------------------------------------------------------------- LM Studio


@pytest.mark.parametrize("root", [".lmstudio/models", ".cache/lm-studio/models"])
@pytest.mark.parametrize("asked", ["anna/tiny", "tiny"])
def test_an_lm_studio_model_is_found_by_name_without_the_hub(home: Path, tmp_path: Path, root: str, asked: str) -> None:
    folder = write(home / root / "anna" / "tiny", model_files())
    found = resolve(asked, cache=tmp_path, progress=quiet)
    assert (found.name, found.folder) == ("anna/tiny", folder)


def test_a_short_name_that_two_publishers_have_is_refused_with_both(home: Path) -> None:
    write(home / ".lmstudio/models/anna/tiny", model_files())
    write(home / ".lmstudio/models/bert/tiny", model_files())
    error = fails("tiny", NoSuchModel)
    assert "anna/tiny" in error.hint and "bert/tiny" in error.hint


# ---------------------------------------------------------------- the Hub


def test_a_repository_is_fetched_once_with_only_the_files_needed(hub: Hub, tmp_path: Path) -> None:
    found = resolve("anna/tiny", cache=tmp_path, progress=quiet)
    wanted = sorted(set(model_files()) - UNWANTED)
    assert found.name == "anna/tiny"
    assert sorted(path.name for path in found.folder.iterdir()) == wanted
    assert hub.bodies() == wanted
    resolve("anna/tiny", cache=tmp_path, progress=quiet)
    assert hub.bodies() == wanted


def test_progress_grows_to_the_total_in_bytes(hub: Hub, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    resolve("anna/tiny", cache=tmp_path, progress=lambda *report: seen.append(report))
    total = sum(
        len(content) for name, content in model_files().items() if name not in ("pytorch_model.bin", "README.md")
    )
    assert {(label, of) for label, _, of in seen} == {("Downloading anna/tiny", total)}
    assert seen[0][1] == 0 and seen[-1][1] == total
    assert any(0 < done < total for _, done, _ in seen)


def test_a_connection_cut_in_the_middle_is_resumed_from_where_it_broke(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what breaks off inside a chunk is asked for again
    hub.cut[SHARDS[1]] = 100_000
    found = resolve("anna/tiny", cache=tmp_path, progress=quiet)
    assert (found.folder / SHARDS[1]).read_bytes() == model_files()[SHARDS[1]]
    assert [a.range for a in hub.asked if a.method == "GET" and SHARDS[1] in a.path] == [None, "bytes=100000-"]


def test_a_download_that_broke_off_goes_on_with_the_files_that_are_missing(hub: Hub, tmp_path: Path) -> None:
    hub.broken.add(SHARDS[1])
    error = fails("anna/tiny", DownloadFailed)
    assert "anna/tiny" in error.message and "kept" in error.hint
    hub.broken.clear()
    before = len(hub.asked)
    resolve("anna/tiny", cache=tmp_path, progress=quiet)
    again = [a.path.rpartition("/")[2] for a in hub.asked[before:] if a.method == "GET" and "/resolve/" in a.path]
    assert SHARDS[1] in again
    assert SHARDS[0] not in again


def test_a_body_shorter_than_the_file_is_no_success(hub: Hub) -> None:
    hub.short[SHARDS[0]] = 1000
    assert "anna/tiny" in fails("anna/tiny", DownloadFailed).message


def test_a_damaged_file_in_the_cache_is_named_by_the_path_to_delete(hub: Hub, tmp_path: Path) -> None:
    folder = resolve("anna/tiny", cache=tmp_path, progress=quiet).folder
    blob = (folder / SHARDS[0]).resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    assert f"rm '{blob}'" in fails("anna/tiny", DamagedShard).hint
    blob.unlink()
    assert resolve("anna/tiny", cache=tmp_path, progress=quiet).folder == folder


def test_an_unknown_repository_is_named_with_the_nearest_one_known_here(hub: Hub, home: Path) -> None:
    write(home / ".lmstudio/models/anna/small-chat", model_files())
    error = fails("anna/small-chta", RepositoryNotFound)
    assert "anna/small-chta" in error.message
    assert "anna/small-chat?" in error.hint


def test_a_gated_repository_says_where_to_accept_and_how_to_log_in(hub: Hub) -> None:
    hub.gated.add("anna/tiny")
    error = fails("anna/tiny", RepositoryGated)
    assert "anna/tiny" in error.hint and "HF_TOKEN" in error.hint


@pytest.mark.parametrize(("name", "kind"), [("model-Q4.gguf", "GGUF"), ("pytorch_model.bin", "PyTorch")])
def test_a_repository_in_another_format_is_refused_before_the_first_byte(hub: Hub, name: str, kind: str) -> None:
    hub.repositories["anna/other"] = {"config.json": b"{}", name: b"x"}
    assert kind in fails("anna/other", NotMlxFormat).message
    assert hub.bodies() == []


def test_a_full_disk_is_noticed_before_the_first_byte(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(cluster.ship.downloads.shutil, "disk_usage", lambda path: usage)
    error = fails("anna/tiny", NotEnoughDisk)
    assert "anna/tiny" in error.message
    assert hub.bodies() == []


def test_with_the_hub_gone_a_complete_cached_model_still_starts(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve("anna/tiny", cache=tmp_path, progress=quiet).folder
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve("anna/tiny", cache=tmp_path, progress=quiet).folder == folder


def test_with_the_hub_gone_a_model_that_is_not_cached_is_unreachable(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "anna/tiny" in fails("anna/tiny", HubUnreachable).message


def test_offline_mode_asks_nothing_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in fails("anna/tiny", HubUnreachable).hint
    assert hub.asked == []


@pytest.mark.parametrize("name", ["no-slash", "a/b/c", "./a", "bad..name/x", "a/-b"])
def test_what_is_no_possible_name_is_refused_without_a_traceback(hub: Hub, name: str) -> None:
    assert name in fails(name, NoSuchModel).message


def test_the_environment_of_huggingface_hub_is_honoured(hub: Hub, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from cluster.ship.weights import resolve;"
        "print(resolve('anna/tiny', cache=pathlib.Path('.'), progress=lambda *report: None).folder)"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_secret"}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert Path(output.strip()).is_relative_to(tmp_path / "hf" / "hub")
    assert {a.token for a in hub.asked if "/anna/tiny" in a.path} == {"Bearer hf_secret"}


def test_the_names_that_mlx_lm_loads_are_among_those_fetched() -> None:
    assert {"*.json", "model*.safetensors"} <= set(weights.PATTERNS)
