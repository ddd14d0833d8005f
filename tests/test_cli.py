"""The command line in process: usage errors, exit codes, and what is said when nothing runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cluster import cli
from cluster.config import NAMES, flag


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run `cluster ARGUMENTS` through `main`: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["cluster", *arguments])
        code: int | str | None = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_every_setting_has_its_flag():
    text = CliRunner().invoke(cli.app, ["up", "--help"]).stdout
    assert [flag(n) for n in NAMES if flag(n) not in text and n != "model"] == []


def test_help_names_every_command():
    text = CliRunner().invoke(cli.app, ["--help"]).stdout
    assert all(name in text for name in ("up", "down", "status", "logs", "chat", "client", "bench"))


def test_status_with_nothing_running_exits_with_1_and_says_so(run):
    code, _, err = run("status")
    assert code == 1
    assert err == "error: Nothing is running.\nhint: `cluster up` starts it.\n"


def test_json_status_with_nothing_running_is_json(run):
    code, out, _ = run("status", "--json")
    assert (code, json.loads(out)) == (1, {"running": False, "reason": "Nothing is running."})


def test_down_with_nothing_running_says_so_and_is_no_failure(run):
    assert run("down") == (0, "Nothing is running.\n", "")


@pytest.mark.parametrize("command", [("chat",), ("client", "opencode")])
def test_commands_that_need_a_cluster_say_that_none_runs(run, command):
    code, _, err = run(*command)
    assert (code, "Nothing is running" in err) == (1, True)


def test_logs_with_nothing_running_and_no_earlier_run_are_empty(run):
    assert run("logs") == (0, "", "Nothing is running.\n")


def test_a_wrong_setting_is_a_usage_error(run):
    code, _, err = run("up", "--port", "0")
    assert (code, err) == (2, "error: --port must be a whole number from 1 to 65535, not 0.\n")


def test_an_unknown_flag_is_a_usage_error(run):
    assert run("up", "--prot", "1")[0] == 2


def test_an_unknown_key_in_the_file_is_a_usage_error_with_the_nearest_one(run, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("prot: 1\n")
    code, _, err = run("up", "--config", str(file))
    assert code == 2
    assert err == f"error: `prot` in {file} is not a setting.\nhint: Did you mean `port`?\n"


def test_an_unknown_client_is_a_usage_error(run):
    code, _, err = run("client", "emacs")
    assert code == 2
    assert "opencode" in err


def test_a_bug_keeps_its_traceback(run, monkeypatch):
    def bug() -> None:
        raise KeyError("ours")

    monkeypatch.setattr(cli, "_folders", bug)
    with pytest.raises(KeyError):
        run("down")


@pytest.mark.parametrize(
    ("key", "variable", "terminal", "shown"),
    [
        (None, None, True, None),
        ("abc", "abc", True, "$CLUSTER_API_KEY"),
        ("abc", None, False, "$CLUSTER_API_KEY"),
        ("abc", "other", True, "abc"),
        ('a"$b', None, True, r"a\"\$b"),
    ],
)
def test_the_key_is_shown_only_on_a_terminal_that_lacks_the_variable(monkeypatch, key, variable, terminal, shown):
    monkeypatch.delenv("CLUSTER_API_KEY", raising=False)
    if variable:
        monkeypatch.setenv("CLUSTER_API_KEY", variable)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert cli._shown_key(cli.ClusterConfig(api_key=key)) == shown


def test_the_command_line_loads_no_heavy_library_before_it_needs_one():
    code = (
        "import sys, cluster.cli\n"
        "heavy = ('fastapi', 'transformers', 'uvicorn', 'httpx', 'rich', 'mlx', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded == "[]\n"


def test_the_package_runs_as_a_module():
    result = subprocess.run([sys.executable, "-m", "cluster", "--help"], capture_output=True, text=True, check=True)
    assert "OpenAI-compatible" in result.stdout
