"""Whole clusters on machines of their own, and what may happen to them: `make test-netns`, docs/reliability.md."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from netns.drill import HOSTS, PORT, Clients, Drill, Found, lose, mount, processes, record, until
from netns.machines import Network, unavailable

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900)]
strategies = pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
LOCK = Path(__file__).parents[2] / "requirements.lock"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Drill]:
    """A coordinator and three hosts, none of which has the model at first."""
    if why := unavailable():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("drills")
    with Network(folder / "network") as network:
        yield Drill(network, demo_model.parents[2])
    for name in HOSTS:  # weights and packages: two gigabytes each
        for part in (".cache", ".local"):
            shutil.rmtree(folder / "network" / name / part, ignore_errors=True)


@pytest.fixture
def drill(machines: Drill) -> Drill:
    machines.reset()
    machines.python = sys.executable
    return machines


@strategies
def test_from_nothing_to_the_first_token(drill: Drill, strategy: str):
    with Clients(drill) as clients:
        began = time.monotonic()
        with drill.serving("--parallel", strategy):
            served = clients.served_after(began, 180)
            assert drill.ready(3)
            refused = next(one.says for one in clients.asked if one.end == "error")
            assert len(drill.secrets()) == 3
        assert drill.secrets() == []
    record(Found(f"cold `cluster up`, {strategy}", refused, None, served - began, "3 ranks"))


def test_from_nothing_with_the_environment_that_install_makes(drill: Drill, tmp_path: Path):
    """The coordinator's package index is a folder: its network ends at the hosts."""
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(tmp_path)]
    subprocess.run([*fetch, "-r", str(LOCK)], check=True)
    began = time.monotonic()
    code, output = drill.run("install", *HOSTS, wait_s=400, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert code == 0, output
    installed_s = time.monotonic() - began
    drill.python = None
    with drill.serving("--parallel", "pipeline"), Clients(drill) as clients:
        served_s = clients.served_after(0) - began
        assert drill.ready(3)
        for rank in range(3):
            assert drill.rank(rank).cmdline()[0].startswith(f"{drill.machine_of(rank).home}/.local/share/cluster/env")
    then = f"3 ranks; {installed_s:.0f} s of it for `cluster install`"
    record(
        Found(
            "`cluster install` and `cluster up` on hosts that have nothing, pipeline", "answers", None, served_s, then
        )
    )


@strategies
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_each_rank_killed_or_stopped(drill: Drill, strategy: str, number: signal.Signals):
    with drill.serving("--parallel", strategy), Clients(drill) as clients:
        for rank in range(3):
            machine, process = drill.machine_of(rank), drill.rank(rank)
            told, error_s, serving_s = lose(drill, clients, lambda process=process: process.send_signal(number))
            assert f"on {machine.name}" in told
            assert drill.ready(3)
            drill.only_this_launch()
            record(Found(f"{number.name} of rank {rank}, {strategy}", told, error_s, serving_s, "3 ranks again"))


def test_losses_with_the_self_check(drill: Drill):
    """The other drills go without it; the context makes the first one a matter of seconds."""
    settings = ("--parallel", "pipeline", "--context", "1200", "--self-check")
    with drill.serving(*settings), Clients(drill) as clients:
        (said,) = until(drill.self_checks, 5, "the self-check")
        assert said.startswith("self-check: a prompt of 1198 tokens, whole and in chunks: ")
        told, error_s, serving_s = lose(drill, clients, drill.rank(1).kill)
        assert drill.ready(3)
        assert drill.self_checks() == []
        record(Found("SIGKILL of rank 1, with the self-check", told, error_s, serving_s, "3 ranks again"))
        machine = drill.machine_of(2)
        told, error_s, serving_s = lose(drill, clients, lambda: drill.network.unplug(machine))
        assert drill.ready(2)
        (said,) = until(drill.self_checks, 5, "the self-check")
        assert said.startswith("self-check: a prompt of 512 tokens, whole and in chunks: ")
        record(Found("link of rank 2's host down, with the self-check", told, error_s, serving_s, "2 ranks"))
        drill.network.plug(machine)


@strategies
@pytest.mark.parametrize("rank", [0, 2])
def test_a_link_down_and_up_again(drill: Drill, strategy: str, rank: int):
    with drill.serving("--parallel", strategy), Clients(drill) as clients:
        machine = drill.machine_of(rank)
        told, error_s, serving_s = lose(drill, clients, lambda: drill.network.unplug(machine))
        assert f"rank {rank} on {machine.name}" in told
        ranks = len(drill.health()["ranks"])
        assert ranks == (2 if strategy == "pipeline" else 1)
        assert machine.name in drill.health()["left_out"]
        drill.only_this_launch(*(name for name in HOSTS if name != machine.name))
        drill.network.plug(machine)
        began = time.monotonic()
        until(lambda: drill.health()["returned"] == [machine.name], 90, "the host's return")
        back_s = time.monotonic() - began
        code, output = drill.run(*drill.up("--parallel", strategy), "--detach")
        assert code == 0 and f"Taking in {machine.name}" in output
        assert drill.ready(3)
        clients.served_after(time.monotonic())
        drill.only_this_launch()
    left = "1 rank" if ranks == 1 else f"{ranks} ranks"
    then = f"{left}; back in `status` {back_s:.0f} s after the link, and 3 ranks again with `cluster up`"
    record(Found(f"link of rank {rank}'s host down, {strategy}", told, error_s, serving_s, then))


@pytest.mark.parametrize("fault", ["power lost", "system hung"])
def test_a_host_that_is_gone_and_comes_back(drill: Drill, fault: str):
    with drill.serving("--parallel", "pipeline"), Clients(drill) as clients:
        machine = drill.machine_of(1)
        goes, comes = (machine.kill, machine.boot) if fault == "power lost" else (machine.freeze, machine.thaw)
        told, error_s, serving_s = lose(drill, clients, goes)
        assert f"rank 1 on {machine.name}" in told
        assert drill.ready(2)
        comes()
        until(lambda: drill.health()["returned"] == [machine.name], 90, "the host's return")
        drill.only_this_launch()
        assert drill.run(*drill.up("--parallel", "pipeline"), "--detach")[0] == 0
        assert drill.ready(3)
        clients.served_after(time.monotonic())
    then = "2 ranks; when it is back, 3 with `cluster up`"
    record(Found(f"{fault} on rank 1's host, pipeline", told, error_s, serving_s, then))


def test_an_sshd_that_does_not_answer(drill: Drill):
    """What runs goes on; when a rank is lost, that host is done without, and its rank leaves by itself."""
    with drill.serving("--parallel", "pipeline"), Clients(drill) as clients:
        deaf, other = drill.machine_of(1), drill.machine_of(2)
        psutil.Process(deaf.pid).suspend()
        clients.served_after(time.monotonic())
        assert clients.count("error") == 0
        told, error_s, serving_s = lose(drill, clients, drill.rank(2).kill)
        assert f"on {other.name}" in told
        assert drill.ready(2) and deaf.name in drill.health()["left_out"]
        drill.only_this_launch()
        deaf.thaw()
        until(lambda: drill.health()["returned"] == [deaf.name], 90, "the host's return")
    record(Found("sshd of rank 1's host hangs", "answers as before", then="nothing is lost"))
    then = f"2 ranks, without {deaf.name}, whose rank left by itself"
    record(Found("the same, and rank 2 is killed", told, error_s, serving_s, then))


def test_an_ssh_session_that_breaks(drill: Drill):
    """mlx.launch ends all ranks where one of its sessions ends."""
    with drill.serving("--parallel", "pipeline"), Clients(drill) as clients:
        session, host = drill.rank(1).parent(), drill.machine_of(1).name
        assert session is not None and "sshd" in session.name()
        told, error_s, serving_s = lose(drill, clients, session.kill)
        assert f"rank 1 on {host}: its ssh session ended" in told
        assert drill.ready(3)
        drill.only_this_launch()
    record(Found("the ssh session of rank 1 breaks, pipeline", told, error_s, serving_s, "3 ranks again"))


def test_packets_lost_and_late(drill: Drill):
    with drill.serving("--parallel", "pipeline"), Clients(drill) as clients:
        with drill.network.worsen(drill.machine_of(1), loss=0.05, delay_s=0.03):
            began = time.monotonic()
            served_s = clients.served_after(began) - began
            clients.served_after(time.monotonic())
        clients.served_after(time.monotonic())
        assert clients.count("error") == 0
    saw = f"answers, slower: a first one within {served_s:.0f} s"
    record(Found("5 % of the packets lost, 30 ms delay each way, at rank 1", saw, then="no error, no relaunch"))


def test_a_disk_too_small_and_one_that_fills_up(drill: Drill):
    machine = drill.hosts["c"]
    cache = machine.home / ".cache" / "cluster"
    cache.mkdir(parents=True, exist_ok=True)
    for size, what, words in (
        ("100m", "disk of a host too small for the weights", "c needs "),
        ("700m", "disk of a host filled up while weights come", "c: the disk became full while "),
    ):
        mount(machine, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(cache))
        wait = f"until [ -n \"$(find {cache} -name '.*.part' -size +1000k)\" ]; do sleep 0.02; done"
        fill = machine.start(["sh", "-c", f"{wait}; dd if=/dev/zero of={cache}/other bs=1M 2>&1"])
        began = time.monotonic()
        code, output = drill.run(*drill.up("--parallel", "pipeline"), "--detach")
        assert code == 1 and words in output, output
        record(Found(what, told_by(output), then=f"exit code 1 after {time.monotonic() - began:.0f} s"))
        for process in processes(machine):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        fill.wait()
        assert machine.start(["umount", "-l", str(cache)]).wait() == 0
        drill.nothing_left()


def test_weights_damaged_on_one_host(drill: Drill):
    with drill.serving("--parallel", "pipeline"), Clients(drill) as clients:
        clients.served_after(0)
    (file,) = (drill.hosts["c"].home / ".cache" / "cluster" / "models").rglob("model.safetensors")
    with file.open("r+b") as weights:
        weights.seek(-1000, os.SEEK_END)
        sound = weights.read(1000)
        weights.seek(-1000, os.SEEK_END)
        weights.write(bytes(1000))
    with drill.serving("--parallel", "pipeline"), Clients(drill) as clients:
        clients.served_after(0)
    assert file.read_bytes()[-1000:] == sound
    record(Found("a weight file damaged on one host", "answers", then="copied again before the launch"))


def test_another_mlx_on_one_host(drill: Drill):
    odd = drill.boss.home / "odd"
    (odd / "mlx-0.0.1.dist-info").mkdir(parents=True)
    (odd / "mlx-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx\nVersion: 0.0.1\n")
    (odd / "sitecustomize.py").write_text("import mlx.core\nmlx.core.__version__ = '0.0.1'\n")
    for machine in (drill.boss, *drill.hosts.values()):
        machine.command("ranks-python", f'exec {sys.executable} "$@"\n')
    drill.hosts["c"].command("ranks-python", f'PYTHONPATH={odd} exec {sys.executable} "$@"\n')
    drill.python = "ranks-python"
    began = time.monotonic()
    code, output = drill.run(*drill.up("--parallel", "pipeline"), "--detach")
    assert code == 1 and "0.0.1" in output and " c" in output
    assert drill.left() == {}
    then = f"exit code 1 after {time.monotonic() - began:.0f} s"
    record(Found("another mlx on one host", told_by(output), then=then))
    code, output = drill.run(*drill.up("--parallel", "pipeline"), "--detach", "--force")
    assert code == 1 and f"mlx: {version('mlx')} on a and b, 0.0.1 on c" in output
    assert drill.left() == {}
    record(Found("the same with --force", told_by(output), then="exit code 1"))


def test_a_port_that_is_taken(drill: Drill):
    listen = f"import socket, time; s = socket.create_server(('{drill.boss.ip}', {PORT})); "
    listen += "print('up', flush=True); time.sleep(900)"
    other = drill.boss.start([sys.executable, "-c", listen])
    assert other.stdout is not None and other.stdout.readline() == "up\n"
    code, output = drill.run(*drill.up("--parallel", "pipeline"), "--detach")
    assert code == 1 and f"Port {PORT} of {drill.boss.ip} is taken" in output
    assert set(drill.left()) == {"boss"}
    record(Found("the API's port taken", told_by(output), then="no host was touched"))


def test_a_host_that_is_off_at_the_first_start(drill: Drill):
    drill.hosts["c"].kill()
    began = time.monotonic()
    code, output = drill.run(*drill.up("--parallel", "pipeline"), "--detach")
    assert code == 1 and ("error: c: no answer from" in output or "No route to host" in output), output
    drill.nothing_left()
    then = f"exit code 1 after {time.monotonic() - began:.0f} s"
    record(Found("a host off at `cluster up`", told_by(output), then=then))


def test_a_coordinator_that_is_killed(drill: Drill):
    """Its ranks leave by themselves, or with the next start."""
    code, output = drill.run(*drill.up("--parallel", "pipeline"), "--detach")
    assert code == 0, output
    with Clients(drill) as clients:
        request = clients.flowing()
        drill.coordinator.kill()
        began = time.monotonic()
        until(lambda: request.ended, 10, "the end of the open request")
        assert request.end == "closed"
    until(lambda: not drill.left(), 80, "the end of its ranks")
    then = f"all ranks gone by themselves after {time.monotonic() - began:.0f} s"
    record(Found("SIGKILL of the coordinator", "the connection breaks", 0.0, None, then))
    with drill.serving("--parallel", "pipeline"), Clients(drill) as clients:
        clients.served_after(0)
        before = drill.state.launch
        drill.coordinator.kill()
        assert drill.launches() == {before}
        began = time.monotonic()
        code, output = drill.run(*drill.up("--parallel", "pipeline"), "--detach")
        assert code == 0, output
        serving_s = clients.served_after(began) - began
        assert before not in drill.launches()
        drill.only_this_launch()
    then = "what was left was ended by that `up`"
    record(Found("the same, and `cluster up` at once", "the connection breaks", 0.0, serving_s, then))


PHASES = ("resolving", "probing", "planning", "copying", "launching", "joining", "connecting", "loading", "warming")


@pytest.mark.parametrize("phase", [*PHASES, "is ready"])
def test_an_interrupted_start_leaves_nothing(drill: Drill, phase: str):
    if phase == "copying":
        shutil.rmtree(drill.hosts["c"].home / ".cache", ignore_errors=True)
    process = drill.start(*drill.up("--parallel", "pipeline"))
    assert process.stdout is not None
    seen = ""
    while phase not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    began = time.monotonic()
    (command,) = psutil.Process(process.pid).children()
    command.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    ended_s = time.monotonic() - began
    drill.nothing_left(15)
    record(Found(f"Ctrl-C while it is {phase.removeprefix('is ')}", "exit code 0", then=f"ended after {ended_s:.1f} s"))


def test_a_second_coordinator_on_the_same_hosts(drill: Drill):
    other = drill.boss.home / "other"
    other.mkdir()
    (other / "cache").symlink_to(drill.folders.cache)
    with drill.serving("--parallel", "pipeline"), Clients(drill) as clients:
        code, output = drill.run(*drill.up("--parallel", "pipeline", port=PORT + 1), "--detach", home=other)
        assert (
            code == 1
            and f"already runs ranks of another cluster, started by root@boss: {drill.folders.state}" in output
        )
        clients.served_after(time.monotonic())
        assert clients.count("error") == 0
    record(Found("a second coordinator on the same hosts", told_by(output), then="the first one goes on"))


def test_down_tells_of_a_host_that_it_cannot_reach(drill: Drill):
    code, output = drill.run(*drill.up("--parallel", "pipeline"), "--detach")
    assert code == 0, output
    drill.network.unplug(drill.hosts["c"])
    began = time.monotonic()
    code, output = drill.run("down")
    assert code == 1 and "c could not be asked whether its ranks have ended" in output
    ended_s = time.monotonic() - began
    assert drill.launches("a", "b") == set()
    until(lambda: not drill.launches("c"), 100, "the end of the rank that was cut off")
    then = f"after {ended_s:.0f} s; the rank there left by itself after {time.monotonic() - began:.0f} s"
    drill.network.plug(drill.hosts["c"])
    drill.nothing_left()
    record(Found("`cluster down` while a host's link is down", told_by(output), then=then))


def told_by(output: str) -> str:
    """The error of a command's output, in one line."""
    lines = output[output.index("error: ") :].partition("\nhint:")[0].splitlines()
    return " ".join(line.strip() for line in lines)[7:400]
