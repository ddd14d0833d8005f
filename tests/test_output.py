"""What a rank prints, as it comes out behind its label."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from processes import ends

from parallel.output import LINE_LIMIT

START = "import os, sys, time; from parallel.output import label_output; label_output(3); "


def printed(script: str) -> list[str]:
    """The lines of a process that labels its output, both streams together."""
    run = subprocess.run([sys.executable, "-c", START + script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return run.stdout.decode().splitlines()


def test_every_line_of_both_streams_bears_the_rank() -> None:
    assert printed("print('one\\ntwo', flush=True); print('three', file=sys.stderr, flush=True)") == [
        "[rank 3] one",
        "[rank 3] two",
        "[rank 3] three",
    ]


def test_once_the_process_is_gone_everything_is_out() -> None:
    """mlx.launch reads no further then."""
    for _ in range(5):
        script = "os.write(2, b'first\\nlast words')"
        with subprocess.Popen([sys.executable, "-c", START + script], stdout=-1, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            process.wait()
            os.set_blocking(process.stdout.fileno(), False)
            assert os.read(process.stdout.fileno(), 1 << 16) == b"[rank 3] first\n[rank 3] last words\n"


def test_last_words_without_an_end_of_line_come_out() -> None:
    assert printed("os.write(2, b'abort: no memory'); os.abort()") == ["[rank 3] abort: no memory"]


def test_a_traceback_comes_out_whole() -> None:
    lines = printed("raise RuntimeError('told so')")
    assert lines[-1] == "[rank 3] RuntimeError: told so"
    assert all(line.startswith("[rank 3] ") for line in lines)


@pytest.mark.parametrize("end", ["\\n", ""])
def test_a_line_too_long_for_a_pipe_comes_in_labelled_pieces(end: str) -> None:
    lines = printed(f"sys.stdout.write('x' * {2 * LINE_LIMIT + 5} + '{end}')")
    assert "".join(line.removeprefix("[rank 3] ") for line in lines) == "x" * (2 * LINE_LIMIT + 5)
    assert max(len(line) for line in lines) <= LINE_LIMIT + len("[rank 3] ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_leaves_the_labeller_until_the_last_words_are_out(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START + "print('up', flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"[rank 3] up\n"
        [labeller] = psutil.Process(rank.pid).children()
        os.killpg(rank.pid, number)
        rank.wait()
        assert rank.stdout.read() == b"" or number == signal.SIGINT  # a Ctrl-C has a traceback
        assert ends(labeller.pid)


def test_a_reader_that_is_gone_ends_the_labeller() -> None:
    script = "print('up', flush=True)\nwhile True:\n print('more', flush=True); time.sleep(0.02)"
    with subprocess.Popen(
        [sys.executable, "-c", START + script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"[rank 3] up\n"
        [labeller] = psutil.Process(rank.pid).children()
        rank.stdout.close()
        rank.wait(10)  # its own print fails once the labeller is gone
        assert ends(labeller.pid)
