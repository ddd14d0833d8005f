"""Splits a model's text into reasoning, content and tool-call blocks by the markers that its family writes.

Works on text, so a marker is found however it was tokenised; what could be the start of one waits, the rest passes
at once. Knows nothing of tokens or HTTP. `answer.py` feeds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.serve.text import Needles
from cluster.serve.tools import ToolFormat

Kind = Literal["content", "reasoning", "tool", "open tool"]


@dataclass(frozen=True, slots=True)
class Markers:
    """What a model's family writes around its reasoning; `silent` are markers that are never text."""

    think_start: str = ""
    think_end: str = ""
    silent: tuple[str, ...] = ()


_ONE_TOKEN_THINKING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
)
_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def find_markers(vocabulary: dict[str, int]) -> Markers:
    """The thinking markers of the model with this vocabulary; empty ones when it has none."""
    for start, end in _ONE_TOKEN_THINKING:
        if start in vocabulary and end in vocabulary:
            return Markers(start, end)
    if "<|channel>" in vocabulary and "<channel|>" in vocabulary:
        return Markers("<|channel>thought", "<channel|>")
    if all(token in vocabulary for token in _XTML):
        silent = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
        return Markers("<|open|>think<|sep|>", "<|close|>think<|sep|>", silent)
    if "<|channel|>" in vocabulary and "<|message|>" in vocabulary:  # the harmony format
        final = "<|channel|>final<|message|>"
        return Markers("<|channel|>analysis<|message|>", "<|end|>", (f"<|start|>assistant{final}", final))
    return Markers()


class Splitter:
    """One sample's text in, (kind, text) pieces out.

    "tool" is the whole text between a call's markers, given when it is complete; "open tool" one that the answer
    ended in. White space next to a marker is layout: after one it is dropped, before the first one it waits until
    it is known whether content follows. Reasoning may begin only where no content has come yet.
    """

    def __init__(self, markers: Markers, format: ToolFormat | None, *, reasoning: bool) -> None:
        self._markers = markers
        self._format = format
        self._state: Literal["content", "reasoning", "tool"] = "reasoning" if reasoning else "content"
        self._buffer = ""
        self._block: list[str] = []
        self._space = ""  # white space that is content only if more content follows
        self._begun = False  # content other than white space has come since the last marker
        self._after_marker = reasoning
        self._content_needles = Needles(
            [
                *([format.start] if format else []),
                *([markers.think_start] if markers.think_start else []),
                *markers.silent,
            ]
        )
        self._later_needles = Needles([*([format.start] if format else []), *markers.silent])
        self._think_needles = Needles([markers.think_end])
        self._tool_needles = Needles([format.end] if format else [])

    @property
    def reasoning(self) -> bool:
        """Whether the text is inside reasoning now."""
        return self._state == "reasoning"

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """The pieces that are certain with this text."""
        out: list[tuple[Kind, str]] = []
        self._buffer += text
        while True:
            needles = self._needles()
            hit = needles.find(self._buffer)
            if hit is None:
                count = needles.held(self._buffer)
                ready = self._buffer[: len(self._buffer) - count]
                before = needles
                self._pass(ready, out)
                self._buffer = self._buffer[len(ready) :]
                if self._needles() is not before and self._buffer:
                    continue  # reasoning can no longer begin: look again at what was held for its marker
                return out
            at, needle = hit
            ready, rest = self._buffer[:at], self._buffer[at + len(needle) :]
            if self._state == "content" and needle == self._markers.think_start and (self._begun or ready.strip()):
                # After content this is text that mentions the marker.
                cut = at + len(needle)
                self._pass(self._buffer[:cut], out)
                self._buffer = self._buffer[cut:]
                continue
            self._pass(ready, out)
            self._buffer = rest
            self._enter(needle, out)

    def close(self) -> list[tuple[Kind, str]]:
        """The answer has ended: what was held back or is unfinished."""
        out: list[tuple[Kind, str]] = []
        rest, self._buffer = self._buffer, ""
        self._pass(rest, out)
        if self._state == "tool":
            out.append(("open tool", "".join(self._block)))
        elif self._space:
            out.append(("content", self._space))
        return out

    def _needles(self) -> Needles:
        if self._state == "reasoning":
            return self._think_needles
        if self._state == "tool":
            return self._tool_needles
        return self._later_needles if self._begun else self._content_needles

    def _pass(self, text: str, out: list[tuple[Kind, str]]) -> None:
        if not text:
            return
        if self._state == "tool":
            self._block.append(text)
            return
        if not self._begun:
            stripped = text.lstrip()
            if self._after_marker:
                text = stripped
            elif not stripped:
                self._space += text
                return
            if not text:
                return
            if self._state == "content":
                text, self._space = self._space + text, ""
            self._begun = True
        out.append((self._state, text))

    def _enter(self, needle: str, out: list[tuple[Kind, str]]) -> None:
        """Cross a marker."""
        self._space = ""
        self._begun = False
        self._after_marker = True
        if self._state == "tool":
            out.append(("tool", "".join(self._block)))
            self._block = []
            self._state = "content"
        elif self._state == "reasoning":
            self._state = "content"
        elif self._format is not None and needle == self._format.start:
            self._state = "tool"
        elif needle == self._markers.think_start:
            self._state = "reasoning"
