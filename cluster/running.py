"""What other terminals do with a running cluster: find it, ask it, wait for it, end it, read its logs.

`cli.py` calls these; nothing here starts one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cluster.errors import BadSetting, ClusterError, HostUnreachable, NothingRuns, ServerUnanswering, StartFailed
from cluster.logs import follow, last_lines
from cluster.paths import Folders
from cluster.state import ClusterState, read_state
from cluster.supervision.launch import end_process
from cluster.supervision.sites import Sites, raise_if_stuck
from parallel import wire

STOP_S = 15  # the coordinator stops its rank within 4 s and its streams within 3 s


def find(folders: Folders) -> ClusterState:
    """The running cluster's record. Raises NothingRuns, which tells how the last one ended; StateUnreadable."""
    state = read_state(folders)
    if state is None:
        raise NothingRuns("Nothing is running.", hint="`cluster up` starts it.")
    if not state.runs:
        first_line = state.reason.partition("\n")[0]
        ended = first_line or ("it was stopped" if state.phase == "ended" else "its coordinator was killed")
        raise NothingRuns(
            f"Nothing is running. The last cluster ({state.model or 'demo model'}) ended: {ended.rstrip('.')}.",
            hint="`cluster up` starts it, `cluster logs` shows the last logs.",
        )
    return state


def ask(state: ClusterState, path: str = "/health", *, api_key: str | None = None, timeout_s: float = 5) -> Any:
    """The JSON that the cluster's API answers to GET `path`, whatever its status. Raises ServerUnanswering."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(trust_env=False, timeout=timeout_s) as client:
            return client.get(state.url + path, headers=headers).json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServerUnanswering(
            f"The API at {state.url} does not answer: {error or type(error).__name__}.",
            hint="`cluster logs` shows what it does; `cluster down` ends it.",
        ) from error


def wait_ready(process: subprocess.Popen[bytes], folders: Folders, update: Callable[[dict[str, Any]], None]) -> None:
    """Follow a detached coordinator until it is ready; `update` gets its health. Raises StartFailed.

    Interrupted, it ends the coordinator.
    """
    try:
        while (code := process.poll()) is None:
            state = read_state(folders)
            if state is not None and state.coordinator.pid == process.pid and state.runs:
                try:
                    health = ask(state)
                except ServerUnanswering:  # it listens from the first moment, and answers a little later
                    health = {"status": state.phase, "reason": state.reason}
                update(health)
                if health["status"] == "ready":
                    return
                if health["status"] == "failed":
                    raise StartFailed(health["reason"], hint="`cluster down` ends it, `cluster logs` shows more.")
            time.sleep(0.1)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    raise _why_ended(process.pid, code, folders)


def returned(state: ClusterState) -> list[str]:
    """Hosts that the running cluster had to leave out and that answer again. Raises ServerUnanswering."""
    names: list[str] = ask(state).get("returned", [])
    return names


def take_in(state: ClusterState, update: Callable[[dict[str, Any]], None]) -> None:
    """Have the coordinator start its ranks anew with the hosts that came back; returns when it is ready.

    `update` gets its health. Raises StartFailed.
    """
    os.kill(state.coordinator.pid, signal.SIGUSR1)
    left = False
    while True:
        health = ask(state)
        left = left or health["status"] != "ready"
        if left:
            update(health)
        if health["status"] == "failed":
            raise StartFailed(health["reason"], hint="`cluster down` ends it, `cluster logs` shows more.")
        if left and health["status"] == "ready":
            return
        time.sleep(0.1)


def _why_ended(pid: int, code: int, folders: Folders) -> StartFailed:
    state = read_state(folders)
    if state is not None and state.coordinator.pid == pid and state.reason:
        return StartFailed(state.reason, hint=state.hint)
    lines = "".join(f"\n  {line}" for line in last_lines(folders.coordinator_log, 12))
    return StartFailed(f"The coordinator ended with exit code {code}; its last lines:{lines}")


def end(folders: Folders) -> str | None:
    """End the running cluster, or what a crashed one left; what was done, or None when there was nothing to end.

    Raises ProcessStuck, and HostUnreachable for hosts that cannot be asked whether their ranks have ended.
    """
    state = read_state(folders)
    if state is None:
        return None
    stopped = state.runs and end_process(state.coordinator, STOP_S)
    latest = read_state(folders) or state  # a rank may have been relaunched meanwhile
    left = [str(rank.process.pid) for rank in latest.local_ranks if end_process(rank.process, grace_s=2)]
    reports: dict[str, wire.Reaped | ClusterError] = {}
    if latest.hosts and latest.launch:
        reports = Sites(tuple(latest.hosts), latest.settings.get("python")).end(latest.launch, 2.0)
        left += [f"{pid} on {host}" for host, report in reports.items() for pid in getattr(report, "ended", ())]
    done = f"Ended rank {', '.join(left)}, left by a cluster that crashed." if left else None
    if stopped:
        told = (warning for warning in latest.warnings if warning.startswith("reboot"))
        done = "\n".join([f"Stopped the cluster at {state.url} (pid {state.coordinator.pid}).", *told])
    raise_if_stuck(reports)
    _raise_if_unasked(reports, done)
    return done


def _raise_if_unasked(reports: Mapping[str, wire.Reaped | ClusterError], done: str | None) -> None:
    unasked = {host: report.message for host, report in reports.items() if isinstance(report, ClusterError)}
    if unasked:
        lines = [f"{host} could not be asked whether its ranks have ended: {why}" for host, why in unasked.items()]
        raise HostUnreachable(
            "\n".join([done, *lines] if done else lines),
            hint="They leave by themselves a minute after that host can be reached again, if they live; "
            "`cluster down` asks once more.",
        )


def log_lines(
    folders: Folders,
    *,
    count: int,
    goes_on: Callable[[], bool] | None,
    which: str | None = None,
    state: ClusterState | None = None,
) -> Iterator[str]:
    """The last `count` lines of each log, then, while `goes_on()`, what is added; each with the name of its process.

    `which` is a rank's number, a host of `state`, or a process's name. Raises BadSetting.
    """
    logs = {"coordinator": folders.coordinator_log}
    if folders.launcher_log.exists():
        logs["launcher"] = folders.launcher_log
    for path in sorted(folders.logs.glob("rank-*.log")):
        logs[path.stem.replace("-", " ")] = path
    if which is not None:
        hosts = {f"rank {rank.rank}" for rank in state.ranks if rank.host == which} if state is not None else set()
        chosen = {name: path for name, path in logs.items() if name in (which, f"rank {which}") or name in hosts}
        if not chosen:
            raise BadSetting(f"There is no log of {which}.", hint=f"There are: {', '.join(logs)}.")
        logs = chosen
    for name, path in logs.items():
        yield from (f"{name} | {line}" for line in last_lines(path, count))
    if goes_on is None:
        return
    followed = {name: follow(path, goes_on) for name, path in logs.items()}
    while followed:
        quiet = True
        for name, groups in list(followed.items()):
            if (lines := next(groups, None)) is None:
                del followed[name]
                continue
            quiet = quiet and not lines
            yield from (f"{name} | {line}" for line in lines)
        if quiet and followed:
            time.sleep(0.2)
