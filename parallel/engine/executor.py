"""Executes Steps on this rank's model, strictly in order. Decides nothing.

`begin` builds a step's graph and hands it to the device; `finish` waits for it and reads everything the host needs in
one transfer. Between the two, the next step may be begun: its rows are then fed by tokens still on the device.
Called by `loop.py`, from the one thread that owns all arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from parallel import wire
from parallel.engine import kv, sampling
from parallel.engine.sampling import Sampled, Sampler
from parallel.engine.sequence import StepResult
from parallel.group import Links

CLEAR_EVERY = 512  # steps between returns of MLX's buffer cache, against slow growth by odd sizes


@dataclass(slots=True)
class _Decoding:
    """A bucket's KV, the sampling state of its rows and what they sampled last, with the rows' ids at that time."""

    kv: kv.Bucket
    rows: dict[int, wire.NewRow]
    sampler: Sampler | None = None
    sampled: mx.array | None = None
    sampled_rows: tuple[int, ...] = ()


@dataclass(slots=True)
class _Begun:
    """A step on the device: what it fetches from the stage before, what must be computed, what goes to the next stage.

    `places` are its rows' places in the bucket; `redo` samples again with a full sort.
    """

    step: wire.Step
    wait: list[mx.array]
    received: mx.array | None = None
    sent: mx.array | None = None
    places: list[int] = field(default_factory=list)
    sampler: Sampler | None = None
    sampled: Sampled | None = None
    redo: Callable[[], Sampled] | None = None
    error: str = ""


def few_shapes(model: Any) -> bool:
    """Whether prefill should come in few shapes: CUDA plans attention anew for each, which takes longer than the step
    (50 to 70 ms against 10 to 40, an 8B model on an H200); and padding must be forgettable."""
    return not sampling.on_cpu() and bool(mx.cuda.is_available()) and kv.reuse_of(model) == "any"


def rounded(rows: int, tokens: int) -> tuple[int, int]:
    """The next larger of few shapes: 1, 2, 4, 8, 16, 24, ... rows; 32, 64, 96, 128, 160, ... tokens, in steps of at
    most a quarter of them."""
    rows = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
    step = 1 << max(5, tokens.bit_length() - 3)
    return rows, -(-tokens // step) * step


class Executor:
    """All KV of this rank and the model, or its part of it, that fills it; `links` lead to the other ranks.

    `busy_s` is how long it has worked on steps; the rest of the time it waited. `failed` is the last exception in a
    step. `mask` may change the logits [B, V] of a decode step before sampling (structured output); its rows then ask
    for `needs_host`, so that they are never looked ahead.
    """

    def __init__(
        self,
        model: Any,
        links: Links | None = None,
        *,
        mask: Callable[[wire.Step, mx.array], mx.array] | None = None,
    ) -> None:
        self.model = model
        self.links = links or Links()
        self.busy_s = 0.0
        self.failed = ""
        self._mask = mask
        self._few_shapes = few_shapes(model) and self.links.first and self.links.last
        self._solos: dict[int, kv.Solo | kv.Part] = {}
        self._lengths: dict[int, int] = {}
        self._taken: set[int] = set()  # sequences whose own cache a bucket holds by now
        self._entries: dict[int, kv.Solo] = {}
        self._buckets: dict[int, _Decoding] = {}
        self._begun: dict[int, _Begun] = {}
        self._steps = 0

    def prepare(self, step: wire.Step) -> None:
        """Build the graph of `step`, the next to begin, and start nothing: while the device computes the one before it.

        An exception is kept for the step's result; it ends the bucket or sequence that it was for.
        """
        if step.id in self._begun:
            return
        begun = self._begun[step.id] = _Begun(step, [])
        begun_s = time.monotonic()
        try:
            begun.wait = self._change(step.orders)
            if step.rows:
                self._decode(step, begun)
            elif step.chunks:
                self._prefill(step, begun)
        except Exception as error:
            self._discard(step)
            begun.error = self.failed = f"{type(error).__name__}: {error}"
        self.busy_s += time.monotonic() - begun_s

    def begin(self, step: wire.Step) -> None:
        """Start `step`, as soon as what it needs from the stage before has arrived."""
        self.prepare(step)
        begun = self._begun[step.id]
        if begun.error:
            return
        begun_s, waited_s = time.monotonic(), self.links.waited_s
        try:
            if begun.received is not None:
                self.links.arrive(begun.received)
            mx.async_eval(begun.wait if begun.sent is None else [*begun.wait, begun.sent])
        except Exception as error:
            self._discard(step)
            begun.error = self.failed = f"{type(error).__name__}: {error}"
        self.busy_s += time.monotonic() - begun_s - (self.links.waited_s - waited_s)

    def finish(self, step: wire.Step) -> StepResult:
        """Wait for `step` and read its result."""
        begun = self._begun.pop(step.id)
        self._steps += 1
        if begun.error:
            return StepResult(step.id, error=begun.error)
        finishing_s = time.monotonic()
        try:
            mx.eval(begun.wait)
            if begun.sampled is None or begun.sampler is None:
                return StepResult(step.id)
            sampled = begun.sampled
            if begun.redo is not None and sampled.whole is not None and not np.array(sampled.whole).all():
                sampled = begun.redo()
                mx.eval(sampled.arrays)
            tokens: list[int] = np.array(sampled.tokens).tolist()
            tops = begun.sampler.read_logprobs(sampled, tokens)
            return StepResult(step.id, [tokens[place] for place in begun.places], tops)
        except Exception as error:
            self._discard(step)
            self.failed = f"{type(error).__name__}: {error}"
            return StepResult(step.id, error=self.failed)
        finally:
            self.busy_s += time.monotonic() - finishing_s
            if self._steps % CLEAR_EVERY == 0:
                mx.clear_cache()

    # ------------------------------------------------------------ orders

    def _change(self, orders: list[Any]) -> list[mx.array]:
        """Execute `orders`; returns new arrays that must be evaluated, so that they let go of what they came from."""
        fresh: list[mx.array] = []
        leaving: dict[int, set[int]] = {}
        for order in orders:
            match order:
                case wire.Exit():
                    if order.entry >= 0 and order.bucket in self._buckets:
                        entry = self._buckets[order.bucket].kv.extract(order.seq, order.length)
                        self._entries[order.entry] = entry
                        fresh += kv.arrays(entry)
                    leaving.setdefault(order.bucket, set()).add(order.seq)
                    continue
                case wire.Forget():
                    self._entries.pop(order.entry, None)
                    continue
            self._leave(leaving)
            match order:
                case wire.Open():
                    source = self._entries[order.entry] if order.entry >= 0 else None
                    self._solos[order.seq] = (
                        kv.new_solo(self.model) if source is None else kv.fork(source, order.length)
                    )
                    self._lengths[order.seq] = order.length
                case wire.Keep():
                    entry = kv.fork(self._solos[order.seq], self._lengths[order.seq])
                    self._entries[order.entry] = entry
                    fresh += kv.arrays(entry)
                case wire.Close():
                    self._solos.pop(order.seq, None)
                    self._lengths.pop(order.seq, None)
                    self._taken.discard(order.seq)
                case wire.Enter():
                    fresh += self._enter(order)
                case wire.Fuse():
                    fresh += self._fuse(order)
        self._leave(leaving)
        return fresh

    def _leave(self, leaving: dict[int, set[int]]) -> None:
        """Rows that exit together leave together."""
        for id, rows in leaving.items():
            if (decoding := self._buckets.get(id)) is None:
                continue
            decoding.kv.drop(rows)
            for row in rows:
                decoding.rows.pop(row, None)
            self._rebuild(decoding)
            if not decoding.rows:
                del self._buckets[id]
        leaving.clear()

    def _enter(self, order: wire.Enter) -> list[mx.array]:
        decoding = self._buckets.setdefault(order.bucket, _Decoding(kv.Bucket(), {}))
        solos, lengths = [], []
        for row in order.rows:
            # a source is missing only when its prefill raised; its rows have failed already and run out unread
            solo, length = self._solos.get(row.source) or kv.new_solo(self.model), self._lengths.get(row.source, 0)
            solos.append(kv.fork(solo, length) if row.source in self._taken else solo)
            lengths.append(length)
            if not isinstance(solo, kv.Part):
                self._taken.add(row.source)
            decoding.rows[row.seq] = row
        decoding.kv.join([row.seq for row in order.rows], solos, lengths)
        self._rebuild(decoding)
        return kv.arrays(decoding.kv.caches)

    def _fuse(self, order: wire.Fuse) -> list[mx.array]:
        decoding, other = self._buckets[order.bucket], self._buckets.pop(order.other)
        decoding.kv.absorb(other.kv)
        decoding.rows.update(other.rows)
        sampled = [d.sampled for d in (decoding, other) if d.sampled is not None]
        decoding.sampled = mx.concatenate(sampled) if sampled else None
        decoding.sampled_rows += other.sampled_rows
        rows = [decoding.rows[row] for row in decoding.kv.rows]
        if self.links.samples:
            decoding.sampler = Sampler(rows, decoding.sampler, other.sampler)
        return kv.arrays(decoding.kv.caches)

    def _rebuild(self, decoding: _Decoding) -> None:
        if self.links.samples:
            decoding.sampler = Sampler([decoding.rows[row] for row in decoding.kv.rows], decoding.sampler)

    # ------------------------------------------------------------ computing

    def _forward(self, begun: _Begun, tokens: Callable[[], mx.array], shape: tuple[int, int], caches: Any) -> mx.array:
        """This rank's part of the model, fed with `tokens` or what the stage before sends; `shape`: rows, tokens."""
        links = self.links
        fed = begun.received = None if links.first else links.receive(*shape)
        out = self.model(tokens() if fed is None else fed, cache=caches)
        if not links.last:
            begun.wait.append(out)
            begun.sent = links.send(out)
        return out

    def _prefill(self, step: wire.Step, begun: _Begun) -> None:
        solos = [self._alone(chunk.seq) for chunk in step.chunks]
        rows, width = rounded(*step.shape) if self._few_shapes else step.shape
        spare = rows - len(solos)
        caches = solos[0] if rows == 1 else kv.stack(self.model, solos + solos[:1] * spare, step.start)
        padded = [chunk.tokens + [0] * (width - len(chunk.tokens)) for chunk in step.chunks] + [[0] * width] * spare
        self._forward(begun, lambda: mx.array(padded), (rows, width), caches)
        begun.wait += kv.arrays(caches)
        for i, chunk in enumerate(step.chunks):
            length = self._lengths[chunk.seq] = step.start + len(chunk.tokens)
            if rows > 1:
                self._solos[chunk.seq] = kv.Part(caches, i)
            elif width > len(chunk.tokens):
                kv.cut(caches, length)

    def _alone(self, seq: int) -> kv.Solo:
        """The caches of a sequence in prefill, that this may change."""
        source = self._solos[seq]
        if isinstance(source, kv.Part):
            source = self._solos[seq] = kv.fork(source, self._lengths[seq])
        return source

    def _decode(self, step: wire.Step, begun: _Begun) -> None:
        decoding = self._buckets[step.bucket]
        assert {row.seq for row in step.rows} == set(decoding.kv.rows)
        fed = {row.seq: row for row in step.rows}
        rows = [fed[seq] for seq in decoding.kv.rows]
        begun.places = [decoding.kv.rows.index(row.seq) for row in step.rows]
        decoding.kv.advance()
        out = self._forward(begun, lambda: self._inputs(decoding, rows)[:, None], (len(rows), 1), decoding.kv.caches)
        if not self.links.last:
            return
        logits = out[:, -1, :]
        if not self.links.samples:
            decoding.sampled, decoding.sampled_rows = self.links.share(None, logits), tuple(decoding.kv.rows)
            begun.wait += [logits, decoding.sampled]
            return
        if self._mask is not None:
            logits = self._mask(step, logits)
        assert decoding.sampler is not None
        sampler, positions = decoding.sampler, [row.position for row in rows]
        sampled = sampler(logits, positions)
        if sampled.whole is not None:
            begun.redo = lambda: sampler(logits, positions, full=True)
        decoding.sampled, decoding.sampled_rows = self.links.share(sampled.tokens, logits), tuple(decoding.kv.rows)
        begun.sampler, begun.sampled = sampler, sampled
        begun.wait += [*sampled.arrays, decoding.sampled]

    @staticmethod
    def _inputs(decoding: _Decoding, rows: list[wire.Row]) -> mx.array:
        """Token ids [B]: from the host, or what the row sampled last."""
        known = [row.token for row in rows]
        if all(token >= 0 for token in known):
            return mx.array(known)
        assert decoding.sampled is not None
        if all(token < 0 for token in known) and tuple(row.seq for row in rows) == decoding.sampled_rows:
            return decoding.sampled
        where = {seq: i for i, seq in enumerate(decoding.sampled_rows)}
        index = mx.array([where.get(row.seq, 0) for row in rows])
        return mx.where(mx.array([token < 0 for token in known]), decoding.sampled[index], mx.array(known))

    def _discard(self, step: wire.Step) -> None:
        """After an exception, what the step touched cannot be trusted."""
        if step.rows:
            self._buckets.pop(step.bucket, None)
        for chunk in step.chunks:
            self._solos.pop(chunk.seq, None)
