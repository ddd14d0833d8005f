"""A small chat in the terminal against the running server, over its OpenAI-compatible API like any other client."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from cluster.errors import ServerUnanswering

COMMANDS = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer."
QUIT = ("/quit", "/exit", "/bye")
UNKNOWN_COMMAND = re.compile(r"/[a-z]*")


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

        What was answered so far is kept when the caller stops early or Ctrl-C does; a failed turn is taken back.
        Raises ServerUnanswering.
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
        except (GeneratorExit, KeyboardInterrupt):
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
                    raise _refusal(response)
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


def _refusal(response: httpx.Response) -> ServerUnanswering:
    try:
        error = response.json()["error"]
        text, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        text, code = f"HTTP status {response.status_code}", None
    hint = "/reset forgets the conversation and makes room." if code == "context_length_exceeded" else ""
    return ServerUnanswering(f"The server refused: {text}", hint=hint)


def chat(conversation: Conversation, model: str, stdin: TextIO = sys.stdin, stdout: TextIO = sys.stdout) -> None:
    """Read lines and print answers until the end of input. Without a terminal every line is one turn, and errors and
    Ctrl-C end it."""
    terminal = stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing
        print(f"Chat with {model}. {COMMANDS}", file=stdout)
    for line in _typed(stdout) if terminal else _piped(stdin):
        if line in QUIT:
            return
        if line == "/reset":
            conversation.reset()
            if terminal:
                print("(forgotten)", file=stdout)
            continue
        if terminal and UNKNOWN_COMMAND.fullmatch(line):
            print(COMMANDS, file=stdout)
            continue
        try:
            _answer(conversation, line, stdout)
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("\n(stopped)", file=stdout)
        except ServerUnanswering as error:
            if not terminal:
                raise
            print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)


def _answer(conversation: Conversation, line: str, stdout: TextIO) -> None:
    before = ""
    with contextlib.closing(conversation.say(line)) as pieces:  # type: ignore[type-var]
        try:
            for kind, piece in pieces:
                if kind != before:
                    stdout.write({"reasoning": "(thinking) ", "content": "\n\n" if before else ""}[kind])
                    before = kind
                stdout.write(piece)
                stdout.flush()
        except ServerUnanswering:
            if before:
                stdout.write("\n")
                stdout.flush()
            raise
    stdout.write("\n")
    stdout.flush()


def _piped(stdin: TextIO) -> Iterator[str]:
    for line in stdin:
        if line.strip():
            yield line.strip()


def _typed(stdout: TextIO) -> Iterator[str]:
    """Lines from the terminal. Ctrl-C drops the line that is being typed; twice in a row it ends the chat."""
    interrupted = False
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=stdout)
            return
        except KeyboardInterrupt:
            print(file=stdout)
            if interrupted:
                return
            interrupted = True
            print("(Ctrl-C again, /quit or Ctrl-D ends the chat)", file=stdout)
            continue
        interrupted = False
        if line:
            yield line
