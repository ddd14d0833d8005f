"""Folders by convention, and the one variable that moves them."""

from __future__ import annotations

import os
import stat

import pytest

from cluster.errors import FolderUnusable
from cluster.paths import Folders


def test_one_variable_moves_all_folders(tmp_path):
    folders = Folders.from_environment({"CLUSTER_HOME": str(tmp_path)})
    assert {folders.state.parent, folders.logs.parent, folders.cache.parent} == {tmp_path}


def test_without_it_they_follow_the_platform(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    folders = Folders.from_environment({})
    assert all(str(f).startswith("/home/someone/") for f in (folders.state, folders.logs, folders.cache))
    assert len({folders.state, folders.logs, folders.cache}) == 3


def test_state_and_logs_are_for_their_owner_only(tmp_path):
    folders = Folders.from_environment({"CLUSTER_HOME": str(tmp_path / "new")})
    folders.make()
    assert [stat.S_IMODE(os.stat(f).st_mode) for f in (folders.state, folders.logs)] == [0o700, 0o700]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    folders = Folders.from_environment({"CLUSTER_HOME": str(tmp_path / "file")})
    with pytest.raises(FolderUnusable, match=str(folders.state)):
        folders.make()
