"""The record of this user's cluster on disk: who runs, where, with which settings, and how it ended.

One coordinator at a time holds the `Claim` (a lock that the system releases when the process dies) and is the only
writer. Other terminals read the record through `running.py`. The API key is never in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from cluster.config import ClusterConfig
from cluster.errors import FolderUnusable, StateUnreadable
from cluster.paths import Folders

START_TOLERANCE_S = 1.5  # the start time of a process is derived from a boot time that clock corrections move


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process by pid and start time (seconds since the epoch), so that a reused pid is not taken for it."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        """The record of a running process. Raises psutil.NoSuchProcess."""
        return cls(pid, psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """The process, if it still runs."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) > START_TOLERANCE_S:
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.NoSuchProcess:
            return None


class RankRecord(msgspec.Struct, frozen=True):
    """One rank of the running cluster."""

    rank: int
    host: str
    process: ProcessRecord


class ClusterState(msgspec.Struct, frozen=True):
    """One coordinator's life. `phase` as in supervise.py, or "ended"; `reason` and `hint` say why it failed or ended.

    `key_digest` is keyed with the launch's secret: it tells whether two API keys are the same, and nothing else.
    `launch` is the id by which its ranks are found on other `hosts`; `warnings` tell where ending them failed.
    """

    coordinator: ProcessRecord
    url: str
    settings: dict[str, Any]
    key_digest: str
    detached: bool = False
    phase: str = "starting"
    model: str = ""
    reason: str = ""
    hint: str = ""
    ranks: list[RankRecord] = []
    launch: str = ""
    hosts: list[str] = []
    warnings: list[str] = []

    @property
    def runs(self) -> bool:
        """Whether the coordinator is alive."""
        return self.phase != "ended" and self.coordinator.process() is not None

    @property
    def local_ranks(self) -> list[RankRecord]:
        """The processes of this machine: all, or mlx.launch alone where the ranks are on other hosts."""
        return [rank for rank in self.ranks if not self.hosts or rank.rank < 0]

    @property
    def needs_key(self) -> bool:
        """Whether the API asks for a key."""
        return bool(self.key_digest)


def read_state(folders: Folders) -> ClusterState | None:
    """The last record, of a coordinator that runs or not; None when there never was one. Raises StateUnreadable."""
    path = _path(folders)
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClusterState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise StateUnreadable(
            f"The record of the running cluster, {path}, cannot be read: {error}.",
            hint=f"If no `cluster up` runs, remove it: rm {path}",
        ) from error


def key_digest(api_key: str | None, secret: str) -> str:
    """Empty without a key."""
    return hmac.new(secret.encode(), api_key.encode(), hashlib.sha256).hexdigest() if api_key else ""


def same_settings(state: ClusterState, config: ClusterConfig, folders: Folders) -> bool:
    """Whether the running cluster was started with `config`, its API key included."""
    try:
        secret = folders.secret.read_text().strip()
    except OSError:
        return False
    return state.settings == config.without_key() and hmac.compare_digest(
        state.key_digest, key_digest(config.api_key, secret)
    )


class Claim:
    """The right to run the cluster of this state folder, from `take` until `release` or the end of the process."""

    def __init__(self, folders: Folders, lock: int) -> None:
        self._folders = folders
        self._lock = lock

    @classmethod
    def take(cls, folders: Folders) -> Claim | None:
        """Claim the state folder; None when another process holds it. Raises FolderUnusable."""
        folders.make()
        try:
            lock = os.open(folders.state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unusable(folders, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return cls(folders, lock)

    def new_secret(self) -> str:
        """Write a fresh secret of the launch to its file, mode 0600, and return it. Raises FolderUnusable."""
        secret = secrets.token_hex(32)
        try:
            self._folders.secret.unlink(missing_ok=True)
            _write(self._folders.secret, secret.encode())
        except OSError as error:
            raise _unusable(self._folders, error) from error
        return secret

    def write(self, state: ClusterState) -> None:
        """Replace the record in one step. Raises FolderUnusable."""
        path = _path(self._folders)
        part = path.with_suffix(f".{os.getpid()}")
        try:
            _write(part, msgspec.json.encode(state))
            part.replace(path)
        except OSError as error:
            raise _unusable(self._folders, error) from error

    def release(self) -> None:
        """Remove the secret and let others claim the folder. The record stays, to say how it ended."""
        self._folders.secret.unlink(missing_ok=True)
        os.close(self._lock)


def take_or_find(folders: Folders, patience_s: float = 2.0) -> Claim | ClusterState:
    """Claim the folder, or the record of who holds it.

    A holder writes its record right after it claims; until then this waits, at most `patience_s` seconds. Raises
    StateUnreadable.
    """
    end = time.monotonic() + patience_s
    while True:
        if (claim := Claim.take(folders)) is not None:
            return claim
        state = read_state(folders)
        if state is not None and state.runs:
            return state
        if time.monotonic() > end:
            raise StateUnreadable(
                f"Another process holds {folders.state / 'lock'} without a record of a running cluster.",
                hint="It may be starting or ending: try again, or end the other `cluster up`.",
            )
        time.sleep(0.05)


def _path(folders: Folders) -> Path:
    return folders.state / "cluster.json"


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _unusable(folders: Folders, error: OSError) -> FolderUnusable:
    return FolderUnusable(
        f"The state folder {folders.state} cannot be written: {error.strerror or error}.",
        hint="Free some space or make it writable, or set CLUSTER_HOME to another folder.",
    )
