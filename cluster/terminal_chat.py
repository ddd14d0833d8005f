"""A small chat in the terminal against the running server, over its OpenAI-compatible API like any other client."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from cluster.errors import ServerUnanswering

GREETING = "Chat with {model}. /reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer."


@dataclass
class Conversation:
    """The messages so far, and how to get the next one. `api_key` None sends none."""

    url: str
    api_key: str | None = None
    system: str | None = None
    temperature: float | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str) -> Iterator[tuple[str, str]]:
        """Send `text` and yield the answer in pieces: ("reasoning" or "content", piece).

        What was answered so far is kept when the caller stops early; a failed turn is taken back. Raises
        ServerUnanswering.
        """
        self.messages.append({"role": "user", "content": text})
        answer, failed = "", True
        try:
            for delta in self._stream():
                if piece := delta.get("reasoning_content"):
                    yield "reasoning", piece
                if piece := delta.get("content"):
                    answer += piece
                    yield "content", piece
            failed = False
        except GeneratorExit:
            failed = False
            raise
        finally:
            if answer and not failed:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[dict[str, Any]]:
        body: dict[str, Any] = {"model": "default", "messages": self.messages, "stream": True}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(60, connect=5)  # the server sends a comment every 10 s while it thinks
        try:
            with (
                httpx.Client(trust_env=False, timeout=timeout) as client,
                client.stream("POST", f"{self.url}/v1/chat/completions", json=body, headers=headers) as response,
            ):
                if response.status_code != 200:
                    response.read()
                    raise ServerUnanswering(f"The server refused: {_error_text(response)}")
                for line in response.iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        chunk = json.loads(data)
                        if "error" in chunk:
                            raise ServerUnanswering(chunk["error"].get("message", str(chunk["error"])))
                        yield from (choice["delta"] for choice in chunk.get("choices", []))
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise ServerUnanswering(
                f"The connection to {self.url} broke: {error or type(error).__name__}.",
                hint="`cluster status` shows what the cluster does.",
            ) from error


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {response.status_code}"


def chat(conversation: Conversation, model: str, stdin: TextIO = sys.stdin, stdout: TextIO = sys.stdout) -> None:
    """Read lines and print answers until the end of input. Without a terminal every line is one turn, errors end it."""
    terminal = stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing
        print(GREETING.format(model=model), file=stdout)
    for line in _lines(stdin, terminal):
        if line == "/quit":
            return
        if line == "/reset":
            conversation.reset()
            continue
        try:
            _answer(conversation, line, stdout)
        except KeyboardInterrupt:
            print("\n(stopped)", file=stdout)
        except ServerUnanswering as error:
            if not terminal:
                raise
            print(f"error: {error.message}", file=sys.stderr)


def _answer(conversation: Conversation, line: str, stdout: TextIO) -> None:
    before = ""
    with contextlib.closing(conversation.say(line)) as pieces:  # type: ignore[type-var]
        for kind, piece in pieces:
            if kind != before:
                stdout.write({"reasoning": "(thinking) ", "content": "\n\n" if before else ""}[kind])
                before = kind
            stdout.write(piece)
            stdout.flush()
    stdout.write("\n")
    stdout.flush()


def _lines(stdin: TextIO, terminal: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> ") if terminal else stdin.readline()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not terminal and not line:
            return
        if line.strip():
            yield line.strip()
