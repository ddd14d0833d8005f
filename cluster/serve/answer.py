"""The text side of one sample: tokens in; reasoning, content, tool calls and log-probabilities out.

Pure (no I/O, no clock). `generate.py` feeds one Answer per sample, the dialects (`openai.py`) take what is new.

What counts: a token counts when its last byte lies in text that is kept. A stop string cuts the text where it
begins; the tokens that lie wholly before the cut are the answer's tokens, in usage, in logprobs and in what the
engine may reuse as a prefix. A token that straddles the cut gives its first characters to the text and is not
counted. A stop id is no part of the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.serve.markers import Markers, Splitter
from cluster.serve.text import Decoder, Needles, StopScanner
from cluster.serve.tools import ToolCall, ToolFormat, calls_in
from parallel import wire


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a request offers, in the model's format. `parallel` false: only the first call is wanted."""

    format: ToolFormat
    tools: Sequence[dict[str, Any]]
    parallel: bool = True


@dataclass(slots=True)
class LogProb:
    """One counted token: its id, the character at which its text begins, and `wire.Token.top`."""

    token: int
    offset: int
    top: Sequence[tuple[int, float]]


@dataclass(slots=True)
class Delta:
    """What is new in an answer since it was last taken."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[LogProb] = field(default_factory=list)
    finish: str = ""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs or self.finish)


class Answer:
    """One sample. `feed` every token; `keep` tells the engine what counts when the text ended before the tokens did."""

    def __init__(
        self,
        decoder: Decoder,
        stops: Needles,
        *,
        markers: Markers | None = None,
        tool_use: ToolUse | None = None,
        reasoning: bool = False,
        logprobs: bool = False,
    ) -> None:
        self._decoder = decoder
        self._stops = StopScanner(stops) if stops.all else None
        self._tool_use = tool_use
        self._splitter = None
        if markers is not None and (tool_use or markers.think_start or markers.silent):
            self._splitter = Splitter(markers, tool_use.format if tool_use else None, reasoning=reasoning)
        self.finish = ""
        self.tokens = 0  # that count, once the answer has ended; until then those whose text is certain
        self.reasoning_tokens = 0
        self.call_count = 0
        self._length = 0  # characters decoded
        self._certain = 0  # of these, how many no stop string can take back any more
        self._unplaced = 0  # tokens whose text has not come yet
        self._ends: deque[int] = deque()  # where the text of the tokens after those counted ends
        self._want_logprobs = logprobs
        self._logprobs: deque[LogProb] = deque()  # of tokens that are not counted yet
        self._new = Delta()

    def feed(self, token: wire.Token) -> bool:
        """Take one token. True when the answer ended here although the engine would go on: tell it `tokens`."""
        if token.finish == "stop":
            self._end("stop")
            return False
        offset = self._length
        text = self._decoder.push(token.token)
        if self._want_logprobs:
            assert token.top, "the engine was asked for logprobs"
            self._logprobs.append(LogProb(token.token, offset, token.top))
        self._place(text)
        hit = False
        if self._stops is not None:
            text, hit = self._stops.push(text)
            self._certain += len(text)
        else:
            self._certain = self._length
        self._count_up_to(self._certain)
        if hit:
            self._write(text)
            self._end("stop", flush=False)
            return not token.finish
        if text and self._write(text):
            self._count_up_to(self._length)
            self._end("stop", flush=False)
            return not token.finish
        if token.finish:
            self._end(token.finish)
        return False

    def take(self) -> Delta:
        """What is new since the last call."""
        new, self._new = self._new, Delta()
        return new

    @property
    def has_news(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._new)

    def _place(self, text: str) -> None:
        """Note where the text of the tokens so far ends."""
        self._length += len(text)
        if self._decoder.pending:
            if text:  # it completed what the tokens before it had begun, and begins something itself
                self._ends.extend([self._length] * self._unplaced)
                self._unplaced = 0
            self._unplaced += 1
        else:
            self._ends.extend([self._length] * (self._unplaced + 1))
            self._unplaced = 0

    def _count_up_to(self, certain: int) -> None:
        ends = self._ends
        reasoning = self._splitter is not None and self._splitter.reasoning
        while ends and ends[0] <= certain:
            ends.popleft()
            self.tokens += 1
            self.reasoning_tokens += reasoning
            if self._want_logprobs:
                self._new.logprobs.append(self._logprobs.popleft())

    def _end(self, finish: str, *, flush: bool = True) -> None:
        if flush:
            if self._stops is not None:
                self._write(self._stops.flush())
            # Every token up to here is the answer's, also one whose character never became complete.
            self._ends.extend([self._length] * self._unplaced)
            self._unplaced = 0
            self._count_up_to(self._length)
        if self._splitter is not None and not self._one_call_is_enough:
            self._sort(self._splitter.close(), finish)
        self.finish = "tool_calls" if self.call_count and finish == "stop" else finish
        self._new.finish = self.finish

    def _write(self, text: str) -> bool:
        """Text that is certain. True when it completed the one tool call that was wanted."""
        if self._splitter is None:
            self._new.content += text
            return False
        self._sort(self._splitter.push(text), "")
        return self._one_call_is_enough

    @property
    def _one_call_is_enough(self) -> bool:
        return self.call_count > 0 and self._tool_use is not None and not self._tool_use.parallel

    def _sort(self, pieces: Sequence[tuple[str, str]], finish: str) -> None:
        for kind, text in pieces:
            if self._one_call_is_enough:
                return
            if kind == "content":
                self._new.content += text
            elif kind == "reasoning":
                self._new.reasoning += text
            else:
                self._block(text, closed=kind == "tool", cut=finish == "length")

    def _block(self, text: str, *, closed: bool, cut: bool) -> None:
        """A tool-call block: calls where it parses, else content as it was written.

        A block that ran into the token limit may parse to half its arguments, so it is content, unless the format
        has no end marker and cannot be told from a whole one.
        """
        assert self._tool_use is not None, "a tool block without tools"
        form = self._tool_use.format
        calls = None if cut and not closed and form.end else calls_in(form, text, self._tool_use.tools)
        if calls is None:
            self._new.content += form.start + text + (form.end if closed else "")
            return
        if not self._tool_use.parallel:
            calls = calls[:1]
        self.call_count += len(calls)
        self._new.calls += calls
