from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from cluster.errors import CopyFailed, HostUnreachable
from cluster.ship.streams import answer, script, there

TICKS = "import itertools, json, time\nfor n in itertools.count():\n  print(json.dumps({'at': n}), flush=True)\n"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_last_line_is_the_answer_and_the_lines_before_tell_how_far_it_is():
    told: list[int] = []
    code = "print('motd');print('{\"at\": 1}');print('{\"at\": 5}');print('{\"end\": \"done\"}')"
    assert answer("a", python(code), told=told.append) == {"end": "done"}
    assert told == [1, 5]


def test_what_one_command_writes_another_reads(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"x" * 3_000_000)
    count = python("import sys; print('{\"count\": %d}' % len(sys.stdin.buffer.read()))")
    assert answer("a", count, feed=["dd", f"if={tmp_path / 'file'}", "bs=1048576", "skip=1"]) == {
        "count": 3_000_000 - (1 << 20)
    }


def test_a_failed_connection_is_told_with_sshs_words():
    code = "import sys; print('Permission denied (publickey).', file=sys.stderr); sys.exit(255)"
    with pytest.raises(HostUnreachable, match=r"a: the connection failed: Permission denied \(publickey\)"):
        answer("a", python(code))


def test_a_program_that_fails_is_told_with_its_words():
    with pytest.raises(CopyFailed, match=r"a: no answer \(exit code 3\): no room"):
        answer("a", python("import sys; print('no room', file=sys.stderr); sys.exit(3)"))


def test_a_host_without_python_is_told_so():
    with pytest.raises(CopyFailed, match="a has no Python") as raised:
        answer("a", ["sh", "-c", "exit 127"])
    assert raised.value.hint == "cluster install a"


def test_stopping_ends_the_command_and_what_feeds_it():
    stop = threading.Event()
    feed = ["sh", "-c", "exec sleep 601"]
    with pytest.raises(CopyFailed, match="stopped"):
        answer("a", python(TICKS), feed=feed, told=lambda at: stop.set() if at > 3 else None, stop=stop)
    assert _sleepers() == []


def _sleepers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.cmdline()[-1:] == ["601"]]


def test_a_script_arrives_whatever_is_in_it(tmp_path: Path):
    file = tmp_path / "odd.py"
    file.write_text("import json, sys\nprint(json.dumps([sys.argv[1:], 'it\\'s \"$HOME\" \\\\ `x` \\n']))\n")
    line = there("a", script(file, [sys.executable], "one two", "$x"))[-1]  # what the login shell there gets
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["one two", "$x"], 'it\'s "$HOME" \\ `x` \n']
