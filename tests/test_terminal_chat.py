"""The terminal chat against a small HTTP server that plays the API."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cluster.errors import ServerUnanswering
from cluster.terminal_chat import Conversation, chat


class Api:
    """Answers each request with the next script: SSE lines with Events to wait for, or (status, message, code)."""

    def __init__(self) -> None:
        self.scripts: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        api = self

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                api.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                api.keys.append(self.headers["Authorization"])
                script = api.scripts.pop(0)
                if isinstance(script, tuple):
                    status, message, code = script
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(json.dumps({"error": {"message": message, "code": code}}).encode())
                    return
                self.send_response(200)
                self.end_headers()
                for line in script:
                    if isinstance(line, threading.Event):
                        line.wait()
                    else:
                        self.wfile.write(f"{line}\n\n".encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    thread = threading.Thread(target=api.server.serve_forever, args=(0.01,))
    thread.start()
    yield api
    api.server.shutdown()
    thread.join()
    api.server.server_close()


def delta(**fields: str) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": fields}]})


def answer(*pieces: str) -> list[str]:
    return [": waiting", *(delta(content=p) for p in pieces), "data: [DONE]"]


def run(conversation: Conversation, *lines: str) -> str:
    out = io.StringIO()
    chat(conversation, "tiny", io.StringIO("\n".join(lines)), out)
    return out.getvalue()


def test_lines_from_a_pipe_are_turns_and_the_history_grows(api):
    api.scripts = [answer("Pa", "ris."), answer("Big.")]
    assert run(Conversation(api.url, system="Be brief."), "Capital?", "", "Size?") == "Paris.\nBig.\n"
    assert [m["content"] for m in api.bodies[1]["messages"]] == ["Be brief.", "Capital?", "Paris.", "Size?"]


def test_reset_forgets_all_but_the_system_prompt(api):
    api.scripts = [answer("a"), answer("b")]
    run(Conversation(api.url, system="S"), "one", "/reset", "two")
    assert [m["content"] for m in api.bodies[1]["messages"]] == ["S", "two"]


def test_quit_ends_it_before_the_rest_is_read(api):
    assert run(Conversation(api.url), "/quit", "never sent") == ""
    assert api.bodies == []


def test_key_and_temperature_go_with_the_request(api):
    api.scripts = [answer("x")]
    run(Conversation(api.url, "s3cret", temperature=0.0), "hi")
    assert api.keys == ["Bearer s3cret"]
    assert api.bodies[0]["temperature"] == 0.0


def test_without_them_neither_is_sent(api):
    api.scripts = [answer("x")]
    run(Conversation(api.url), "hi")
    assert api.keys == [None]
    assert "temperature" not in api.bodies[0]


def test_reasoning_is_shown_apart_and_is_not_part_of_the_history(api):
    api.scripts = [[delta(reasoning_content="Hm."), delta(content="Yes."), "data: [DONE]"], answer("x")]
    assert run(Conversation(api.url), "q", "r") == "(thinking) Hm.\n\nYes.\nx\n"
    assert [m["content"] for m in api.bodies[1]["messages"]] == ["q", "Yes.", "r"]


def test_a_refusal_is_told_in_the_servers_words_and_the_turn_is_taken_back(api):
    api.scripts = [(401, "Give an API key.", None)]
    conversation = Conversation(api.url)
    with pytest.raises(ServerUnanswering, match=r"Give an API key\."):
        run(conversation, "hi")
    assert conversation.messages == []


def test_an_error_in_the_middle_of_an_answer_takes_the_turn_back(api):
    api.scripts = [[delta(content="Pa"), 'data: {"error": {"message": "The engine was lost."}}']]
    conversation = Conversation(api.url)
    with pytest.raises(ServerUnanswering, match="engine was lost"):
        list(conversation.say("hi"))
    assert conversation.messages == []


def test_an_answer_that_is_stopped_early_is_kept_as_far_as_it_came(api):
    api.scripts = [answer("one ", "two ", "three")]
    conversation = Conversation(api.url)
    pieces = conversation.say("count")
    assert next(pieces) == ("content", "one ")
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": "one "}


def test_a_conversation_that_outgrew_the_context_is_told_the_way_out(api):
    api.scripts = [(400, "The prompt has 9000 tokens.", "context_length_exceeded")]
    with pytest.raises(ServerUnanswering, match="9000 tokens") as caught:
        run(Conversation(api.url), "hi")
    assert "/reset" in caught.value.hint


def test_a_server_that_is_gone_is_told_with_its_address():
    with pytest.raises(ServerUnanswering, match=r"http://127\.0\.0\.1:9"):
        run(Conversation("http://127.0.0.1:9"), "hi")


# ---------------------------------------------------------------- in a terminal


class Terminal:
    """The chat as a process on a terminal of its own."""

    def __init__(self, url: str) -> None:
        self.master, slave = os.openpty()
        code = (
            "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
            "from cluster.terminal_chat import Conversation, chat; chat(Conversation(sys.argv[1]), 'tiny')"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # a preloaded OpenBLAS has threads, one of which may take the Ctrl-C and leave input() waiting
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        )
        os.close(slave)
        self._unread = b""
        self.until("> ")

    def type(self, text: str, then: str) -> str:
        os.write(self.master, text.encode())
        return self.until(then)

    def interrupt(self, then: str) -> str:
        """Ctrl-C, pressed again when nothing happens: one that arrives after input() has read a key and before it
        waits for the next stays pending until something wakes it, and then still counts once."""
        os.write(self.master, b"\x03")
        if not select.select([self.master], [], [], 3)[0]:
            os.write(self.master, b"\x03")
        return self.until(then)

    def until(self, text: str) -> str:
        """What it shows up to `text`."""
        while text.encode() not in self._unread:
            if select.select([self.master], [], [], 20)[0]:
                self._unread += os.read(self.master, 4096)
            else:
                raise AssertionError(f"no {text!r} in {self._unread!r}")
        shown, self._unread = self._unread.split(text.encode(), 1)
        return shown.decode()

    def ended(self) -> int:
        return self.process.wait(20)


@pytest.fixture
def terminal(api: Api) -> Iterator[Terminal]:
    terminal = Terminal(api.url)
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.master)


def test_ctrl_c_stops_the_answer_keeps_what_came_and_the_chat_goes_on(api, terminal):
    never = threading.Event()
    api.scripts = [[delta(content="one two"), never], answer("three")]
    terminal.type("count\n", "one two")
    terminal.interrupt("(stopped)\r\n> ")
    assert "three" in terminal.type("go on\n", "\r\n> ")
    never.set()
    assert [m["content"] for m in api.bodies[1]["messages"]] == ["count", "one two", "go on"]


def test_ctrl_c_at_the_prompt_drops_the_line_and_ends_the_chat_only_when_repeated(api, terminal):
    api.scripts = [answer("yes")]
    terminal.type("half a li", "half a li")
    terminal.interrupt("ends the chat)\r\n> ")
    terminal.type("whole\n", "yes\r\n> ")
    assert api.bodies[0]["messages"][-1]["content"] == "whole"
    terminal.interrupt("ends the chat)\r\n> ")
    terminal.interrupt("\r\n")
    assert terminal.ended() == 0


def test_an_unknown_command_is_answered_with_the_known_ones_and_not_sent(api, terminal):
    assert "/reset forgets" in terminal.type("/help\n", "\r\n> ")
    assert api.bodies == []
    os.write(terminal.master, b"/exit\n")
    assert terminal.ended() == 0


def test_an_error_is_told_below_what_was_answered_and_the_chat_goes_on(api, terminal):
    api.scripts = [[delta(content="Pa"), 'data: {"error": {"message": "The engine was lost."}}'], answer("Paris")]
    assert terminal.type("hi\n", "> ").endswith("Pa\r\nerror: The engine was lost.\r\n")
    assert "Paris" in terminal.type("again\n", "\r\n> ")
