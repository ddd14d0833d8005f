"""One rank: `python -m parallel.rank JSON` with a wire.RankPlan. Join, connect, load, warm up, loop, leave when told.

Only this thread touches arrays. SIGTERM keeps its default, so a stuck rank still dies of it. mlx is imported after the
control socket is up, so that the coordinator can follow start-up from its first moment.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from parallel import wire
from parallel.control import Control, Disconnected, plan_digest
from parallel.follower import Follower, JoinRefused
from parallel.output import label_output

if TYPE_CHECKING:
    from parallel.engine.executor import Executor
    from parallel.engine.loop import Engine

PUBLISH_S = 0.25
PORT_TAKEN_EXIT_CODE = 4
REFUSED_EXIT_CODE = 5
STAGGER_S = 0.1  # between ranks that join the group: simultaneous inits of jaccl hang now and then
BEGUN_AHEAD = 2  # steps that a follower has begun at once: it builds one while the device computes the other


class StepRaised(Exception):
    """A step raised on one of several ranks; the message is what it raised."""


def main(argv: list[str]) -> int:
    """Run a rank to its end; returns its exit code."""
    plan = msgspec.json.decode(argv[0], type=wire.RankPlan)
    stay_awake()
    if plan.size > 1 or not plan.parent:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # an ssh session that ends is not a coordinator that ends
    if plan.size == 1:
        return lead(plan, plan_digest(argv[0]))
    rank = int(os.environ["MLX_RANK"])
    label_output(rank)
    return follow(plan, rank, plan_digest(argv[0])) if rank else lead(plan, plan_digest(argv[0]))


def stay_awake() -> None:
    """Keep a Mac from sleeping as long as this process lives: over Thunderbolt nothing could wake it."""
    if sys.platform == "darwin":
        subprocess.Popen(["caffeinate", "-dims", "-w", str(os.getpid())], stdin=subprocess.DEVNULL)


def watch_session(star: Control | Follower) -> None:
    """Where SIGHUP is ignored, report it: mlx.launch ends all ranks when one of its sessions ends, and does not say
    whose it was. Call from the main thread, which may be stuck in native code when the signal comes."""
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno())
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    signal.siginterrupt(signal.SIGHUP, False)  # no system call of a library's ends early

    def wait() -> None:
        with reading, writing:  # for as long as signals are written to it
            while True:
                if signal.SIGHUP in reading.recv(64):
                    star.hung_up()

    threading.Thread(target=wait, name="rank-session", daemon=True).start()


def lead(plan: wire.RankPlan, digest: str) -> int:
    """Rank 0: decides all steps and talks to the coordinator."""
    secret_file = Path(plan.of(0).secret_file)
    try:
        control = Control(plan.host, plan.port, secret_file, plan.parent, size=plan.size, digest=digest)
    except OSError as error:
        print(f"rank 0 cannot listen on {plan.host}:{plan.port}: {error}", file=sys.stderr)
        return PORT_TAKEN_EXIT_CODE
    watch_session(control)
    try:
        engine, executor = _start_engine(plan, control)
        serve(engine, executor, control)
        control.dismiss()
        return 0
    except Exception as error:
        control.fail(_in_words(error))
        raise


def follow(plan: wire.RankPlan, rank: int, digest: str) -> int:
    """Any other rank: executes the steps that rank 0 sends."""
    try:
        star = Follower(plan, rank, digest)
    except JoinRefused as error:
        print(error, file=sys.stderr)
        return REFUSED_EXIT_CODE
    watch_session(star)
    try:
        _, executor = _prepare(plan, rank, star)
        obey(executor, star)
        return 0
    except Exception as error:
        star.fail(_in_words(error))
        raise


def _prepare(plan: wire.RankPlan, rank: int, star: Control | Follower) -> tuple[list[wire.Fact], Executor]:
    """What every rank does alike: join the group, load its part, measure it. Each phase is reported."""
    star.phase(wire.Progress(rank, "joining" if plan.size > 1 else "starting"))
    if plan.backend == "nccl":  # mlx.launch gives every rank of a hostfile the first GPU of its host
        before = [plan.of(other).host for other in range(rank)]
        os.environ["CUDA_VISIBLE_DEVICES"] = str(before.count(plan.of(rank).host))
    from parallel import group as groups

    group = None
    if plan.size > 1:
        groups.clean_environment(plan.backend, os.environ)
        star.meet("connect", wire.Fact())
        star.phase(wire.Progress(rank, "connecting"))
        time.sleep(rank * STAGGER_S)  # rank 0 listens before others call it: whom nobody answers waits for seconds
        group = groups.connect(plan.backend, rank, plan.size)
        groups.check_links(group, plan.backend)

    from parallel import loading, warmup
    from parallel.engine.executor import Executor

    spec, last_s = plan.of(rank), 0.0
    loading.wire_memory(plan.wired_limit)

    def report(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done in (0, total) or now_s - last_s > 0.1:
            last_s = now_s
            star.phase(wire.Progress(rank, "loading", done, total))

    model: Any
    links = groups.Links()
    if plan.strategy == "pipeline":
        model, _ = loading.load_stage(Path(spec.model), spec.start, spec.stop, report)
        links = groups.StageLinks(group, model.boundary)
    elif plan.strategy == "tensor":
        model, _ = loading.load_shard(Path(spec.model), group, report)
        links = groups.ShardLinks(group)
    else:
        model, _ = loading.load_model(Path(spec.model), report)
    star.phase(wire.Progress(rank, "warming"))
    star.meet("loaded", wire.Fact())  # nobody waits inside a collective for a rank that still reads its weights
    neighbours = sum(other.host == spec.host for other in plan.ranks) or 1
    facts = star.meet("measured", warmup.probe(model, plan, neighbours))
    executor = Executor(model, links)
    gc.collect()
    gc.freeze()  # what is alive now stays: later collections need not walk it, which takes tens of milliseconds
    return facts, executor


def _start_engine(plan: wire.RankPlan, control: Control) -> tuple[Engine, Executor]:
    """Rank 0's engine, warm and checked."""
    facts, executor = _prepare(plan, 0, control)
    from parallel import loading, warmup

    folder = Path(plan.of(0).model)
    limits = warmup.set_limits(executor.model, plan, loading.context_of(folder), facts, executor.links)
    engine = warmup.make_engine(executor, limits, control.send_step)
    if plan.size > 1 and plan.check_tokens:
        control.phase(wire.Progress(0, "checking"))
        said = warmup.self_check(executor, limits, control.send_step, plan.check_tokens)
        print(f"self-check: {said}", flush=True)
    if limits.reuse != "any":
        kept = "where they were saved" if limits.reuse == "boundary" else "not at all"
        print(f"this model's KV caches cannot be cut: prefixes are reused {kept}", flush=True)
    control.phase(
        wire.Ready(
            rank=0,
            pid=os.getpid(),
            model=plan.model,
            context=limits.context,
            slots=limits.slots,
            kv_limit_bytes=limits.kv_bytes,
            kv_tokens=limits.kv_tokens,
            weights_bytes=sum(fact.weights_bytes for fact in facts),
            prefix_reuse=limits.reuse,
            facts=facts,
        )
    )
    return engine, executor


