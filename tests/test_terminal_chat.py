"""The terminal chat against a small HTTP server that plays the API."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cluster.errors import ServerUnanswering
from cluster.terminal_chat import Conversation, chat


class Api:
    """Answers each request with the next script: a list of SSE lines, or (status, error message)."""

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
                status, content = (200, "".join(f"{x}\n\n" for x in script))
                if isinstance(script, tuple):
                    status, content = script[0], json.dumps({"error": {"message": script[1]}})
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content.encode())

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
    api.scripts = [(401, "Give an API key.")]
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


def test_a_server_that_is_gone_is_told_with_its_address():
    with pytest.raises(ServerUnanswering, match=r"http://127\.0\.0\.1:9"):
        run(Conversation("http://127.0.0.1:9"), "hi")
