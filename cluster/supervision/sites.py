"""The hosts of a launch as places where ranks run: whose ranks are there, ending them, the launch's secret.

Everything goes over ssh through `parallel.reap` there, on all hosts at once. Blocks; called in threads.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cluster.errors import ClusterError, HostBusy, ProcessStuck, RankFailed
from cluster.macs.ssh import Shell, on_all, open_shell
from cluster.ship.carry import ENVIRONMENT
from parallel import wire

REAP_S = 30.0
CONNECT_S = 5.0  # these hosts were reached a moment ago; one that is gone must not hold up the others
SECRET_FOLDER = ".local/share/cluster/secrets"
# A rank reads its secret when it starts; older ones are of launches that ended when their host could not be reached.
MAKE_ROOM = f"umask 077; cd; mkdir -p {SECRET_FOLDER}; find {SECRET_FOLDER} -type f -mmin +60 -delete; pwd"
OWN_PYTHON = f'exec "$HOME/{ENVIRONMENT}/bin/python" "$@"'


def python_argv(python: str | None) -> tuple[str, ...]:
    """How to run an interpreter on any host: `python` there, or the one that `cluster install` put there."""
    return (python,) if python else ("sh", "-c", OWN_PYTHON, "sh")


@dataclass(frozen=True, slots=True)
class Sites:
    """Hosts by the names that ssh knows, and the interpreter of their ranks (None: the installed one)."""

    hosts: tuple[str, ...]
    python: str | None = None

    def ranks(self) -> dict[str, list[wire.Running]]:
        """The ranks of any coordinator on each host. Raises the first host's ClusterError."""
        found: dict[str, list[wire.Running]] = {}
        for host, out in self._on_all(lambda shell: self._reap(shell, "list")).items():
            if isinstance(out, ClusterError):
                raise out
            found[host] = msgspec.json.decode(out, type=list[wire.Running])
        return found

    def clear(self, owner: str) -> list[str]:
        """End what a crashed coordinator of `owner` left; the hosts where that was. Raises HostBusy for another's."""
        there = self.ranks()
        for host, ranks in there.items():
            if foreign := next((rank.owner for rank in ranks if rank.owner != owner), None):
                raise HostBusy(
                    f"{host} already runs ranks of another cluster, started by {foreign or 'hand'}.",
                    hint="Run `cluster down` there first, or leave that host out.",
                )
        for launch in {rank.launch for ranks in there.values() for rank in ranks}:
            self.end(launch, 2.0)
        return [host for host, ranks in there.items() if ranks]

    def end(self, launch: str, grace_s: float) -> dict[str, wire.Reaped | ClusterError]:
        """End the ranks of `launch` on every host that can be reached, and see that they and its secret are gone."""

        def end(shell: Shell) -> str:
            out = self._reap(shell, "end", launch, f"{grace_s:g}")
            shell.run(["sh", "-c", f'rm -f "$HOME/{SECRET_FOLDER}/{launch}"'])
            return out

        return {
            host: out if isinstance(out, ClusterError) else msgspec.json.decode(out, type=wire.Reaped)
            for host, out in self._on_all(end).items()
        }

    def give_secret(self, launch: str, secret: str) -> dict[str, str]:
        """Put the launch's secret into a file of mode 0600 on every host; its path there. Raises ClusterError."""
        with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
            local = Path(folder) / "secret"
            local.touch(0o600)
            local.write_text(secret)

            def give(shell: Shell) -> str:
                made = shell.run(["sh", "-c", MAKE_ROOM])
                path = f"{made.out.strip()}/{SECRET_FOLDER}/{launch}"
                shell.put(local, path)
                return path

            paths: dict[str, str] = {}
            for host, path in self._on_all(give).items():
                if isinstance(path, ClusterError):
                    raise path
                paths[host] = path
            return paths

    def _reap(self, shell: Shell, *arguments: str) -> str:
        result = shell.run([*python_argv(self.python), "-m", "parallel.reap", *arguments], timeout_s=REAP_S)
        if not result.ok:
            words = (result.err or result.out).strip().splitlines() or [f"exit status {result.rc}"]
            raise RankFailed(
                f"{shell.name} cannot run the ranks' environment: {words[-1]}.",
                hint=f"`cluster install {shlex.quote(shell.name)}` puts it there.",
            )
        return result.out

    def _on_all(self, work: Callable[[Shell], str]) -> dict[str, str | ClusterError]:
        def visit(host: str) -> str:
            with open_shell(host, CONNECT_S) as shell:
                return work(shell)

        return dict(zip(self.hosts, on_all(self.hosts, visit), strict=True))


def raise_if_stuck(reports: dict[str, wire.Reaped | ClusterError]) -> None:
    """Raise ProcessStuck for the first host where a rank did not end, not even by SIGKILL."""
    for host, report in reports.items():
        if isinstance(report, wire.Reaped) and report.stuck:
            raise ProcessStuck(
                f"{host}: processes {', '.join(map(str, report.stuck))} do not end, not even by SIGKILL: the system or "
                "its GPU holds them.",
                hint=f"Reboot {host} to get its memory back.",
            )


def hosts_of(names: Sequence[str]) -> tuple[str, ...]:
    """Each name once, in order."""
    return tuple(dict.fromkeys(names))
