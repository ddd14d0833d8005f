"""One rank: `python -m parallel.rank JSON` with a wire.RankPlan. Join, load, warm up, loop until told to leave.

Only this thread touches arrays. SIGTERM keeps its default, so a stuck rank still dies of it. mlx is imported after the
control socket listens, so that the coordinator can follow start-up from its first moment.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parallel import wire
from parallel.control import Control, Disconnected

if TYPE_CHECKING:
    from parallel.engine.loop import Engine

PUBLISH_S = 0.25
PORT_TAKEN_EXIT_CODE = 4


def main(argv: list[str]) -> int:
    """Run a rank to its end; returns its exit code."""
    plan = msgspec.json.decode(argv[0], type=wire.RankPlan)
    try:
        control = Control(plan.host, plan.port, Path(plan.secret_file), plan.parent)
    except OSError as error:
        print(f"rank 0 cannot listen on {plan.host}:{plan.port}: {error}", file=sys.stderr)
        return PORT_TAKEN_EXIT_CODE
    try:
        engine = start(plan, control)
        serve(engine, control)
        return 0
    except Exception as error:
        control.fail(f"{type(error).__name__}: {error}")
        raise


def start(plan: wire.RankPlan, control: Control) -> Engine:
    """Load and warm up, reporting each phase."""
    control.phase(wire.Progress(0, "starting"))
    import mlx.core as mx

    from parallel import loading, warmup

    folder = Path(plan.model)
    loading.wire_memory(plan.wired_limit)
    last_s = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done in (0, total) or now_s - last_s > 0.1:
            last_s = now_s
            control.phase(wire.Progress(0, "loading", done, total))

    model, _ = loading.load_model(folder, report)
    control.phase(wire.Progress(0, "warming"))
    limits = warmup.measure(model, plan, loading.context_of(folder))
    engine = warmup.make_engine(model, limits)
    ready = wire.Ready(
        rank=0,
        pid=os.getpid(),
        model=plan.model,
        context=limits.context,
        slots=limits.slots,
        kv_limit_bytes=limits.kv_bytes,
        kv_tokens=limits.kv_tokens,
        weights_bytes=limits.weights_bytes,
        prefix_reuse=limits.reuse,
        device=str(mx.device_info().get("device_name", mx.default_device())),
    )
    if limits.reuse != "any":
        kept = "where they were saved" if limits.reuse == "boundary" else "not at all"
        print(f"rank 0 | this model's KV caches cannot be cut: prefixes are reused {kept}", flush=True)
    gc.collect()
    gc.freeze()  # what is alive now stays: later collections need not walk it, which takes tens of milliseconds
    control.phase(ready)
    return engine


def serve(engine: Engine, control: Control) -> None:
    """The loop: messages in, steps, messages out; returns when told to leave."""
    published_s = 0.0
    while True:
        while engine.idle or not control.inbox.empty():
            if engine.idle and control.inbox.empty():
                publish(engine, control)
            message = control.inbox.get()
            if isinstance(message, wire.Leave):
                return
            if isinstance(message, wire.Submit):
                engine.add(message)
            elif isinstance(message, wire.Abort):
                engine.abort(message)
            elif isinstance(message, Disconnected):
                engine.abort_all()
            for event in engine.events():
                control.send(event)
        for outgoing in engine.step():
            control.send(outgoing)
        if (now_s := time.monotonic()) - published_s > PUBLISH_S:
            published_s = now_s
            publish(engine, control)


def publish(engine: Engine, control: Control) -> None:
    """Hand the heartbeat thread what it may say; only this thread may ask mlx."""
    import mlx.core as mx

    memory = {"active_bytes": mx.get_active_memory(), "peak_bytes": mx.get_peak_memory()}
    control.publish(msgspec.structs.replace(engine.stats(), **memory), engine.oldest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
