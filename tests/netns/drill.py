"""A cluster on machines of its own, clients that never stop asking, and what a drill found.

    boss       the coordinator: `cluster` commands are typed here, the API listens at its address
    a, b, c    the hosts

`PYTHONPATH=tests python -m netns.drill FILE ...` prints the table of docs/reliability.md from what runs of the drills
wrote to $DRILLS_RECORD.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec
import psutil
from netns.machines import SYSTEM_PATH, Machine, Network

from cluster.paths import Folders
from cluster.state import ClusterState, read_state
from parallel import wire

HOSTS = ("a", "b", "c")
PORT = 8080
ERROR_S = 10.0  # an open request has its error after this
SERVING_S = 60.0  # and new ones are answered after this
SILENT_S = 90.0
RETRY_S = 0.5  # as long as the API says 503
ENDS: Counter[str] = Counter()  # how the requests of all drills ended, by `Asked.end`


def until(condition: Callable[[], Any], wait_s: float = 60.0, what: str = "it") -> Any:
    """What `condition` returns once that is true."""
    end = time.monotonic() + wait_s
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {wait_s:g} s"
        time.sleep(0.05)
    return found


class Drill:
    """One cluster: its machines, its commands, its processes."""

    def __init__(self, network: Network, cache: Path | None = None, hosts: Sequence[str] = HOSTS) -> None:
        """`cache` has the demo model, for the coordinator's eyes only: hosts get it from there."""
        self.network = network
        self.boss = network.add("boss")
        self.hosts = {name: network.add(name) for name in hosts}
        self.home = self.boss.home / "cluster"
        self.folders = Folders.from_environment({"CLUSTER_HOME": str(self.home)})
        self.url = f"http://{self.boss.ip}:{PORT}"
        self.folders.make()
        if cache is not None:
            mount(self.boss, "--bind", str(cache), str(self.folders.cache))
        self.python: str | None = sys.executable

    # ------------------------------------------------------------ commands

    def start(self, *arguments: str, home: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        """A `cluster` command on the coordinator, with these environment variables beside its own."""
        variables |= {
            "CLUSTER_HOME": str(home or self.home),
            "HOME": str(self.boss.home),
            "PATH": SYSTEM_PATH,
            "OPENBLAS_NUM_THREADS": "1",  # all machines share the cores of this one
        }
        words = ["env", *(f"{name}={value}" for name, value in variables.items())]
        words += [sys.executable, "-m", "cluster", *arguments]
        return self.boss.start(["sh", "-c", 'exec "$@" 2>&1', "sh", *words])

    def run(
        self, *arguments: str, home: Path | None = None, wait_s: float = 180.0, **variables: str
    ) -> tuple[int, str]:
        """Exit code and output of a command."""
        process = self.start(*arguments, home=home, **variables)
        output, _ = process.communicate(timeout=wait_s)
        return process.returncode, output

    def up(self, *settings: str, port: int = PORT) -> tuple[str, ...]:
        """The words of `up` on all hosts; an argument that is no flag is the model."""
        words = [*settings, "--hosts", ",".join(self.hosts), "--backend", "ring"]
        words += ["--python", self.python] if self.python else []
        words += [] if "--self-check" in settings else ["--no-self-check"]
        return ("up", *words, "--host", self.boss.ip, "--port", str(port))

    @contextlib.contextmanager
    def serving(self, *settings: str) -> Iterator[None]:
        """`up --detach`, ready; ended after, and nothing of it may be left then on any machine."""
        code, output = self.run(*self.up(*settings), "--detach")
        assert code == 0, output
        yield
        code, output = self.run("down")
        assert code == 0, output
        self.nothing_left()

    # ------------------------------------------------------------ what it says of itself

    def health(self) -> dict[str, Any]:
        """The answer of /health; empty while nobody answers."""
        with contextlib.suppress(httpx.HTTPError), self.network.inside():
            answer: dict[str, Any] = httpx.get(f"{self.url}/health", trust_env=False, timeout=5).json()
            return answer
        return {}

    @property
    def state(self) -> ClusterState:
        """The coordinator's record on its disk."""
        state = read_state(self.folders)
        assert state is not None
        return state

    def ready(self, ranks: int) -> bool:
        """Whether it serves with so many ranks."""
        health = self.health()
        return health.get("status") == "ready" and len(health["ranks"]) == ranks

    def self_checks(self) -> list[str]:
        """What rank 0 of this launch said of its self-check, if it made one."""
        lines = self.folders.rank_log(0).read_text().splitlines()
        return [line for line in lines if line.startswith("self-check: ")]

    def story(self) -> str:
        """The coordinator's log without its requests."""
        lines = self.folders.coordinator_log.read_text().splitlines()
        return "\n".join(line for line in lines if " POST " not in line)

    # ------------------------------------------------------------ its processes

    @property
    def coordinator(self) -> psutil.Process:
        return inside(self.boss, self.state.coordinator.pid)

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank, wherever it runs."""
        facts = self.health()["ranks"][number]
        return inside(self.hosts[facts["host"]], facts["pid"])

    def machine_of(self, number: int) -> Machine:
        return self.hosts[self.health()["ranks"][number]["host"]]

    def launches(self, *names: str) -> set[str]:
        """The ids of the launches of which a rank runs on any, or the named, hosts."""
        found = set()
        for process in (p for name in names or self.hosts for p in processes(self.hosts[name])):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if "parallel.rank" in (argv := process.cmdline()):
                    found.add(msgspec.json.decode(argv[-1], type=wire.RankPlan).launch)
        return found

    def left(self) -> dict[str, list[str]]:
        """What runs on the machines apart from their sshd, by machine."""
        machines = {"boss": self.boss, **self.hosts}
        names = {name: [shown(process) for process in processes(machine)] for name, machine in machines.items()}
        return {name: found for name, found in names.items() if found}

    def secrets(self) -> list[Path]:
        """Files with a secret of a launch on the hosts."""
        return [file for m in self.hosts.values() for file in (m.home / ".local/share/cluster/secrets").glob("*")]

    def nothing_left(self, wait_s: float = 10.0) -> None:
        """Nothing runs anywhere; sessions of sshd may take a moment to end."""
        end = time.monotonic() + wait_s
        while left := self.left():
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.1)

    def only_this_launch(self, *names: str) -> None:
        """No rank of an earlier launch is left."""
        until(lambda: self.launches(*names) <= {self.state.launch}, 15, "the end of the earlier ranks")

    def reset(self) -> None:
        """All machines on, plugged and awake, and nothing of an earlier drill on them."""
        for machine in self.hosts.values():
            if machine.running:
                machine.thaw()
                self.network.plug(machine)
            else:
                machine.boot()
        for machine in (self.boss, *self.hosts.values()):
            for process in processes(machine):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.nothing_left()


def processes(machine: Machine) -> list[psutil.Process]:
    """What runs on a machine, without its first process; none when it is off."""
    if not machine.running:
        return []
    there, found = os.readlink(f"/proc/{machine.pid}/ns/pid"), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            mine = os.readlink(f"/proc/{process.pid}/ns/pid") == there and process.pid != machine.pid
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def inside(machine: Machine, pid: int) -> psutil.Process:
    """The process that has this pid on the machine."""
    for process in processes(machine):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            if next(line for line in lines if line.startswith("NSpid:")).split()[-1] == str(pid):
                return process
    raise AssertionError(f"there is no process {pid} on {machine.name}: {[shown(p) for p in processes(machine)]}")


def shown(process: psutil.Process) -> str:
    """Its command line, as far as a message needs it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())[:150] or process.name()
    return "gone"


