"""Machines for tests: each with a network, mounts, processes, home folder and sshd of its own, on one Linux kernel.

`network` is the fixture: `network.add("studio-a", mac=folder)` boots a machine that answers ssh under its name and
whose commands say what was recorded on a Mac. The machines hang on a bridge in a namespace of its own, where the
coordinator lives: `with network.inside():` moves the calling thread there, and what it starts.
Nothing outlives the test, not even when it is killed: each machine dies with the thread that booted it.

    network
    ├── coordinator   10.77.0.1, the bridge; `ssh` on PATH reads network.config
    ├── studio-a      10.77.0.11, at home in network.folder/studio-a
    └── studio-b      10.77.0.12
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

SUBNET = "10.77.0"
BAD_LINE = Path(__file__).with_name("bad_line.py")
START_S = 20.0
CLONE_NEWNET = 0x40000000
DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
NEEDED = ("unshare", "nsenter", "setpriv", "ip", "ssh", "ssh-keygen", "sshd")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

LIBC = ctypes.CDLL(None, use_errno=True)


def unavailable() -> str:
    """Why machines cannot be made here, or ""."""
    if sys.platform != "linux":
        return "network namespaces are a feature of Linux"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in NEEDED if shutil.which(tool, path=f"{os.environ['PATH']}:{SYSTEM_PATH}") is None]
    if missing:
        return f"missing: {', '.join(missing)} (tests/netns/debian-packages.txt)"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"this kernel or container refuses namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """An empty network; skips where there can be none, and says why."""
    if why := unavailable():
        pytest.skip(why)
    with Network(tmp_path / "network") as made:
        monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        yield made


class Network:
    """A bridge, the coordinator's side of it, and the machines on it. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"  # first on the coordinator's PATH
        self.config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        self.key = folder / "id_ed25519"
        self.machines: dict[str, Machine] = {}
        self.bin.mkdir(parents=True)
        self.known_hosts.touch()
        self._configured: dict[str, str] = {}
        for tool in ("ssh", "scp", "sftp"):
            _script(self.bin / tool, f'exec {shutil.which(tool)} -F {self.config} "$@"\n')
        _keygen(self.key)
        self.configure("")
        self._place = _Namespaces(["unshare", "--net", "sh", "-c", "ip link set lo up; echo up; exec sleep infinity"])
        # An address of its own: else it is that of a port, and another one when that port's machine is switched off.
        self._ip("link add bridge address 02:77:00:00:00:01 type bridge mcast_snooping 0")
        self._ip(f"address add {SUBNET}.1/24 dev bridge")
        self._ip("link set bridge up")

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines.values():
            machine.kill()
        self._place.kill()

    def add(self, name: str, *, mac: Path | None = None, sshd: str | None = "", trusted: bool = True) -> Machine:
        """Boot a machine. `mac`: the recorded folder whose commands it has. `sshd`: more lines for sshd_config, or
        None for a machine without sshd. `trusted`: whether the coordinator's known_hosts has its key.
        """
        machine = Machine(self, name, f"{SUBNET}.{len(self.machines) + 11}", mac, sshd)
        self.machines[name] = machine
        self.configure(f"Host {name}\n  HostName {machine.ip}\n")
        if trusted:
            self.trust(machine)
        machine.boot()
        return machine

    def configure(self, more: str) -> None:
        """Put lines in front of the coordinator's ssh configuration, which every machine has too."""
        self._configured[more] = more
        always = "User root\nIdentityFile {key}\nIdentitiesOnly yes\nUserKnownHostsFile {known}\n"
        hosts = "".join(reversed(self._configured.values()))
        text = f"{hosts}Host *\n{always}GlobalKnownHostsFile /dev/null\n"
        self.config.write_text(text.format(key=self.key, known=self.known_hosts))

    def trust(self, machine: Machine) -> None:
        """Put the machine's key into known_hosts, in place of an older one."""
        lines = [line for line in self.known_hosts.read_text().splitlines() if not line.startswith(f"{machine.ip} ")]
        kind, key = machine.public_key.split()[:2]
        self.known_hosts.write_text("\n".join([*lines, f"{machine.ip} {kind} {key}"]) + "\n")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is at the coordinator, with the threads and processes that it starts there."""
        ours = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        theirs = os.open(f"/proc/{self._place.pid}/ns/net", os.O_RDONLY)
        try:
            _setns(theirs)
            yield
        finally:
            _setns(ours)
            os.close(ours)
            os.close(theirs)

    def unplug(self, machine: Machine) -> None:
        """Pull its network cable."""
        self._ip(f"link set {machine.port} down")

    def plug(self, machine: Machine) -> None:
        """Put its network cable back."""
        self._ip(f"link set {machine.port} up")

    @contextlib.contextmanager
    def worsen(self, machine: Machine, *, loss: float, delay_s: float) -> Iterator[None]:
        """Its network cable loses this share of the frames and delays the others, each way."""
        assert machine.start([sys.executable, str(BAD_LINE), "plain", "en0"]).wait() == 0
        tap = f"bad{machine.port}"
        carry = [sys.executable, str(BAD_LINE), machine.port, tap, str(loss), str(delay_s)]
        line = _Namespaces(["nsenter", "-t", str(self._place.pid), "-n", "--", *carry])
        try:
            self._ip(f"link set {tap} master bridge")
            self._ip(f"link set {tap} up")
            self._ip(f"link set {machine.port} nomaster")
            yield
            self._ip(f"link set {machine.port} master bridge")
        finally:
            line.kill()

    def _attach(self, machine: Machine, pid: int) -> None:
        # always the same address, as a machine's is: else nobody finds it for a while after it was switched off and on
        number = int(machine.ip.rpartition(".")[2])
        self._ip(f"link add {machine.port} type veth peer name en0 address 02:77:00:00:01:{number:02x} netns {pid}")
        self._ip(f"link set {machine.port} master bridge")
        self.plug(machine)

    def _detach(self, machine: Machine) -> None:
        """At once; the kernel would take its time, and the port could not be made again."""
        self._ip(f"link delete {machine.port}")

    def _announce(self, machine: Machine) -> None:
        """Wait until its port forwards frames; then whoever looked for it in vain looks anew."""
        while '"state":"forwarding"' not in self._ip(f"-d -j link show {machine.port}").replace(" ", ""):
            time.sleep(0.02)
        self._ip(f"neigh flush to {machine.ip} dev bridge")
        for other in self.machines.values():
            if other._place is not None and other is not machine:
                self._ip(f"neigh flush to {machine.ip} dev en0", other.pid)

    def _ip(self, arguments: str, pid: int | None = None) -> str:
        """What `ip` prints in the network namespace of `pid`, or in the coordinator's."""
        command = ["nsenter", "-t", str(pid or self._place.pid), "-n", "ip", *arguments.split()]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Machine:
    """One machine. `home` is its home folder, under the same path as here; `bin` the commands first on its PATH."""

    def __init__(self, network: Network, name: str, ip: str, mac: Path | None, sshd: str | None) -> None:
        self.name = name
        self.ip = ip
        self.port = f"port{ip.rpartition('.')[2]}"
        self.home = network.folder / name
        self.bin = self.home / ".machine" / "bin"
        self.log = network.folder / f"{name}.log"
        self._network = network
        self._sshd = sshd
        self._place: _Namespaces | None = None
        self._started: list[subprocess.Popen[str]] = []
        self.bin.mkdir(parents=True)
        (self.bin.parent / "id").write_text(uuid.uuid4().hex + "\n")
        self.new_key()
        self._client_files()
        if mac is not None:
            self._act_as(mac)

    @property
    def public_key(self) -> str:
        return (self.bin.parent / "host_key.pub").read_text()

    @property
    def running(self) -> bool:
        return self._place is not None

    @property
    def pid(self) -> int:
        """The machine's first process, as seen from outside."""
        assert self._place is not None, f"{self.name} is not running"
        return psutil.Process(self._place.pid).children()[0].pid

    def boot(self) -> None:
        """Start it, with its disk as it is. Returns when sshd listens."""
        self._write_files()
        files = shlex.quote(str(self.bin.parent))
        last = "exec sleep infinity" if self._sshd is None else f"exec /usr/sbin/sshd -D -e -f {files}/sshd_config"
        lines = (
            "set -e; echo up; read attached",
            f"ip link set lo up; ip address add {self.ip}/24 broadcast + dev en0; ip link set en0 up",
            f"mount --bind {files}/passwd /etc/passwd; mount -t tmpfs tmpfs /run; mkdir -p /run/sshd",
            f"[ ! -f /etc/machine-id ] || mount --bind {files}/id /etc/machine-id",
            f"export HOME={shlex.quote(str(self.home))}; cd; hostname {self.name}; echo booted; {last}",
        )
        new = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._place = _Namespaces([*new, "sh", "-c", "; ".join(lines)], log=self.log)
        self._network._attach(self, self._place.pid)
        self._place.go_on()
        self._place.wait_for("booted")
        if self._sshd is not None:
            self._place.wait_for("Server listening on 0.0.0.0")
        self._network._announce(self)

    def kill(self) -> None:
        """Cut its power: all its processes end at once. The disk stays; `boot` starts it again."""
        if self._place is not None:
            self._network._detach(self)
            self._place.kill()
            self._place = None
        for process in self._started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._started.clear()

    def freeze(self) -> None:
        """It answers pings and takes connections, but all its processes stand still."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """They go on."""
        self._signal_all(signal.SIGCONT)

    def new_key(self) -> None:
        """Another host key, as after a reinstallation; from the next boot on."""
        _keygen(self.bin.parent / "host_key")

    def start(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        """Start a process on the machine; it ends with the machine. Its output is read through a pipe."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-p", "--"]
        # a preloaded OpenBLAS starts threads, with which nsenter cannot enter
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        process = subprocess.Popen([*DIE_WITH_US, *enter, *argv], stdout=subprocess.PIPE, text=True, env=environment)
        self._started.append(process)
        return process

    def processes(self) -> list[str]:
        """The names of what runs on it."""
        return [child.name() for child in psutil.Process(self.pid).children(recursive=True)]

    def command(self, name: str, script: str) -> None:
        """Put a shell script first on its PATH."""
        _script(self.bin / name, script)

    def _signal_all(self, number: int) -> None:
        first = psutil.Process(self.pid)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # one that ended meanwhile
                process.send_signal(number)

    def _write_files(self) -> None:
        """Its sshd_config, and a passwd in which root is at home in this machine's own folder."""
        users = Path("/etc/passwd").read_text()
        moved = re.sub(r"^(root:[^:]*:0:0:[^:]*):[^:]*:", rf"\1:{self.home}:", users, flags=re.MULTILINE)
        (self.bin.parent / "passwd").write_text(moved)
        lines = [
            "ListenAddress 0.0.0.0",
            f"HostKey {self.bin.parent}/host_key",
            "AuthorizedKeysFile .ssh/authorized_keys",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "PermitRootLogin yes",
            "PidFile none",
            "PrintMotd no",
            "Subsystem sftp internal-sftp",
            f"SetEnv PATH={self.bin}:{SYSTEM_PATH}",
        ]
        text = f"{self._sshd or ''}\n" + "\n".join(lines) + "\n"
        (self.bin.parent / "sshd_config").write_text(text)

    def _client_files(self) -> None:
        """What it needs to be logged into, and to log into the others with the same configuration."""
        ssh = self.home / ".ssh"
        ssh.mkdir(mode=0o700)
        shutil.copy(self._network.key.with_suffix(".pub"), ssh / "authorized_keys")
        (ssh / "config").symlink_to(self._network.config)

    def _act_as(self, recorded: Path) -> None:
        said = self.bin.parent / "said"
        shutil.copytree(recorded, said)
        table = json.loads((Path(__file__).parent.parent / "macs" / "COMMANDS.json").read_text())
        table |= {"uname": ["uname", "-s"]}
        if not (said / "uname.out").exists():
            (said / "uname.out").write_text("Darwin\n")
        programs: dict[str, dict[str, str]] = {}
        for name, argv in table.items():
            if (said / f"{name}.out").exists() and "/" not in argv[0]:
                programs.setdefault(argv[0], {})[" ".join(argv[1:])] = name
        for program, cases in programs.items():
            self.command(program, _replay(program, cases, said))


