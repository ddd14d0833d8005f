"""Shells: this machine's, recordings, and real sshd's in network namespaces."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from netns.machines import Network
from processes import ends

from cluster.errors import (
    ClusterError,
    CommandTimedOut,
    CopyFailed,
    HostKeyChanged,
    HostKeyUnknown,
    HostUnreachable,
    LoginRefused,
    SshUnusable,
)
from cluster.macs import ssh
from cluster.macs.ssh import LocalShell, RecordedShell, Result, batch_login, on_all, open_shell
from cluster.macs.ssh_login import settings_of

CONNECT_S = 2.0


@pytest.fixture
def ssh_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of ssh's own, empty at first."""
    real = shutil.which("ssh")
    if real is None:
        pytest.skip("there is no ssh here (Debian: openssh-client)")
    config, folder = tmp_path / "ssh_config", tmp_path / "bin"
    folder.mkdir()
    config.write_text("")
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {real} -F {config} "$@"\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return config


# ---------------------------------------------------------------- this machine


def test_a_local_command_gives_status_and_both_outputs():
    result = LocalShell().run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert result == Result(3, "out\n", "err\n")


def test_a_local_command_that_is_missing_gives_status_127():
    result = LocalShell().run(["no-such-command-here"])
    assert (result.rc, "no-such-command-here" in result.err) == (ssh.MISSING, True)


def test_a_local_command_that_a_signal_ended_has_a_negative_status():
    assert LocalShell().run(["sh", "-c", "kill -9 $$"]).rc == -signal.SIGKILL


def test_a_local_command_that_hangs_is_ended_with_what_it_started(tmp_path):
    note = tmp_path / "pid"
    with pytest.raises(CommandTimedOut, match="did not end within 1 s"):
        LocalShell().run(["sh", "-c", f"sleep 600 & echo $! >{note}; wait"], timeout_s=1)
    assert ends(int(note.read_text()))


def test_a_local_command_reads_no_input():
    assert LocalShell().run(["cat"], timeout_s=5) == Result(0)


def test_output_that_is_no_utf8_is_still_text():
    assert LocalShell().run(["printf", "a\\377b"]).out == "a�b"


def test_a_local_copy_keeps_the_mode_and_replaces_in_one_step(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    source.chmod(0o750)
    target.write_text("old")
    LocalShell().put(source, str(target))
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o750)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_a_local_copy_that_fails_names_the_file(tmp_path):
    with pytest.raises(CopyFailed, match="no-such-file"):
        LocalShell().get(str(tmp_path / "no-such-file"), tmp_path / "here")


# ---------------------------------------------------------------- recordings


def test_a_recording_replays_outputs_and_status(tmp_path):
    (tmp_path / "list.out").write_text("head\n")
    (tmp_path / "list.err").write_text("trouble\n")
    (tmp_path / "list.rc").write_text("255\n")
    shell = RecordedShell(tmp_path, {"list": ["ibv_devices", "-l"]})
    assert shell.run(["ibv_devices", "-l"]) == Result(255, "head\n", "trouble\n")


def test_a_command_that_was_not_recorded_is_told_from_one_that_was_missing(tmp_path):
    assert RecordedShell(tmp_path, {}).run(["uname"]) == Result(ssh.MISSING, err=ssh.NOT_RECORDED)


# ---------------------------------------------------------------- all at once


def test_one_hosts_failure_stands_beside_the_others_results():
    def fn(name: str) -> str:
        if name == "b":
            raise HostUnreachable("b is away")
        return name.upper()

    first, second, third = on_all(["a", "b", "c"], fn)
    assert (first, third) == ("A", "C")
    assert isinstance(second, HostUnreachable)


def test_a_bug_in_the_function_is_no_result():
    with pytest.raises(ZeroDivisionError):
        on_all([1, 0], lambda n: 1 // n)


def test_no_hosts_give_no_results():
    assert on_all([], str) == []


# ---------------------------------------------------------------- ssh's configuration


def test_included_files_aliases_and_defaults_count(ssh_config):
    more = ssh_config.with_name("more")
    more.write_text("Host studio-*\n  User anna\n  Port 2222\n  HostName %h.example\n  IdentityFile ~/key-%h\n")
    ssh_config.write_text(f"Include {more}\nHost *\n  ConnectTimeout 7\n")
    found = settings_of("studio-a")
    assert (found.user, found.port, found.hostname) == ("anna", 2222, "studio-a.example")
    assert (found.known_as, found.values["connecttimeout"]) == ("[studio-a.example]:2222", "7")


def test_a_user_in_front_of_the_name_counts(ssh_config):
    assert settings_of("anna@studio-a").user == "anna"


def test_a_broken_configuration_names_its_file(ssh_config):
    ssh_config.write_text("NoSuchOption yes\n")
    with pytest.raises(SshUnusable, match=str(ssh_config)):
        settings_of("studio-a")


def test_a_machine_without_ssh_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SshUnusable, match="no `ssh`"):
        open_shell("studio-a")


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "", " ", "a b"])
def test_what_is_no_name_never_becomes_an_option_of_ssh(name):
    with pytest.raises(HostUnreachable, match="no name of a host"):
        open_shell(name)


