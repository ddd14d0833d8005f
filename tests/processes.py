"""Whether a process is gone: a signal takes a moment to end one, and nobody may be there to reap it."""

from __future__ import annotations

import time

import psutil


def ends(pid: int, within_s: float = 10.0) -> bool:
    """Whether process `pid` has ended `within_s` seconds from now; one that nobody reaped has."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False
