"""The stand-in machines themselves: separate like real ones, gone when they should be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from netns.machines import Network, unavailable

from cluster.errors import HostUnreachable
from cluster.macs.ssh import open_shell

OWNER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from netns.machines import Network
network = Network(Path(sys.argv[2]))
machine = network.add("studio-a")
print(machine.pid, flush=True)
sys.stdin.read()
"""


def test_machines_have_names_homes_processes_and_addresses_of_their_own(network: Network):
    for name in ("studio-a", "studio-b"):
        (network.add(name).home / "note").write_text(name)
    with network.inside():
        for name, ip in (("studio-a", "10.77.0.11"), ("studio-b", "10.77.0.12")):
            with open_shell(name) as shell:
                assert shell.run(["hostname"]).out == f"{name}\n"
                assert shell.run(["cat", "note"]).out == name
                assert shell.run(["sh", "-c", "echo ~ $HOME"]).out.split() == [str(network.folder / name)] * 2
                assert ip in shell.run(["ip", "address"]).out
                assert "studio" not in shell.run(["sh", "-c", "cat /proc/[0-9]*/comm"]).out
                assert int(shell.run(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"]).out) < 12
    ids = [(machine.home / ".machine" / "id").read_text() for machine in network.machines.values()]
    assert len(set(ids)) == 2


def test_one_machine_logs_into_another_with_the_same_names(network: Network):
    network.add("studio-a")
    network.add("studio-b")
    with network.inside(), open_shell("studio-a") as shell:
        assert shell.run(["ssh", "-o", "BatchMode=yes", "studio-b", "hostname"]).out == "studio-b\n"


def test_a_cable_that_was_pulled_carries_again_when_it_is_back(network: Network):
    machine = network.add("studio-a")
    network.unplug(machine)
    with network.inside():
        with pytest.raises(HostUnreachable):
            open_shell("studio-a", 1.0)
        network.plug(machine)
        with open_shell("studio-a") as shell:
            assert shell.run(["true"]).ok


def test_killing_a_machine_ends_all_its_processes_and_booting_keeps_its_disk(network: Network):
    machine = network.add("studio-a")
    first = psutil.Process(machine.pid)
    machine.start(["sh", "-c", "sleep 600 & sleep 600"])
    machine.kill()
    assert not first.is_running()
    (machine.home / "kept").write_text("yes")
    machine.boot()
    with network.inside(), open_shell("studio-a") as shell:
        assert shell.run(["cat", "kept"]).out == "yes"


def test_the_caller_is_back_in_its_own_network_afterwards(network: Network):
    before = os.readlink("/proc/thread-self/ns/net")
    with network.inside():
        assert os.readlink("/proc/thread-self/ns/net") != before
    assert os.readlink("/proc/thread-self/ns/net") == before


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_nothing_is_left_when_the_test_process_is_killed(tmp_path: Path):
    argv = [sys.executable, "-c", OWNER, str(Path(__file__).parent.parent), str(tmp_path / "network")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        machine = psutil.Process(int(owner.stdout.readline()))
        owner.send_signal(signal.SIGKILL)
    machine.wait(timeout=20)
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])]
    assert left == []


def test_mlx_launch_runs_over_the_machines(network: Network):
    """What drills of a whole cluster need: its ssh, its scripts and its ring between two machines."""
    for name in ("studio-a", "studio-b"):
        network.add(name)
    script = network.folder / "sum.py"
    script.write_text(
        "import mlx.core as mx\ngroup = mx.distributed.init(backend='ring', strict=True)\n"
        "total = mx.distributed.all_sum(mx.array([1.0 + group.rank()]), stream=mx.cpu)\n"
        "print('rank', group.rank(), 'of', group.size(), 'sum', total.item(), flush=True)\n"
    )
    hostfile = network.folder / "hosts.json"
    hostfile.write_text('[{"ssh": "studio-a", "ips": ["10.77.0.11"]}, {"ssh": "studio-b", "ips": ["10.77.0.12"]}]')
    launch = [Path(sys.executable).with_name("mlx.launch"), "--backend", "ring", "--hostfile", str(hostfile)]
    with network.inside():
        done = subprocess.run(
            [*launch, "--python", sys.executable, str(script)],
            stdin=subprocess.PIPE,
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2 sum 3.0",
        "rank 1 of 2 sum 3.0",
    ], done.stdout + done.stderr


def test_a_bad_cable_delays_what_it_carries_and_loses_some(network: Network):
    machine = network.add("studio-a")

    def sent_again() -> int:
        lines = machine.start(["cat", "/proc/net/snmp"]).communicate()[0].splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    with network.inside():
        with network.worsen(machine, loss=0.1, delay_s=0.02), open_shell("studio-a") as shell:
            began_s = time.monotonic()
            assert shell.run(["head", "-c", "300000", "/dev/zero"]).out == "\0" * 300_000
            assert time.monotonic() - began_s > 0.04
            assert sent_again() > 0
        with open_shell("studio-a") as shell:
            assert shell.run(["true"]).ok
