"""An executor whose KV is the tokens themselves and whose next token is a hash of them: wrong KV gives wrong tokens."""

from __future__ import annotations

import zlib
from collections import deque

from parallel import wire
from parallel.engine.sequence import CacheShape, StepResult, rows_capacity

VOCABULARY = 50


def next_token(tokens: list[int]) -> int:
    """What the pretended model says after `tokens`."""
    return zlib.crc32(repr(tokens).encode()) % VOCABULARY


def reference(prompt: list[int], max_tokens: int, stop_ids: list[int]) -> list[int]:
    """The answer of the pretended model, stop token included."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class FakeExecutor:
    """Begins and finishes steps in order, as the real one; `fail_steps` raise, `most_bytes` is the largest KV seen."""

    def __init__(self, shape: CacheShape, fail_steps: frozenset[int] = frozenset()) -> None:
        self.shape = shape
        self.fail_steps = fail_steps
        self.solos: dict[int, list[int]] = {}
        self.entries: dict[int, list[int]] = {}
        self.buckets: dict[int, dict[int, list[int]]] = {}
        self.sampled: dict[int, int] = {}
        self.most_bytes = 0
        self.busy_s = 0.0
        self.steps: list[wire.Step] = []
        self._begun: deque[tuple[wire.Step, StepResult]] = deque()

    def prepare(self, step: wire.Step) -> None:
        pass

    def begin(self, step: wire.Step) -> None:
        self.steps.append(step)
        if step.id in self.fail_steps:
            self.buckets.pop(step.bucket, None)
            for chunk in step.chunks:
                self.solos.pop(chunk.seq, None)
            self._begun.append((step, StepResult(step.id, error="RuntimeError: told to fail")))
            return
        try:
            tokens = self._run(step)
            self._begun.append((step, StepResult(step.id, tokens)))
        except KeyError as error:  # an order or row of something that an earlier failure took away
            self.buckets.pop(step.bucket, None)
            self._begun.append((step, StepResult(step.id, error=f"KeyError: {error}")))

    def finish(self, step: wire.Step) -> StepResult:
        begun, result = self._begun.popleft()
        assert begun is step
        return result

    def _run(self, step: wire.Step) -> list[int]:
        for order in step.orders:
            self._order(order)
        for chunk in step.chunks:
            assert len(self.solos[chunk.seq]) >= step.start
            self.solos[chunk.seq] = self.solos[chunk.seq][: step.start] + chunk.tokens
        tokens = []
        if step.rows:
            bucket = self.buckets[step.bucket]
            assert sorted(bucket) == sorted(row.seq for row in step.rows)
            for row in step.rows:
                cached = bucket[row.seq]
                assert row.position == len(cached)
                cached.append(self.sampled[row.seq] if row.token < 0 else row.token)
                self.sampled[row.seq] = next_token(cached)
                tokens.append(self.sampled[row.seq])
        self.most_bytes = max(self.most_bytes, self.kv_bytes())
        return tokens

    def _order(self, order: wire.Order) -> None:
        match order:
            case wire.Open():
                self.solos[order.seq] = self.entries[order.entry][: order.length] if order.entry >= 0 else []
                assert len(self.solos[order.seq]) == order.length
            case wire.Keep():
                self.entries[order.entry] = list(self.solos[order.seq])
            case wire.Enter():
                for row in order.rows:
                    self.buckets.setdefault(order.bucket, {})[row.seq] = list(self.solos.get(row.source, []))
            case wire.Exit():
                row = self.buckets.get(order.bucket, {}).pop(order.seq, None)
                if order.entry >= 0 and row is not None:
                    assert len(row) >= order.length
                    self.entries[order.entry] = row[: order.length]
                if not self.buckets.get(order.bucket):
                    self.buckets.pop(order.bucket, None)
            case wire.Fuse():
                self.buckets[order.bucket].update(self.buckets.pop(order.other))
            case wire.Close():
                self.solos.pop(order.seq, None)
            case wire.Forget():
                self.entries.pop(order.entry, None)

    def kv_bytes(self) -> int:
        """Bytes that the real caches would take now."""
        buckets = (rows_capacity(len(b)) * self.shape.bytes(max(map(len, b.values()))) for b in self.buckets.values())
        alone = (self.shape.bytes(len(tokens)) for tokens in (*self.solos.values(), *self.entries.values()))
        return sum(buckets) + sum(alone)