def test_a_name_that_nobody_knows_is_told_as_that(ssh_config):
    with pytest.raises(HostUnreachable, match=r"no-such-host\.invalid is not known"):
        open_shell("no-such-host.invalid")


def test_localhost_is_this_machine_without_ssh():
    assert isinstance(open_shell("localhost"), LocalShell)


# ---------------------------------------------------------------- real sshd's


def test_a_command_over_ssh_gives_status_and_both_outputs(network: Network):
    network.add("studio-a")
    with network.inside(), open_shell("studio-a", CONNECT_S) as shell:
        assert shell.run(["sh", "-c", "echo 'o u t'; echo err >&2; exit 3"]) == Result(3, "o u t\n", "err\n")
        assert shell.run(["hostname"]).out == "studio-a\n"
        assert shell.run(["printf", "%s|", "a b", "$HOME", "it's", ""]).out == "a b|$HOME|it's||"
        assert shell.run(["cat"], timeout_s=5) == Result(0)  # no input


def test_large_outputs_of_both_kinds_arrive_whole(network: Network):
    network.add("studio-a")
    with network.inside(), open_shell("studio-a", CONNECT_S) as shell:
        result = shell.run(["sh", "-c", "seq 1 300000 & seq 1 300000 >&2; wait"])
    assert [len(text.splitlines()) for text in (result.out, result.err)] == [300000, 300000]


def test_a_missing_command_over_ssh_gives_status_127(network: Network):
    network.add("studio-a")
    with network.inside(), open_shell("studio-a", CONNECT_S) as shell:
        assert shell.run(["no-such-command-here"]).rc == ssh.MISSING


def test_banners_and_chatty_login_files_are_no_part_of_an_answer(network: Network):
    banner = network.folder / "banner"
    banner.write_text("Authorised use only!\n")
    machine = network.add("studio-a", sshd=f"Banner {banner}")
    (machine.home / ".bashrc").write_text("echo welcome back; echo noise >&2\n")
    with network.inside(), open_shell("studio-a", CONNECT_S) as shell:
        assert shell.run(["sh", "-c", "echo yes; echo no >&2"]) == Result(0, "yes\n", "no\n")
        assert batch_login("studio-a") == ""


def test_files_go_there_and_back_with_their_mode(network: Network, tmp_path):
    machine = network.add("studio-a")
    here, back = tmp_path / "here", tmp_path / "back"
    here.write_bytes(bytes(range(256)) * 1000)
    here.chmod(0o700)
    with network.inside(), open_shell("studio-a", CONNECT_S) as shell:
        shell.put(here, "there")
        shell.get("there", back)
        with pytest.raises(CopyFailed, match="studio-a: could not copy"):
            shell.get("no-such-file", tmp_path / "nothing")
        with pytest.raises(CopyFailed, match="no-such-folder"):
            shell.put(here, "no-such-folder/there")
    assert back.read_bytes() == here.read_bytes() == (machine.home / "there").read_bytes()
    assert (machine.home / "there").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in machine.home.glob("there*")] == ["there"]
    assert not (tmp_path / "nothing").exists()


def test_a_command_that_hangs_is_given_up_and_the_connection_still_works(network: Network):
    network.add("studio-a")
    with network.inside(), open_shell("studio-a", CONNECT_S) as shell:
        with pytest.raises(CommandTimedOut, match="studio-a: `sleep 600` did not end within 1 s"):
            shell.run(["sleep", "600"], timeout_s=1)
        assert shell.run(["echo", "on"]).out == "on\n"


def test_a_machine_that_loses_power_is_told_as_a_broken_connection_or_a_silent_one(network: Network):
    machine = network.add("studio-a")
    with network.inside(), open_shell("studio-a", CONNECT_S) as shell:
        machine.kill()
        with pytest.raises((HostUnreachable, CommandTimedOut), match="studio-a"):
            shell.run(["true"], timeout_s=1)
        machine.boot()
        with open_shell("studio-a", CONNECT_S) as again:
            assert again.run(["hostname"]).out == "studio-a\n"


def test_a_frozen_host_is_told_within_the_time_limit(network: Network):
    network.add("studio-a").freeze()
    with network.inside(), pytest.raises(HostUnreachable, match="studio-a: no ssh answer within 2 s"):
        open_shell("studio-a", CONNECT_S)


def test_a_host_without_sshd_refuses(network: Network):
    network.add("studio-a", sshd=None)
    with network.inside(), pytest.raises(HostUnreachable, match="refuses the connection") as caught:
        open_shell("studio-a", CONNECT_S)
    assert "Remote Login" in caught.value.hint


def test_an_unplugged_host_does_not_hang_the_caller(network: Network):
    network.unplug(network.add("studio-a"))
    with network.inside(), pytest.raises(HostUnreachable, match="studio-a"):
        open_shell("studio-a", CONNECT_S)