def mount(machine: Machine, *arguments: str) -> None:
    """Mount something on the machine, for its own eyes."""
    assert machine.start(["mount", *arguments]).wait() == 0


# ---------------------------------------------------------------- clients


@dataclass
class Asked:
    """One request: when it was sent, got its first token, ended (seconds of one clock), and how.

    `end`: "answer"; "error", as the API tells them; "closed", when the connection broke or there is none; "silence",
    when it neither got an answer nor an error; "left", when the client went.
    """

    began: float
    first: float | None = None
    ended: float | None = None
    end: str = ""
    says: str = ""


class Clients:
    """Two clients, one of which streams, that send a request after the other. A context manager."""

    def __init__(self, drill: Drill, story: int = 400) -> None:
        """`story`: tokens of a streamed answer, which should take seconds."""
        self._drill = drill
        self._stopping = threading.Event()
        self._lanes: list[list[Asked]] = [[], []]
        prompts = ((True, "Tell a long story about a dragon.", story), (False, "What is the capital of France?", 24))
        self._threads = [
            threading.Thread(target=self._ask_on, args=(lane, *prompt), name="client")
            for lane, prompt in zip(self._lanes, prompts, strict=True)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        ENDS.update(one.end for one in self.asked)
        if error is None:
            assert self.count("silence") == 0, self.asked

    @property
    def asked(self) -> list[Asked]:
        return sorted((one for lane in self._lanes for one in list(lane)), key=lambda one: one.began)

    def count(self, end: str) -> int:
        return sum(one.end == end for one in self.asked)

    def flowing(self) -> Asked:
        """Wait until an answer is streamed; that request."""

        def open_answer() -> Asked | None:
            latest = self._lanes[0][-1] if self._lanes[0] else Asked(0)
            return latest if latest.first and not latest.ended and time.monotonic() - latest.first > 0.5 else None

        found: Asked = until(open_answer, 60, "a streamed answer")
        return found

    def served_after(self, since: float, wait_s: float = SERVING_S + 30) -> float:
        """When the first token came of an answer to a request that was sent after `since`."""

        def first() -> float | None:
            times = [one.first for one in self.asked if one.began > since and one.end == "answer" and one.first]
            return min(times, default=None)

        found: float = until(first, wait_s, "an answer")
        return found

    def _ask_on(self, lane: list[Asked], stream: bool, prompt: str, tokens: int) -> None:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": stream}
        body["temperature"] = 0
        with self._drill.network.inside(), httpx.Client(trust_env=False, timeout=SILENT_S) as http:
            while not self._stopping.is_set():
                asked = Asked(time.monotonic())
                lane.append(asked)
                try:
                    self._ask(http, body, asked)
                except httpx.TimeoutException:
                    asked.end = "silence"
                except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                    asked.end, asked.says = "closed", str(error)
                asked.ended = time.monotonic()
                if asked.end != "answer":
                    self._stopping.wait(RETRY_S)

    def _ask(self, http: httpx.Client, body: dict[str, Any], asked: Asked) -> None:
        asked.end = "silence"
        with http.stream("POST", f"{self._drill.url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200 or not body["stream"]:
                said = json.loads(response.read())
                take(said, asked)
                return
            for line in response.iter_lines():
                if self._stopping.is_set():
                    asked.end = "left"
                    return
                if line.startswith("data: {"):
                    take(json.loads(line[6:]), asked)


def take(said: dict[str, Any], asked: Asked) -> None:
    """An answer, a part of one, or an error."""
    if "error" in said:
        asked.end, asked.says = "error", said["error"]["message"]
    elif said["choices"]:
        asked.first = asked.first or time.monotonic()
        if said["choices"][0].get("finish_reason"):
            asked.end = "answer"


# ---------------------------------------------------------------- what was found


@dataclass
class Found:
    """A row of the table. Times in seconds after the fault."""

    drill: str
    saw: str
    error_s: float | None = None
    serving_s: float | None = None
    then: str = ""


def lose(drill: Drill, clients: Clients, fault: Callable[[], Any]) -> tuple[str, float, float]:
    """Let `fault` happen in the middle of an answer. What the open request was told, after how long, and after how
    long a request was answered again, which must be `SERVING_S` after the error."""
    request = clients.flowing()
    restarts = drill.health()["restarts"]
    since = time.monotonic()
    fault()
    until(lambda: request.ended, ERROR_S + 30, "the end of the open request")
    assert request.end == "error", request
    assert request.ended is not None
    error_s = request.ended - since
    assert error_s <= ERROR_S, request
    serving_s = clients.served_after(request.ended) - since
    assert serving_s <= error_s + SERVING_S, drill.story()
    assert drill.health()["restarts"] == restarts + 1
    return request.says, error_s, serving_s


def record(found: Found) -> None:
    """Append a row to the file that $DRILLS_RECORD names, and print it."""
    print(f"{found.drill}: {found.saw}; error {found.error_s}, serving {found.serving_s}; {found.then}")
    if path := os.environ.get("DRILLS_RECORD"):
        with open(path, "a") as file:
            file.write(json.dumps(asdict(found)) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per drill; of several runs the longest times, and the words of the last."""
    drills = dict.fromkeys(row["drill"] for row in rows)
    lines = ["| drill | the open request, or the command, was told | error after | serving again after | then |"]
    lines.append("|---|---|---|---|---|")
    for name in drills:
        mine = [row for row in rows if row["drill"] == name]
        times = [
            max((row[key] for row in mine if row[key] is not None), default=None) for key in ("error_s", "serving_s")
        ]
        shown_times = ["" if one is None else f"{one:.1f} s" for one in times]
        lines.append(f"| {name} | {mine[-1]['saw']} | {' | '.join(shown_times)} | {mine[-1]['then']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]))
