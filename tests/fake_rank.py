"""A rank without a model, for tests: speaks `parallel/wire.py` on the plan's port and answers with scripted tokens.

    python fake_rank.py [--MODE ...] RANKPLAN-JSON

Modes: refuse (no Join is good), broken (Failed instead of Ready), crash-loading, crash-on-submit, die-once FILE
(crashes on the first Submit unless FILE exists), silent (no Beat after the first), stuck (Beats tell of an endless
step), deaf (ignores SIGTERM), never-listens, mute (begins requests and gives no token), slow FILE (stays in loading
until FILE exists).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from parallel import wire

OUTPUT = [10, 11, 12]


def main(arguments: list[str]) -> None:
    plan = msgspec.json.decode(arguments[-1], type=wire.RankPlan)
    modes = dict.fromkeys(a.removeprefix("--") for a in arguments[:-1] if a.startswith("--"))
    file = next((Path(a) for a in arguments[:-1] if not a.startswith("--")), Path("/nonexistent"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in modes else lambda *_: os._exit(0))
    print(f"fake rank {os.getpid()} {' '.join(modes)}", flush=True)
    if "never-listens" in modes:
        signal.pause()
    with socket.create_server((plan.host, plan.port)) as server:
        connection, _ = server.accept()
    with connection, contextlib.suppress(ConnectionError):  # a coordinator that was killed resets it
        serve(connection, plan, modes, file)
    if "deaf" in modes:
        signal.pause()


def serve(connection: socket.socket, plan: wire.RankPlan, modes: dict[str, None], file: Path) -> None:
    send_lock = threading.Lock()

    def send(message: wire.Message) -> None:
        with send_lock:
            connection.sendall(wire.encode(message))

    join = wire.read_frame(connection)
    assert isinstance(join, wire.Join)
    if "refuse" in modes or join.secret != Path(plan.secret_file).read_text().strip():
        send(wire.Refused("wrong secret"))
        return
    send(wire.Progress(0, "starting"))
    send(wire.Progress(0, "loading", 500, 1000))
    while "slow" in modes and not file.exists():
        time.sleep(0.02)
    if "crash-loading" in modes:
        print("Traceback: no weights here", flush=True)
        os._exit(7)
    if "broken" in modes:
        send(wire.Failed(0, "The model needs 9 GB and there are 4 GB."))
        signal.pause()
    send(wire.Progress(0, "warming", 1, 2))
    send(wire.Ready(0, os.getpid(), plan.model, plan.context or 4096, plan.slots, 1 << 30, 4096, 1000, "any"))

    def beat() -> None:
        produced = 0
        while "silent" not in modes or produced == 0:
            produced += 1
            stuck_s = 1000.0 if "stuck" in modes else 0.0
            try:
                send(wire.Beat(0, "ready", 3, stuck_s, wire.Stats(output_tokens=produced)))
            except OSError:
                return
            time.sleep(0.1)

    threading.Thread(target=beat, daemon=True).start()
    while (message := wire.read_frame(connection)) is not None and not isinstance(message, wire.Leave):
        if not isinstance(message, wire.Submit):
            continue
        if "crash-on-submit" in modes or ("die-once" in modes and not file.exists()):
            if "die-once" in modes:
                file.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        send(wire.Started(message.id, 0))
        if "mute" in modes:
            continue
        for step, token in enumerate(OUTPUT):
            finish = "length" if token == OUTPUT[-1] else ""
            send(wire.Tokens(step, [wire.Token(message.id, i, token, finish) for i in range(message.n)]))


if __name__ == "__main__":
    main(sys.argv[1:])
