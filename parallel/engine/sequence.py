"""The vocabulary of the engine: what is asked, what runs, what a step gave. Plain state, no policy, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from parallel.wire import Sampling, Submit


class State(Enum):
    """Where a sequence stands. A preempted sequence waits again, with the tokens it has so far as its prompt."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request: its tokens, how many of them the KV cache holds, and where it stands.

    `computed` counts the tokens whose KV exists once every step scheduled so far has run. `scheduled` counts the
    output tokens that steps were scheduled for, `inflight` the steps whose result has not come back. `entry` is the
    prefix entry that holds its KV, -1 for none; `siblings` are the samples that share its prefill.
    """

    id: int
    request: Submit
    index: int
    arrival_s: float
    seed: int
    tokens: list[int]
    state: State = State.WAITING
    computed: int = 0
    scheduled: int = 0
    inflight: int = 0
    bucket: int = -1
    entry: int = -1
    siblings: list[Sequence] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        """Tokens of the request's prompt."""
        return len(self.request.prompt)

    @property
    def outputs(self) -> int:
        """Output tokens that have come back."""
        return len(self.tokens) - self.prompt_length

    @property
    def unread(self) -> int:
        """Output tokens that steps in flight will bring."""
        return self.scheduled - self.outputs

    @property
    def to_prefill(self) -> int:
        """Tokens still to prefill: all but the last, which enters as a row of a decode step."""
        return len(self.tokens) - 1 - self.computed

    @property
    def sampling(self) -> Sampling:
        """How its tokens are chosen."""
        return self.request.sampling


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, row by row: the sampled token and, where asked for, [(token, logprob), ...].

    `error` is set when the step raised; then nothing in it counts.
    """

    id: int
    tokens: list[int] = field(default_factory=list)
    tops: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How many bytes the KV cache of one row takes, for any length.

    `fixed_bytes` is recurrent state; `layers` are (bytes per token, window) of all layers alike, window 0 unlimited.
    Capacity grows in steps of `grain` tokens, as mlx-lm's caches do.
    """

    fixed_bytes: int
    layers: tuple[tuple[int, int], ...]
    grain: int = 256

    def bytes(self, tokens: int) -> int:
        """Bytes that one row of `tokens` tokens occupies."""
        return self.exact_bytes(-(-tokens // self.grain) * self.grain)

    def exact_bytes(self, capacity: int) -> int:
        """Bytes of a copy that has room for `capacity` tokens and no more."""
        return self.fixed_bytes + sum(
            per_token * (min(capacity, window) if window else capacity) for per_token, window in self.layers
        )

    def longest(self, limit_bytes: int) -> int:
        """The longest sequence that fits in `limit_bytes`; a very large number when length costs nothing."""
        low, high = 0, 1 << 32
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle) <= limit_bytes else (low, middle - 1)
        return low


def rows_capacity(rows: int) -> int:
    """Rows that a bucket of `rows` rows has room for, so that not every newcomer makes it grow (which copies it)."""
    return rows if rows <= 2 else -(-rows // 4) * 4