def serve(engine: Engine, executor: Executor, control: Control) -> None:
    """Rank 0's loop: messages in, steps, messages out; returns when told to leave."""
    published_s = 0.0
    control.watch(lambda: engine.oldest)
    while True:
        while engine.idle or not control.inbox.empty():
            if engine.idle and control.inbox.empty():
                control.publish(_with_memory(engine.stats()))
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
        said = engine.step()
        if executor.failed and control.size > 1:
            raise StepRaised(executor.failed)  # the other ranks executed that step: theirs and this KV now differ
        for outgoing in said:
            control.send(outgoing)
        if (now_s := time.monotonic()) - published_s > PUBLISH_S:
            published_s = now_s
            control.publish(_with_memory(engine.stats()))


def obey(executor: Executor, star: Follower) -> None:
    """The loop of every other rank: begin steps as they come, finish them in order; returns when told to leave."""
    begun: deque[wire.Step] = deque()
    while True:
        if begun and (star.steps.empty() or len(begun) == BEGUN_AHEAD):
            star.doing("computing", begun[0].id)
            executor.finish(begun.popleft())
            if executor.failed:
                raise StepRaised(executor.failed)
            star.publish(_with_memory(wire.Stats(busy_s=executor.busy_s)))
            continue
        if not begun:
            star.doing("waiting for a step")
        if (step := star.steps.get()) is None:
            return
        star.doing("beginning", step.id)
        executor.begin(step)
        begun.append(step)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, StepRaised) else f"{type(error).__name__}: {error}"


def _with_memory(stats: wire.Stats) -> wire.Stats:
    """`stats` with what only this thread may ask of mlx."""
    import mlx.core as mx

    return msgspec.structs.replace(stats, active_bytes=mx.get_active_memory(), peak_bytes=mx.get_peak_memory())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
