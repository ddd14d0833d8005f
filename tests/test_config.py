"""Settings: where they come from, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import NAMES, ClusterConfig, load_config, parse_size
from cluster.errors import BadSetting, ConfigUnreadable, UnknownSetting


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return path

    return write


def test_without_anything_the_defaults_hold():
    assert load_config({}) == ClusterConfig()


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(file):
    config = load_config({"port": 9001}, file=file("port: 9000\nslots: 4\n"))
    assert (config.port, config.slots, config.queue) == (9001, 4, 256)


def test_the_api_key_comes_from_the_flag_then_the_environment_then_the_file(file):
    path = file("api_key: of-file\n")
    assert load_config({}, file=path).api_key == "of-file"
    assert load_config({}, file=path, environment_key="of-env").api_key == "of-env"
    assert load_config({"api_key": "of-flag"}, file=path, environment_key="of-env").api_key == "of-flag"


def test_a_key_may_be_spelled_as_its_flag_or_with_underscores(file):
    assert load_config({}, file=file("kv-memory: 8GB\nprefill_step_size: 512")).kv_memory == 8_000_000_000


def test_both_spellings_of_one_key_are_refused(file):
    with pytest.raises(BadSetting, match="stands twice"):
        load_config({}, file=file("kv-memory: 8GB\nkv_memory: 4GB"))


def test_an_unknown_key_names_the_nearest_known_one_and_the_file(file):
    path = file("slot: 4")
    with pytest.raises(UnknownSetting) as error:
        load_config({}, file=path)
    assert str(path) in error.value.message
    assert "`slots`" in error.value.hint


def test_a_key_unlike_any_other_gets_the_list_of_keys(file):
    with pytest.raises(UnknownSetting) as error:
        load_config({}, file=file("zzz: 4"))
    assert all(name.replace("_", "-") in error.value.hint for name in NAMES)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('port: "8080"', "a whole number from 1 to 65535, not '8080'"),
        ("port: true", "a whole number"),
        ("port: 70000", "65535"),
        ("slots: 0", "from 1 to"),
        ("slots: 2.5", "a whole number"),
        ("kv_memory: lots", "a size like 8GB"),
        ("kv_memory: 0", "a size above 0"),
        ("kv_memory: -5", "a size"),
        ("log_prompts: 1", "true or false"),
        ("wired_limit: on", "auto or off"),
        ("cors_origin: localhost", "origins like http"),
        ("cors_origin: [1]", "origins like http"),
        ("cors_origin: 5", "a list of origins"),
        ("host: ''", "text"),
        ("model: 7", "in quotes"),
        ("stall_timeout: soon", "seconds"),
    ],
)
def test_a_wrong_value_names_its_key_and_file(file, line, expected):
    path = file(line)
    with pytest.raises(BadSetting) as error:
        load_config({}, file=path)
    assert expected in error.value.message
    assert f"`{line.split(':')[0].replace('_', '-')}` in {path}" in error.value.message
    assert error.value.exit_code == 2


def test_a_wrong_flag_is_named_as_it_is_typed():
    with pytest.raises(BadSetting, match=r"--kv-memory must be"):
        load_config({"kv_memory": "8XB"})


def test_a_wrong_api_key_is_not_repeated(file):
    with pytest.raises(BadSetting) as error:
        load_config({}, file=file("api_key: 12345"))
    assert "12345" not in error.value.message


def test_an_unquoted_off_means_off(file):
    assert load_config({}, file=file("wired_limit: off")).wired_limit == "off"


def test_null_means_not_given(file):
    assert load_config({}, file=file("port: null\ncontext: ~")) == ClusterConfig()


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_file_is_no_settings(file, text):
    assert load_config({}, file=file(text)) == ClusterConfig()


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "a: [1", "\x00"])
def test_a_file_that_is_no_mapping_is_refused_by_name(file, text):
    path = file(text)
    with pytest.raises(ConfigUnreadable, match=str(path)):
        load_config({}, file=path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigUnreadable, match="No such file"):
        load_config({}, file=tmp_path / "absent.yaml")


def test_a_model_folder_is_remembered_by_its_full_path(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_config({"model": "here"}).model == str(tmp_path / "here")
    assert load_config({"model": "some/repository"}).model == "some/repository"


def test_the_key_is_neither_in_the_representation_nor_in_the_comparable_settings():
    config = load_config({"api_key": "s3cret"})
    assert "s3cret" not in repr(config)
    assert "s3cret" not in str(config.without_key())


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("8G", 8 * 10**9), ("1.5 GiB", 3 << 29), ("512mb", 512 * 10**6), ("100", 100), (7, 7)],
)
def test_sizes_are_decimal_unless_they_say_binary(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "8 Gigs", "-1GB", "1e9", True, None, 1.5])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="a size like"):
        parse_size(text)
