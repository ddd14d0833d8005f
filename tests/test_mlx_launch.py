"""mlx.launch as a child: what it is told, whose output is whose, and that nothing is left when it is stopped."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from processes import ends
from test_arrange import arranged
from test_planner import model

from cluster.errors import PortTaken
from cluster.paths import Folders
from cluster.supervision import mlx_launch
from cluster.supervision.arrange import Arrangement
from cluster.supervision.mlx_launch import LAUNCHER, LaunchedRanks, free_ports, launch_argv, synch_variables
from parallel import wire

PLAN = wire.RankPlan("/models/m", "127.0.0.1", 5, "/state/secret", ranks=[wire.RankSpec("this machine")] * 2)


def over(backend: str, strategy: str = "pipeline", *envs: str) -> Arrangement:
    found = arranged(2, model(6, tensor=(2,)), parallel=strategy)
    return replace(found, backend=backend, hostfile=replace(found.hostfile, backend=backend, envs=envs))


# ---------------------------------------------------------------- what it is told


def test_the_command_line_is_what_a_person_would_type_and_holds_no_secret() -> None:
    argv = launch_argv(PLAN, over("ring"), Path("/state/hostfile.json"), 4000, ["A=1", "B=2"], ("python", "-m", "x"))
    assert argv[0].endswith("/mlx.launch")
    wanted = "--hostfile /state/hostfile.json --backend ring --starting-port 4000 --env A=1 --env B=2 -- python -m x"
    assert " ".join(argv[1:-1]) == wanted
    assert msgspec.json.decode(argv[-1], type=wire.RankPlan) == PLAN


def test_nccl_takes_its_port_by_another_name() -> None:
    assert "--nccl-port" in launch_argv(PLAN, over("nccl"), Path("f"), 4000, [], ("x",))


@pytest.mark.parametrize(
    ("backend", "strategy", "envs", "wanted", "given"),
    [
        ("ring", "pipeline", (), "auto", "0"),
        ("ring", "tensor", (), "auto", "0"),
        ("jaccl", "pipeline", (), "auto", "0"),
        ("jaccl", "tensor", (), "auto", "1"),
        ("jaccl-ring", "tensor", (), "auto", "1"),
        ("jaccl", "tensor", (), "off", "0"),
        ("ring", "pipeline", (), "on", "1"),
        ("jaccl", "tensor", ("MLX_METAL_FAST_SYNCH=0",), "auto", None),
        ("jaccl", "tensor", ("MLX_METAL_FAST_SYNCH=0",), "on", "1"),
        ("ring", "pipeline", ("OTHER=1",), "auto", "0"),
    ],
)
def test_fast_synch_is_on_where_it_pays_unless_the_hostfile_or_the_user_says_otherwise(
    backend: str, strategy: str, envs: tuple[str, ...], wanted: str, given: str | None
) -> None:
    expected = [] if given is None else [f"MLX_METAL_FAST_SYNCH={given}"]
    assert synch_variables(over(backend, strategy, *envs), wanted) == expected


def test_ports_in_a_row_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports("127.0.0.1", 3)
    for port in range(first, first + 3):
        with socket.create_server(("127.0.0.1", port)):
            pass
    monkeypatch.setattr(mlx_launch, "FIRST_PORT", first)
    monkeypatch.setattr(mlx_launch, "LAST_PORT", first + 4)
    with socket.create_server(("127.0.0.1", first + 1)), pytest.raises(PortTaken, match="No 3 ports in a row are free"):
        free_ports("127.0.0.1", 3)


# ---------------------------------------------------------------- real launches of scripts that are no ranks

LABELLED = """
import os, sys, time, signal
from parallel.output import label_output
label_output(int(os.environ["MLX_RANK"]))
"""


class Launch:
    def __init__(self, ranks: LaunchedRanks, folders: Folders) -> None:
        self.ranks, self.folders = ranks, folders

    def children(self) -> list[psutil.Process]:
        process = self.ranks.launcher.process()
        return process.children(recursive=True) if process is not None else []

    async def until(self, what: Callable[[], Any]) -> Any:
        async with asyncio.timeout(60):
            while not (found := what()):
                await asyncio.sleep(0.02)
        return found

    def log(self, rank: int) -> str:
        return self.folders.rank_log(rank).read_text()

    def by_rank(self) -> dict[int, psutil.Process]:
        """The ranks' processes; their labellers, which are their children, are left out."""
        direct = psutil.Process(self.ranks.launcher.pid).children()
        return {int(child.environ()["MLX_RANK"]): child for child in direct if "MLX_RANK" in child.environ()}