def test_an_unknown_host_key_is_an_error_with_its_fingerprint(network: Network):
    machine = network.add("studio-a", trusted=False)
    said = subprocess.run(
        ["ssh-keygen", "-lf", machine.bin.parent / "host_key.pub"], capture_output=True, text=True, check=True
    )
    with network.inside(), pytest.raises(HostKeyUnknown) as caught:
        open_shell("studio-a", CONNECT_S)
    assert said.stdout.split()[1] in caught.value.message
    assert "ssh studio-a" in caught.value.hint


def test_a_user_who_trusts_new_keys_by_configuration_is_not_asked(network: Network):
    network.add("studio-a", trusted=False)
    network.configure("Host studio-*\n  StrictHostKeyChecking accept-new\n")
    with network.inside(), open_shell("studio-a", CONNECT_S) as shell:
        assert shell.run(["hostname"]).out == "studio-a\n"


def test_a_changed_host_key_is_an_error_that_says_how_to_forget_the_old_one(network: Network):
    machine = network.add("studio-a")
    machine.kill()
    machine.new_key()
    machine.boot()
    with network.inside(), pytest.raises(HostKeyChanged) as caught:
        open_shell("studio-a", CONNECT_S)
    assert f"ssh-keygen -R '{machine.ip}'" in caught.value.hint


def test_a_host_that_takes_none_of_our_keys_says_what_to_type(network: Network):
    (network.add("studio-a").home / ".ssh" / "authorized_keys").write_text("")
    with network.inside(), pytest.raises(LoginRefused, match=r"does not let root in \(1 key tried\)") as caught:
        open_shell("studio-a", CONNECT_S)
    assert "ssh-copy-id studio-a" in caught.value.hint


def test_a_key_with_a_passphrase_needs_the_agent_and_works_with_it(
    network: Network,
    monkeypatch,
    tmp_path,
):
    network.add("studio-a")
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", network.key]
    subprocess.run(change, check=True, capture_output=True)
    with network.inside(), pytest.raises(LoginRefused) as caught:
        open_shell("studio-a", CONNECT_S)
    assert f"ssh-add {network.key}" in caught.value.hint
    socket = tmp_path / "agent"
    ask = tmp_path / "ask"
    ask.write_text("#!/bin/sh\necho secret\n")
    ask.chmod(0o755)
    with subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout is not None and agent.stdout.readline()  # it listens
            monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
            monkeypatch.setenv("SSH_ASKPASS", str(ask))
            monkeypatch.setenv("SSH_ASKPASS_REQUIRE", "force")
            subprocess.run(["ssh-add", "-q", network.key], check=True, capture_output=True)
            with network.inside(), open_shell("studio-a", CONNECT_S) as shell:
                assert shell.run(["hostname"]).out == "studio-a\n"
        finally:
            agent.terminate()


def test_a_jump_host_leads_to_one_that_cannot_be_reached_directly(network: Network):
    network.add("gate")
    network.add("studio-a")
    network.configure("Host inner\n  HostName 10.77.0.12\n  ProxyJump gate\n")
    with network.inside():
        with open_shell("inner", CONNECT_S) as shell:
            assert shell.run(["sh", "-c", "echo $SSH_CLIENT"]).out.split()[0] == "10.77.0.11"
        network.machines["gate"].kill()
        with pytest.raises(HostUnreachable, match=r"inner: .*\(gate\)"):
            open_shell("inner", CONNECT_S)


def test_a_proxy_command_carries_the_connection(network: Network):
    network.add("studio-a")
    program = "import socket,sys,threading,os\ns=socket.create_connection(sys.argv[1:])\n"
    program += "threading.Thread(target=lambda: [os.write(1, d) for d in iter(lambda: s.recv(9999), b'')], daemon=True)"
    program += ".start()\nfor d in iter(lambda: os.read(0, 9999), b''): s.sendall(d)\n"
    script = network.folder / "carry.py"
    script.write_text(program)
    network.configure(f"Host by-command\n  HostName 10.77.0.11\n  ProxyCommand {sys.executable} {script} %h %p\n")
    with network.inside(), open_shell("by-command", CONNECT_S) as shell:
        assert shell.run(["hostname"]).out == "studio-a\n"


def test_the_systems_ssh_is_tried_without_a_question(network: Network):
    network.add("studio-a")
    (network.add("studio-b").home / ".ssh" / "authorized_keys").write_text("")
    with network.inside():
        assert batch_login("studio-a") == ""
        assert "Permission denied" in batch_login("studio-b")


def test_all_hosts_are_tried_and_each_failure_names_its_own(network: Network):
    network.add("studio-a")
    network.add("studio-b", sshd=None)
    network.add("studio-c", trusted=False)

    def hostname(name: str) -> str:
        with open_shell(name, CONNECT_S) as shell:
            return shell.run(["hostname"]).out.strip()

    with network.inside():
        outcomes = on_all(["studio-a", "studio-b", "studio-c"], hostname)
    assert [type(outcome) for outcome in outcomes] == [str, HostUnreachable, HostKeyUnknown]
    assert all(
        f"studio-{c}" in e.message for c, e in zip("bc", outcomes[1:], strict=True) if isinstance(e, ClusterError)
    )
