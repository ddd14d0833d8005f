"""How ssh.py gets into a host: what ssh's own configuration says, the connection, its host key, the keys that log in.

`ssh -G` evaluates the configuration exactly as mlx.launch's ssh will (Include, Match, tokens); paramiko does the rest.
A jump host is reached with the system's ssh. Called by ssh.py, and by carry.py for links between hosts.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from paramiko.agent import AgentKey, AgentSSH

from cluster.errors import HostKeyChanged, HostKeyUnknown, HostUnreachable, LoginRefused, SshUnusable

SSH_CONFIG_S = 10.0
TRUSTING = ("no", "off", "false", "accept-new")


@dataclass(frozen=True, slots=True)
class Settings:
    """What ssh's configuration means for one host; `values` has the last value of each key of `ssh -G`, lower case."""

    name: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    values: dict[str, str] = field(default_factory=dict)

    @property
    def known_as(self) -> str:
        """The name under which known_hosts has this host's key."""
        alias = self.values.get("hostkeyalias", "")
        if alias and alias != "none":
            return alias
        return self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}"

    @property
    def known_hosts(self) -> list[Path]:
        words = f"{self.values.get('userknownhostsfile', '')} {self.values.get('globalknownhostsfile', '')}"
        return [path for path in (Path(word).expanduser() for word in shlex.split(words)) if path.is_file()]


def settings_of(name: str) -> Settings:
    """What `ssh -G name` says. Raises SshUnusable when ssh is missing or rejects its configuration."""
    if name.startswith("-") or not name.strip() or any(c.isspace() for c in name):
        raise HostUnreachable(f"{name!r} is no name of a host.", hint="Name hosts as you would after `ssh`.")
    try:
        said = subprocess.run(
            ["ssh", "-G", "--", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SSH_CONFIG_S,
        )
    except FileNotFoundError:
        raise SshUnusable("There is no `ssh` on this machine.", hint="Install OpenSSH's client.") from None
    except subprocess.TimeoutExpired:
        raise SshUnusable(
            f"`ssh -G {name}` did not end within {SSH_CONFIG_S:.0f} s.", hint="Look at `Match exec` in ~/.ssh/config."
        ) from None
    if said.returncode != 0:
        words = " ".join(said.stderr.split())
        raise SshUnusable(f"ssh does not accept its configuration: {words}.", hint="Mend the file and line it names.")
    pairs = [line.split(" ", 1) for line in said.stdout.splitlines() if " " in line]
    values = {key.lower(): value for key, value in pairs}
    files = tuple(Path(value).expanduser() for key, value in pairs if key.lower() == "identityfile")
    return Settings(name, values["hostname"], int(values["port"]), values["user"], files, values)


def open_transport(settings: Settings, timeout_s: float) -> tuple[paramiko.Transport, subprocess.Popen[bytes] | None]:
    """A logged-in connection, and the process of its jump if there is one. Raises as `ssh.open_shell` says."""
    wanted = settings.values.get("connecttimeout", "none")
    limit = float(wanted) if wanted.isdigit() and int(wanted) > 0 else timeout_s
    link, proxy = _connect(settings, limit)
    transport = None
    try:
        transport = paramiko.Transport(link)
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = limit
        known = _known_keys(settings)
        _prefer(transport, known)
        _negotiate(transport, settings, limit, proxy)
        _check_key(transport.get_remote_server_key(), known, settings)
        _log_in(transport, settings)
        transport.set_keepalive(15)
        return transport, proxy
    except BaseException:
        if transport is not None:
            transport.close()
        link.close()
        if proxy is not None:
            proxy.kill()
            proxy.wait()
        raise


# ---------------------------------------------------------------- the connection


def _connect(settings: Settings, limit: float) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    command = _proxy_command(settings, limit)
    if command is not None:
        ours, theirs = socket.socketpair()
        with theirs:
            proxy = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL)
        return ours, proxy
    where = f"{settings.hostname} port {settings.port}"
    try:
        return socket.create_connection((settings.hostname, settings.port), timeout=limit), None
    except socket.gaierror:
        reason, hint = f"the name {settings.hostname} is not known", "Check the spelling, or name its address."
    except TimeoutError:
        reason, hint = f"no answer from {where} within {limit:.0f} s", "Is it switched on, awake and on this network?"
    except ConnectionRefusedError:
        reason = f"{where} refuses the connection"
        hint = "Switch on System Settings > General > Sharing > Remote Login there."
    except OSError as error:
        reason, hint = f"{where}: {error.strerror or error}", "Is it on this network?"
        if error.errno == 65:
            hint = "If ping works: allow this terminal under System Settings > Privacy & Security > Local Network."
    raise HostUnreachable(f"{settings.name}: {reason}.", hint=hint)


