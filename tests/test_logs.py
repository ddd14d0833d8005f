"""Log files: rotation, a full disk, and reading them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import FolderUnusable
from cluster.logs import LogFile, follow, last_lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


def test_the_log_of_the_run_before_is_kept(path):
    for text in (b"one\n", b"two\n", b"three\n"):
        log = LogFile(path)
        log.write(text)
        log.close()
    assert path.read_text() == "three\n"
    assert path.with_name("rank-0.log.1").read_text() == "two\n"


def test_a_log_that_grows_too_long_is_rotated(path):
    log = LogFile(path, limit_bytes=10)
    for _ in range(3):
        log.write(b"123456789\n")
    log.close()
    assert path.stat().st_size + path.with_name("rank-0.log.1").stat().st_size == 30


def test_the_last_lines_are_known_also_in_pieces(path):
    log = LogFile(path)
    log.write(b"first\nsec")
    log.write(b"ond\nthi")
    assert log.last_lines(2) == ["second", "thi"]
    log.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_keeps_the_lines_and_tells_until_there_is_room(path):
    log = LogFile(path)
    with open("/dev/full", "ab", buffering=0) as full:
        disk, log._file = log._file, full
        log.write(b"last words\n")
        assert "No space left on device" in log.error
        log._file = disk
    assert log.last_lines(5) == ["last words"]
    log.write(b"back\n")
    assert log.error == ""
    log.close()


def test_a_log_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(FolderUnusable, match="absent"):
        LogFile(tmp_path / "absent" / "rank-0.log")


def test_the_last_lines_of_a_file_and_of_none(path):
    path.write_text("a\nb\nc\n")
    assert last_lines(path, 2) == ["b", "c"]
    assert last_lines(path, 0) == []
    assert last_lines(path.with_name("absent"), 2) == []


def test_following_gives_what_comes_later_also_over_a_rotation(path):
    path.write_text("old\n")
    goes_on = True
    groups = follow(path, lambda: goes_on)
    assert next(groups) == []
    with path.open("a") as file:
        file.write("new\n")
    assert next(groups) == ["new"]
    path.rename(path.with_name("rank-0.log.1"))
    path.write_text("after\n")
    assert next(groups) == ["after"]
    goes_on = False
    path.write_text("after\nlast\n")
    assert [line for group in groups for line in group] == ["last"]


def test_a_file_that_appears_later_is_followed_from_its_start(path):
    groups = follow(path, lambda: True)
    assert next(groups) == []
    path.write_text("first\n")
    assert next(groups) == ["first"]
    groups.close()
