"""Work beside an event loop that must go on: blocking work in a thread, and work that a cancellation may not cut."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking `work` in a daemon thread: unlike the loop's own pool, nobody waits for it after a Ctrl-C."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=body, name="blocking-work", daemon=True).start()
    return await future


async def to_the_end(work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
    """Await `work` also when we are cancelled meanwhile: half a start or half a stop would leave a process behind."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