def _proxy_command(settings: Settings, limit: float) -> list[str] | None:
    """The argv whose input and output are the connection, when the configuration wants a jump or a proxy command."""
    jumps = settings.values.get("proxyjump", "none")
    if jumps != "none":
        *before, last = jumps.split(",")
        chain = ["-J", ",".join(before)] if before else []
        where = f"[{settings.hostname}]:{settings.port}"
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={limit:.0f}", "-W", where]
        match = re.fullmatch(r"(?:ssh://)?(.+?)(?::(\d+))?", last)
        assert match is not None  # ssh itself parsed it
        port = ["-p", match[2]] if match[2] else []
        return ["ssh", *options, *chain, *port, "--", match[1].strip("[]")]
    command = settings.values.get("proxycommand", "none")
    if command == "none":
        return None
    tokens = {"%h": settings.hostname, "%p": str(settings.port), "%r": settings.user, "%n": settings.name, "%%": "%"}
    return ["sh", "-c", "exec " + re.sub(r"%[hprn%]", lambda m: tokens[m[0]], command)]


def _negotiate(
    transport: paramiko.Transport, settings: Settings, limit: float, proxy: subprocess.Popen[bytes] | None
) -> None:
    try:
        transport.start_client(timeout=limit)
        if not transport.initial_kex_done:  # it also returns, without a word, when the time is up
            raise TimeoutError
    except (paramiko.SSHException, EOFError, OSError) as error:
        through = ""
        if proxy is not None:
            through = f" through its jump ({settings.values.get('proxyjump', settings.values.get('proxycommand'))})"
        words = str(error) or type(error).__name__
        silent = isinstance(error, TimeoutError) or "banner" in words or "Timeout" in words
        reason = f"no ssh answer within {limit:.0f} s" if silent else f"ssh could not be agreed on: {words}"
        raise HostUnreachable(
            f"{settings.name}: {reason}{through}.",
            hint=f"Is it overloaded or half asleep? Try: ssh -v {settings.name} true",
        ) from error


# ---------------------------------------------------------------- the host's key


def _known_keys(settings: Settings) -> dict[str, paramiko.PKey]:
    """The keys that known_hosts has for this host, by type."""
    found: dict[str, paramiko.PKey] = {}
    for file in settings.known_hosts:
        keys = paramiko.HostKeys()
        with contextlib.suppress(OSError, paramiko.SSHException):  # unreadable: its hosts count as unknown
            keys.load(str(file))
        for kind, key in (keys.lookup(settings.known_as) or {}).items():
            found.setdefault(kind, key)
    return found


def _prefer(transport: paramiko.Transport, known: dict[str, paramiko.PKey]) -> None:
    """Ask first for a kind of key that known_hosts has, so that the host does not show another."""
    options = transport.get_security_options()
    wanted = {"rsa-sha2-512", "rsa-sha2-256"} if "ssh-rsa" in known else set()
    first = [kind for kind in options.key_types if kind in known or kind in wanted]
    options.key_types = (*first, *(kind for kind in options.key_types if kind not in first))


