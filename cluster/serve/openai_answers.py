"""Answers in the OpenAI dialect: chunks of a stream and whole bodies, as bytes.

One Writer per request. This is the hot path of streaming: the constant part of a chunk is encoded once, the rest by
msgspec. `api.py` calls `events` with each Delta, `last` at the end of a stream, `whole` for a plain body, `failure`
when the request failed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from cluster.errors import ClusterError
from cluster.serve.answer import Delta, LogProb
from cluster.serve.generate import Run
from cluster.serve.text import Vocabulary
from cluster.serve.tools import ToolCall

LEAST_LOGPROB = -9999.0  # JSON has no infinity

_encode = msgspec.json.Encoder().encode


class Function(msgspec.Struct):
    name: str
    arguments: str


class Call(msgspec.Struct, omit_defaults=True):
    id: str
    function: Function
    index: int | None = None
    type: str | None = None


class Message(msgspec.Struct, omit_defaults=True):
    """A message, or in a stream what is new of it: absent keys have nothing new."""

    role: str | None = None
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class Alternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogProb(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogProbs(msgspec.Struct):
    content: list[TokenLogProb]
    refusal: None = None


class TextLogProbs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Message
    logprobs: ChatLogProbs | None = None
    finish_reason: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogProbs | None
    finish_reason: str


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogProbs | None = None
    finish_reason: str | None = None


def error_body(error: ClusterError) -> dict[str, Any]:
    """The OpenAI error object of an expected failure."""
    message = f"{error.message} {error.hint}".rstrip()
    return {
        "error": {"message": message, "type": error.type, "param": getattr(error, "param", None), "code": error.code}
    }


def usage(run: Run) -> dict[str, Any]:
    """Tokens that count (see answer.py), over all prompts and choices."""
    return {
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.output_tokens,
        "total_tokens": run.prompt_tokens + run.output_tokens,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in run.answers)},
    }


class Writer:
    """What both routes share."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, model: str, vocabulary: Vocabulary, *, include_usage: bool = False) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._vocabulary = vocabulary
        self._include_usage = include_usage
        self._fields = {"created": int(time.time()), "model": model}
        head = _encode({"id": self.id, "object": self.chunk_kind, **self._fields})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def events(self, choice: int, delta: Delta) -> bytes:
        """Server-sent events for what is new in a choice."""
        raise NotImplementedError

    def choice(self, index: int, delta: Delta) -> msgspec.Struct:
        """A whole choice."""
        raise NotImplementedError

    def last(self, run: Run) -> bytes:
        """The end of a stream that went well."""
        done = b"data: [DONE]\n\n"
        if not self._include_usage:
            return done
        return self._head + b'],"usage":' + _encode(usage(run)) + b"}\n\n" + done

    def failure(self, error: ClusterError) -> bytes:
        """The end of a stream that failed after its headers were sent."""
        return b"data: " + _encode(error_body(error)) + b"\n\ndata: [DONE]\n\n"

    def whole(self, run: Run) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [self.choice(index, answer.take()) for index, answer in enumerate(run.answers)]
        return _encode({"id": self.id, "object": self.kind, **self._fields, "choices": choices, "usage": usage(run)})

    def _event(self, choice: msgspec.Struct) -> bytes:
        return self._head + _encode(choice) + self._tail


class ChatWriter(Writer):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, model: str, vocabulary: Vocabulary, *, include_usage: bool = False) -> None:
        super().__init__(model, vocabulary, include_usage=include_usage)
        self._begun: set[int] = set()
        self._calls: dict[int, int] = {}

    def events(self, choice: int, delta: Delta) -> bytes:
        parts: list[Message] = []
        if delta.reasoning:
            parts.append(Message(reasoning_content=delta.reasoning))
        if delta.content:
            parts.append(Message(content=delta.content))
        if delta.calls:
            first = self._calls.get(choice, 0)
            self._calls[choice] = first + len(delta.calls)
            parts.append(Message(tool_calls=_calls(delta.calls, first)))
        if not parts and delta.logprobs:
            parts.append(Message(content=""))
        if choice not in self._begun:
            self._begun.add(choice)
            if not parts:
                parts.append(Message(content=""))
            parts[0].role = "assistant"
        out = b""
        logprobs = self._logprobs(delta.logprobs)
        for part in parts:
            out += self._event(ChunkChoice(choice, part, logprobs))
            logprobs = None
        if delta.finish:
            out += self._event(ChunkChoice(choice, Message(), None, delta.finish))
        return out

    def choice(self, index: int, delta: Delta) -> ChatChoice:
        content = delta.content if delta.content or not delta.calls else None
        message = Message("assistant", content, delta.reasoning or None, _calls(delta.calls) or None)
        return ChatChoice(index, message, self._logprobs(delta.logprobs), delta.finish)

    def _logprobs(self, entries: Sequence[LogProb]) -> ChatLogProbs | None:
        if not entries:
            return None
        return ChatLogProbs([self._token(entry) for entry in entries])

    def _token(self, entry: LogProb) -> TokenLogProb:
        chosen, *others = (self._alternative(token, logprob) for token, logprob in entry.top)
        return TokenLogProb(chosen.token, chosen.logprob, chosen.bytes, others)

    def _alternative(self, token: int, logprob: float) -> Alternative:
        raw = self._vocabulary.token_bytes(token)
        return Alternative(self._vocabulary.token_text(token), max(logprob, LEAST_LOGPROB), list(raw))


class TextWriter(Writer):
    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def events(self, choice: int, delta: Delta) -> bytes:
        out = b""
        if delta.content or delta.logprobs:
            out = self._event(TextChoice(choice, delta.content, self._logprobs(delta.logprobs)))
        if delta.finish:
            out += self._event(TextChoice(choice, "", None, delta.finish))
        return out

    def choice(self, index: int, delta: Delta) -> TextChoice:
        return TextChoice(index, delta.content, self._logprobs(delta.logprobs), delta.finish)

    def _logprobs(self, entries: Sequence[LogProb]) -> TextLogProbs | None:
        if not entries:
            return None
        name = self._vocabulary.token_text
        return TextLogProbs(
            tokens=[name(entry.token) for entry in entries],
            token_logprobs=[max(entry.top[0][1], LEAST_LOGPROB) for entry in entries],
            top_logprobs=[
                {name(token): max(logprob, LEAST_LOGPROB) for token, logprob in entry.top[1:]} for entry in entries
            ],
            text_offset=[entry.offset for entry in entries],
        )


def _calls(calls: Sequence[ToolCall], first: int | None = None) -> list[Call]:
    """Calls as JSON; in a stream they are numbered from `first`."""
    return [
        Call(call.id, Function(call.name, call.arguments), None if first is None else first + i, "function")
        for i, call in enumerate(calls)
    ]