def _replay(program: str, cases: dict[str, str], said: Path) -> str:
    """A script that prints what was recorded for the arguments it knows, and else is the real program."""
    real = {"python3": sys.executable}.get(program) or shutil.which(program) or "/bin/false"
    known = "\n".join(f"{shlex.quote(arguments)}) name={name};;" for arguments, name in cases.items())
    return f"""\
case "$*" in
{known}
*) exec {real} "$@";;
esac
said={said}/$name
[ ! -f $said.err ] || cat $said.err >&2
cat $said.out
[ ! -f $said.rc ] || exit $(cat $said.rc)
"""


class _Namespaces:
    """A process with namespaces of its own, which end with it; and it ends with the thread that made it."""

    def __init__(self, argv: list[str], log: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [*DIE_WITH_US, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.pid = self._process.pid
        self._lines: list[str] = []
        self._ended = False
        self._news = threading.Condition()
        self._log = log
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for("up")

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("attached\n")
        self._process.stdin.close()

    def wait_for(self, words: str) -> None:
        """Until a line with these words was printed."""
        with self._news:
            self._news.wait_for(lambda: self._ended or any(words in line for line in self._lines), START_S)
            if not any(words in line for line in self._lines):
                raise RuntimeError(f"no {words!r} from {self._process.args}: {self._lines}")

    def kill(self) -> None:
        """End all processes in there; when this returns, they are gone."""
        inner = psutil.Process(self.pid).children() if self._process.poll() is None else []
        for first in inner:
            first.kill()  # the kernel ends the others of its namespace with it, and then lets unshare end
        if not inner:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
            if self._log is not None:
                with self._log.open("a") as log:
                    log.write(line)
        with self._news:
            self._ended = True
            self._news.notify_all()


def _setns(descriptor: int) -> None:
    if LIBC.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _keygen(path: Path) -> None:
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