def _check_key(shown: paramiko.PKey, known: dict[str, paramiko.PKey], settings: Settings) -> None:
    if shown in known.values():
        return
    print_ = fingerprint(shown)
    if shown.get_name() in known:
        raise HostKeyChanged(
            f"{settings.name} shows another {shown.get_name()} key ({print_}) than known_hosts has for it.",
            hint=f"If it was set up anew: ssh-keygen -R '{settings.known_as}', then ssh {settings.name} once. "
            "If not: do not connect; another machine may have its address.",
        )
    if settings.values.get("stricthostkeychecking", "ask") in TRUSTING:
        return
    raise HostKeyUnknown(
        f"{settings.name}'s key is not known yet ({shown.get_name()}, {print_}).",
        hint=f"Run `ssh {settings.name}` once, compare the fingerprint and answer yes.",
    )


def fingerprint(key: paramiko.PKey) -> str:
    """As ssh prints it: SHA256:..."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


# ---------------------------------------------------------------- logging in


class _Agent(AgentSSH):
    """The ssh agent at a socket: paramiko's own class knows only the one in the environment."""

    def __init__(self, path: str) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(SSH_CONFIG_S)
        try:
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]
        except (OSError, paramiko.SSHException):
            connection.close()
            raise


def _log_in(transport: paramiko.Transport, settings: Settings) -> None:
    locked: list[Path] = []
    tried = 0
    with _agent(settings) as agent_keys:
        for key in _keys(settings, agent_keys, locked):
            tried += 1
            try:
                transport.auth_publickey(settings.user, key)
            except paramiko.BadAuthenticationType:
                break  # it takes no keys at all
            except paramiko.AuthenticationException as error:
                if not transport.is_active() or "timeout" in str(error).lower():
                    break
            except (paramiko.SSHException, EOFError, OSError):
                if not transport.is_active():
                    break
            if transport.is_authenticated():
                return
    hint = f"Put your key there: ssh-copy-id {settings.name}"
    if locked:
        hint = f"{locked[0]} has a passphrase and is not in the agent: ssh-add {locked[0]}"
    elif tried == 0:
        hint = f"There is no key to show. Make one (ssh-keygen -t ed25519), then: ssh-copy-id {settings.name}"
    count = "1 key" if tried == 1 else f"{tried} keys"
    raise LoginRefused(f"{settings.name} does not let {settings.user} in ({count} tried).", hint=hint)


@contextlib.contextmanager
def _agent(settings: Settings) -> Iterator[list[AgentKey]]:
    """The agent's keys; none if there is no agent."""
    path = settings.values.get("identityagent", "SSH_AUTH_SOCK")
    if path == "SSH_AUTH_SOCK":
        path = os.environ.get("SSH_AUTH_SOCK", "none")
    elif path.startswith("$"):
        path = os.environ.get(path.strip("${}"), "none")
    try:
        agent = _Agent(os.path.expanduser(path)) if path not in ("none", "") else None
    except (OSError, paramiko.SSHException):
        agent = None
    if agent is None:
        yield []
        return
    try:
        yield list(agent.get_keys())
    finally:
        agent._close()  # type: ignore[attr-defined]


def _keys(settings: Settings, agent_keys: list[AgentKey], locked: list[Path]) -> Iterator[paramiko.PKey]:
    """In ssh's order: the agent's keys that the configuration names, its others, then key files."""
    named = {blob: file for file in settings.identity_files if (blob := _public_blob(file))}
    yield from (key for key in agent_keys if key.asbytes() in named)
    if settings.values.get("identitiesonly", "no") != "yes":
        yield from (key for key in agent_keys if key.asbytes() not in named)
    offered = {named[key.asbytes()] for key in agent_keys if key.asbytes() in named}
    for file in settings.identity_files:
        if file in offered or not file.is_file():
            continue
        try:
            yield paramiko.PKey.from_path(file)
        except (paramiko.PasswordRequiredException, TypeError):
            locked.append(file)
        except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError, OSError):
            continue  # a kind that paramiko cannot use, such as a security key's: ssh itself will say


def _public_blob(file: Path) -> bytes:
    try:
        return base64.b64decode(file.with_name(file.name + ".pub").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return b""