@pytest.fixture
async def launch(cluster_home: Path) -> AsyncIterator[Callable[[str], Any]]:
    started: list[Launch] = []

    async def start(script: str) -> Launch:
        folders = Folders.from_environment({"CLUSTER_HOME": str(cluster_home)})
        folders.make()
        ranks = await LaunchedRanks.start(
            PLAN, over("ring"), folders, command=(sys.executable, "-c", LABELLED + script)
        )
        started.append(Launch(ranks, folders))
        return started[-1]

    yield start
    for one in started:
        one.ranks.kill()
        await one.ranks.stop(1)
        assert one.children() == []


async def test_each_ranks_lines_go_to_its_own_log_and_what_nobody_labelled_to_the_launchers(launch) -> None:
    script = "r = os.environ['MLX_RANK']; print('hello from', r, flush=True); os.write(2, b'unended ' + r.encode())"
    one = await launch(script)
    assert await one.ranks.ended() == "mlx.launch ended with exit code 0"
    await one.ranks.stop(1)
    assert [one.log(rank) for rank in (0, 1)] == [f"hello from {rank}\nunended {rank}\n" for rank in (0, 1)]
    assert one.ranks.last_lines(1) == ["rank 0 | unended 0", "rank 1 | unended 1"]
    assert one.ranks.errors == []


async def test_last_words_are_in_the_log_although_the_others_are_ended_meanwhile(launch) -> None:
    one = await launch(
        "r = int(os.environ['MLX_RANK']); time.sleep(60 if r == 0 else 0); raise RuntimeError('rank %d' % r)"
    )
    await one.ranks.ended()  # with exit code 0, whatever its ranks do
    await one.ranks.stop(1, patience_s=1)
    assert one.log(1).endswith("RuntimeError: rank 1\n")
    assert one.ranks.exits == {1: "ended with exit code 1", 0: "was ended by SIGTERM"}


async def test_a_rank_that_ignores_sigterm_is_killed_and_its_labeller_ends(launch) -> None:
    one = await launch("signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)")
    await one.until(lambda: "deaf" in one.log(0) and "deaf" in one.log(1))
    processes = one.children()
    assert len(processes) == 4  # two ranks, and the two that label their lines
    await one.ranks.stop(0.3)
    assert all(ends(process.pid) for process in processes)
    assert one.ranks.launcher.process() is None


async def test_a_stop_while_ranks_are_just_being_started_leaves_none(launch) -> None:
    one = await launch("time.sleep(600)")
    await one.ranks.stop(1)
    assert one.ranks._started() == []


async def test_how_each_rank_ended_is_known_also_by_a_signal_and_by_its_own_alarm(launch) -> None:
    one = await launch(
        "r = os.environ['MLX_RANK']; print('up', flush=True); r == '0' and signal.alarm(1); time.sleep(600)"
    )
    await one.until(lambda: "up" in one.log(0) and "up" in one.log(1))
    one.by_rank()[1].send_signal(signal.SIGSTOP)  # so that mlx.launch does not end it before we kill it
    await one.until(lambda: 0 in one.ranks.exits)
    one.by_rank()[1].kill()
    await one.until(lambda: 1 in one.ranks.exits)
    await one.ranks.stop(1)
    assert "did not come out of joining the others" in one.ranks.exits[0]
    assert one.ranks.exits[1] == "was ended by SIGKILL"


async def test_kill_ends_stopped_ranks_at_once(launch) -> None:
    one = await launch("print('up', flush=True); time.sleep(600)")
    await one.until(lambda: "up" in one.log(0) and "up" in one.log(1))
    for rank in one.by_rank().values():
        rank.send_signal(signal.SIGSTOP)
    one.ranks.kill()
    await one.ranks.stop(60)
    assert one.children() == []


async def test_once_all_have_joined_the_pipes_to_their_stdin_are_full_and_mlx_launch_rests(launch) -> None:
    one = await launch("print('up', flush=True); time.sleep(600)")
    await one.until(lambda: "up" in one.log(0) and "up" in one.log(1))
    process, ranks = psutil.Process(one.ranks.launcher.pid), one.by_rank()
    for rank, child in ranks.items():
        one.ranks.joined(wire.Joined(rank, child.pid, child.create_time(), {}))
    assert one.ranks.processes == {
        LAUNCHER: one.ranks.launcher,
        **{rank: mlx_launch.ProcessRecord(child.pid, child.create_time()) for rank, child in ranks.items()},
    }

    def used_s() -> float:
        return process.cpu_times().user + process.cpu_times().system

    async def rests() -> bool:  # burning a core would use nearly all of the half second
        before_s = used_s()
        await asyncio.sleep(0.5)
        return used_s() - before_s <= 0.05

    async with asyncio.timeout(30):
        while not await rests():
            pass
