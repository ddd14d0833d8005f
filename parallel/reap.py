"""The ranks on one machine, found by the plan in their arguments: `python -m parallel.reap list | end LAUNCH GRACE_S`.

Prints JSON. The coordinator runs it over ssh on every host, before a launch and after one: a launch's id is in the
argument of each of its ranks, those that never joined included, and no reused pid has it.
"""

from __future__ import annotations

import sys
import time

import msgspec
import psutil

from parallel import wire

KILL_S = 5.0  # until a process that got SIGKILL should be gone; one that is not is held by the system or its GPU


def running(launch: str = "") -> list[tuple[psutil.Process, wire.RankPlan]]:
    """The ranks on this machine that this user may see, of `launch` or of any."""
    found = []
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
            if "parallel.rank" in argv and process.status() != psutil.STATUS_ZOMBIE:
                plan = msgspec.json.decode(argv[-1], type=wire.RankPlan)
                if launch in ("", plan.launch):
                    found.append((process, plan))
        except (psutil.Error, msgspec.MsgspecError):
            continue  # gone meanwhile, another user's, or no rank of this version
    return found


def end(launch: str, grace_s: float) -> wire.Reaped:
    """End every rank of `launch`: SIGTERM, SIGKILL after `grace_s` seconds."""
    processes = [process for process, _ in running(launch)]
    ended = [process.pid for process in processes]
    for send, patience_s in (("terminate", grace_s), ("kill", KILL_S)):
        for process in processes:
            try:
                getattr(process, send)()
            except psutil.NoSuchProcess:
                continue
        stop = time.monotonic() + patience_s
        while processes and time.monotonic() < stop:
            time.sleep(0.02)
            processes = [process for process, _ in running(launch)]
    stuck = [process.pid for process in processes]
    return wire.Reaped([pid for pid in ended if pid not in stuck], stuck, int(psutil.virtual_memory().available))


def main(argv: list[str]) -> int:
    """Print what was found or done; exit code 2 for other arguments."""
    result: list[wire.Running] | wire.Reaped
    if argv == ["list"]:
        result = [wire.Running(process.pid, plan.launch, plan.owner) for process, plan in running()]
    elif len(argv) == 3 and argv[0] == "end":
        result = end(argv[1], float(argv[2]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    print(msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
