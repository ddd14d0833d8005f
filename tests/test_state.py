"""The claim on a state folder and the record in it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.errors import StateUnreadable
from cluster.paths import Folders
from cluster.state import (
    Claim,
    ClusterState,
    ProcessRecord,
    key_digest,
    read_state,
    same_settings,
    take_or_find,
)


@pytest.fixture
def folders(cluster_home: Path) -> Folders:
    return Folders.from_environment({"CLUSTER_HOME": str(cluster_home)})


def state(config: ClusterConfig, *, pid: int | None = None, secret: str = "") -> ClusterState:
    return ClusterState(
        ProcessRecord.of(pid or os.getpid()),
        "http://127.0.0.1:8080",
        config.without_key(),
        key_digest(config.api_key, secret),
    )


def held(folders: Folders) -> Claim:
    claim = Claim.take(folders)
    assert claim is not None
    return claim


def test_only_one_can_hold_the_claim_and_it_can_be_taken_again_after_release(folders):
    first = held(folders)
    assert Claim.take(folders) is None
    first.release()
    held(folders).release()


def test_the_claim_of_a_killed_process_is_free(folders):
    code = (
        "import os, sys\nfrom cluster.paths import Folders\nfrom cluster.state import Claim\n"
        "claim = Claim.take(Folders.from_environment(os.environ))\nprint('held', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as process:
        assert process.stdout.readline() == b"held\n"
        assert Claim.take(folders) is None
        process.kill()
        process.wait()
        held(folders).release()


def test_the_record_comes_back_as_it_was_written(folders):
    claim = held(folders)
    written = state(ClusterConfig(slots=3))
    claim.write(written)
    assert read_state(folders) == written
    claim.release()


def test_the_record_and_the_secret_are_for_their_owner_only(folders):
    claim = held(folders)
    claim.write(state(ClusterConfig()))
    claim.new_secret()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folders.state.iterdir()}
    assert modes == {0o600}
    claim.release()


def test_release_removes_the_secret(folders):
    claim = held(folders)
    secret = claim.new_secret()
    assert folders.secret.read_text() == secret
    claim.release()
    assert not folders.secret.exists()


def test_the_api_key_is_not_in_the_record_but_another_one_is_noticed(folders):
    claim = held(folders)
    secret = claim.new_secret()
    config = ClusterConfig(api_key="s3cret-key")
    record = state(config, secret=secret)
    assert b"s3cret-key" not in msgspec.json.encode(record)
    assert same_settings(record, config, folders)
    assert not same_settings(record, ClusterConfig(api_key="other"), folders)
    assert not same_settings(record, ClusterConfig(), folders)
    claim.release()


def test_other_settings_are_noticed(folders):
    claim = held(folders)
    record = state(ClusterConfig(cors_origin=("http://a.b",)), secret=claim.new_secret())
    claim.write(record)
    again = read_state(folders)
    assert same_settings(again, ClusterConfig(cors_origin=("http://a.b",)), folders)
    assert not same_settings(again, ClusterConfig(slots=5), folders)
    claim.release()


def test_there_is_no_record_before_the_first_run(folders):
    assert read_state(folders) is None


def test_a_damaged_record_is_refused_with_its_path(folders):
    folders.make()
    (folders.state / "cluster.json").write_text('{"pid": ')
    with pytest.raises(StateUnreadable) as error:
        read_state(folders)
    assert f"rm {folders.state / 'cluster.json'}" in error.value.hint


def test_a_reused_pid_is_not_taken_for_the_recorded_process():
    mine = ProcessRecord.of(os.getpid())
    assert mine.process() is not None
    assert ProcessRecord(mine.pid, mine.started - 100).process() is None


def test_a_zombie_does_not_count_as_running():
    with subprocess.Popen([sys.executable, "-c", ""], stdout=-1) as process:
        record = ProcessRecord.of(process.pid)
        process.stdout.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert record.process() is None


def test_the_holder_is_found_also_when_its_record_comes_late(folders):
    claim = held(folders)
    record = state(ClusterConfig())
    writer = threading.Timer(0.2, claim.write, [record])
    writer.start()
    assert take_or_find(folders, patience_s=10) == record
    writer.join()
    claim.release()


def test_a_holder_without_a_record_is_reported(folders):
    claim = held(folders)
    with pytest.raises(StateUnreadable, match="without a record"):
        take_or_find(folders, patience_s=0)
    claim.release()


def test_the_record_of_an_ended_cluster_does_not_stand_in_the_way(folders):
    claim = held(folders)
    claim.write(msgspec.structs.replace(state(ClusterConfig()), phase="ended", reason="out of memory"))
    claim.release()
    assert not read_state(folders).runs
    again = take_or_find(folders)
    assert isinstance(again, Claim)
    again.release()
