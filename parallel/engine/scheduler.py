"""All policy of the engine: who is admitted, what the next step is, what is kept, dropped or preempted.

Pure: no mlx, no clock (time is an argument), no I/O. It runs on rank 0 only; what it decides travels as Steps.

The rules, in short:
- A step is one decode of one bucket of rows, or one prefill chunk of one sequence. While rows run, prefill gets a time
  budget per step of every bucket, so a long prompt slows streams down by a bounded factor and never stops them.
- Short prompts that start at about the same token (none cached, or the same system prompt) are prefilled together,
  padded on the right: the weights are read once for all. Only where caches can be cut to any prefix.
- Prompts are prefilled shortest first, aged by their waiting time. A prompt that shares a long prefix with one that is
  being prefilled waits for it and reuses its KV.
- Rows of similar length share a bucket: a row goes where it adds the least padding, or into a bucket of its own when
  padding would cost more bytes per step than reading the weights once more.
- KV bytes never exceed the limit: first prefix entries go, then the youngest running sequence is preempted and
  recomputed later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from parallel import wire
from parallel.engine.prefix import BLOCK, PrefixIndex
from parallel.engine.sequence import CacheShape, Sequence, State, StepResult

SMALL_CHUNK = 64  # up to here a chunk costs about one reading of the weights, whatever its length
PREFILL_SHARE_S = 0.05  # prefill may always take this long per round of the buckets, even when rounds are shorter
PREFILL_LONGEST_S = 0.5  # and but for a small chunk never longer than this, however many wait
CROWD = 3  # rounds' time more for prefill per round, when as many short prompts wait as rows run
IDLE_CHUNK_S = 1.0  # a chunk with nothing running: the longest that a newcomer or a cancellation waits for
GROWTH_TOKENS = 256  # room that a sequence needs beyond its prompt to be admitted
SHARED_TOKENS = 64  # a prefix this much longer than the cached one is worth waiting for
TOGETHER_TOKENS = 512  # a longer chunk fills the device alone
REALIGNED_TOKENS = 16  # cached tokens that are computed again, so that prompts can be prefilled together
FILLED = 0.75  # of prompts prefilled together, the least share that is no padding


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler must stay within. Sizes in bytes.

    `reuse` is "any" (caches can be cut to any prefix), "boundary" (only as saved) or "off". `depth` steps may be in
    flight; with `lookahead` two of them may belong to one bucket, the second fed by tokens still on the device.
    `batchable` False keeps every row in a bucket of its own. A pipeline of `stages` needs as many buckets, as
    micro-batches, to keep all stages busy.
    """

    context: int
    slots: int
    kv_bytes: int
    prefix_bytes: int
    shape: CacheShape
    weights_bytes: int
    chunk_tokens: int = 2048
    reuse: str = "any"
    lookahead: bool = True
    batchable: bool = True
    stages: int = 1

    @property
    def depth(self) -> int:
        """Steps that may be in flight: with look-ahead the next one while one runs, or twice what fills a pipeline."""
        return 2 * self.stages if self.lookahead or self.stages > 1 else 1

    @property
    def kv_tokens(self) -> int:
        """The longest sequence that can run alone: its cache, and once more for the copy when it grows."""
        return self.shape.longest(self.kv_bytes // 2)


@dataclass(eq=False, slots=True)
class Bucket:
    """Rows that decode together; `stepped` is its last step."""

    id: int
    rows: list[Sequence] = field(default_factory=list)
    stepped: int = 0

    @property
    def length(self) -> int:
        """Tokens that every row is padded to."""
        return max((row.computed for row in self.rows), default=0)


@dataclass(slots=True)
class Pace:
    """Measured step times, smoothed; seconds. `rates` are rows per second by (bits of the number of rows, buckets)."""

    decode_s: float = 0.05
    small_s: float = 0.05
    token_s: float = 0.002
    rates: dict[tuple[int, int], float] = field(default_factory=dict)

    def chunk_s(self, tokens: int) -> float:
        """Predicted time of a prefill chunk."""
        return self.small_s if tokens <= SMALL_CHUNK else max(self.small_s, tokens * self.token_s)

    def parts(self, rows: int, stages: int) -> int:
        """Into how many micro-batches `rows` rows go: one per stage, unless fewer were measured clearly faster."""
        most = max(1, min(stages, rows))
        size = rows.bit_length()

        def rate(parts: int) -> float:
            return 1.1 * self.rates.get((size, parts), inf) if parts == most else self.rates.get((size, parts), 0.0)

        return max(range(1, most + 1), key=rate)

    def learn(self, step: wire.Step, duration_s: float, rows: int, buckets: int) -> None:
        """Fold in how long `step` took, while `rows` rows ran in `buckets` buckets."""
        if step.rows:
            self.decode_s += 0.2 * (duration_s - self.decode_s)
            key, rate = (rows.bit_length(), buckets), len(step.rows) / max(duration_s, 1e-6)
            self.rates[key] = self.rates.get(key, rate) + 0.1 * (rate - self.rates.get(key, rate))
        elif step.computed > SMALL_CHUNK:
            self.token_s += 0.3 * (duration_s / step.computed - self.token_s)
        elif step.computed:
            self.small_s += 0.3 * (duration_s - self.small_s)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step on its way, with what its result is for."""

    step: wire.Step
    rows: tuple[Sequence, ...]
    bucket: Bucket | None
    entries: tuple[int, ...]


class Scheduler:
    """`add` and `abort` requests, ask for the `next_step`, `apply` its result."""

    def __init__(
        self,
        limits: Limits,
        *,
        needs_host: Callable[[wire.Sampling], bool] = lambda sampling: False,
        draw_seed: Callable[[], int] = lambda: random.getrandbits(63),
    ) -> None:
        self.limits = limits
        self.pace = Pace()
        self._longest = min(limits.context, limits.kv_tokens)  # tokens of a sequence, prompt and answer
        self._needs_host = needs_host
        self._draw_seed = draw_seed
        self._prefix = PrefixIndex(whole=limits.reuse == "boundary")
        self._samples: dict[int, list[Sequence]] = {}
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._prefilled: list[Sequence] = []
        self._buckets: dict[int, Bucket] = {}
        self._orders: list[wire.Order] = []
        self._flights: dict[int, _Flight] = {}
        self._events: list[wire.Started | wire.RequestFailed] = []
        self._prefill_s = 0.0  # of the budget, what is spent
        self._stepped = 0  # decode steps since the last prefill
        self._serial = 0
        self._steps = 0
        self._preempted = self._hit_tokens = self._prompt_tokens = self._output_tokens = 0

    # ------------------------------------------------------------ requests

    def add(self, request: wire.Submit, now_s: float) -> None:
        """Queue `request`; one that can never fit fails at once with both numbers."""
        limits = self.limits
        room = self._longest - len(request.prompt)
        rows_bytes = request.n * limits.shape.bytes(len(request.prompt) + 1) + limits.shape.bytes(len(request.prompt))
        if not request.prompt or room < 1:
            longest = self._longest - 1
            self._refuse(request, f"the prompt has {len(request.prompt)} tokens; this server takes 1 to {longest}")
        elif request.n > limits.slots:
            self._refuse(request, f"n is {request.n}, but this server runs {limits.slots} sequences at once")
        elif request.n > 1 and rows_bytes > limits.kv_bytes // 2:
            self._refuse(
                request,
                f"{request.n} samples of this prompt need {rows_bytes:,} bytes of KV cache, "
                f"the limit is {limits.kv_bytes // 2:,}",
            )
        else:
            samples = [self._sequence(request, index, now_s) for index in range(request.n)]
            samples[0].siblings = samples[1:]
            self._samples[request.id] = samples
            self._waiting.append(samples[0])
            self._prompt_tokens += len(request.prompt)

    def abort(self, abort: wire.Abort) -> None:
        """End a request or one sample of it at the next step; unknown or finished ones are ignored."""
        for sequence in list(self._samples.get(abort.id, ())):
            if abort.index in (-1, sequence.index) and sequence.state is not State.FINISHED:
                if abort.keep is not None:
                    del sequence.tokens[sequence.prompt_length + abort.keep :]
                    self._cut_entry(sequence)
                self._finish(sequence, save=abort.keep is not None)

    def abort_all(self) -> None:
        """End every request at the next step."""
        for request_id in list(self._samples):
            self.abort(wire.Abort(request_id))

    def take_events(self) -> list[wire.Started | wire.RequestFailed]:
        """What happened outside of any step's result since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def idle(self) -> bool:
        """Nothing to do and nothing in flight."""
        return not (self._samples or self._orders or self._flights)

    @property
    def inflight(self) -> int:
        """Steps without a result yet."""
        return len(self._flights)

    def stats(self) -> wire.Stats:
        """Counts and sizes as they are now."""
        return wire.Stats(
            waiting=len(self._waiting),
            prefilling=len(self._prefilling) + len(self._prefilled),
            running=self._running,
            buckets=len(self._buckets),
            kv_bytes=self._active_bytes() + self._prefix.bytes,
            prefix_bytes=self._prefix.bytes,
            prefix_entries=len(self._prefix),
            prefix_hit_tokens=self._hit_tokens,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            steps=self._steps,
            step_s=self.pace.decode_s,
            preempted=self._preempted,
        )

    def expected_s(self, step: wire.Step) -> float:
        """How long a step in flight should take, those before it included."""
        one_s = self.pace.decode_s if step.rows else self.pace.chunk_s(step.computed)
        return one_s * max(1, self.inflight)

    def clear_prefixes(self) -> None:
        """Forget every prefix entry at the next step."""
        self._evict(0)

    # ------------------------------------------------------------ steps

    def next_step(self) -> wire.Step | None:
        """The next step to send, or None when there is nothing to do before a result comes back."""
        running = bool(self._buckets or self._prefilled)
        due = not running or self._prefill_s < self._prefill_budget_s()
        if due and (sequence := self._next_prefill()) is not None:
            return self._prefill_step(sequence, running)
        self._enter_prefilled()
        bucket = self._next_bucket()
        if bucket is not None and self._make_room():
            bucket = self._next_bucket()
        if bucket is not None:
            return self._decode_step(bucket)
        return self._emit(wire.Step(0)) if self._orders and not self._flights else None

    def apply(self, result: StepResult, duration_s: float) -> list[wire.Token]:
        """Take a step's result, which took `duration_s` seconds; returns the tokens it made for open samples."""
        flight = self._flights.pop(result.id)
        for row in flight.rows:
            row.inflight -= 1
        if result.error:
            self._fail(flight, result.error)
            return []
        self.pace.learn(flight.step, duration_s, self._running, len(self._buckets))
        if not flight.step.rows:
            return []
        tokens = []
        for row, token in zip(flight.rows, result.tokens, strict=True):
            if row.state is State.FINISHED:
                continue
            row.tokens.append(token)
            finish = ""
            if token in row.request.stop_ids:
                finish = "stop"
            elif row.outputs >= self._max_tokens(row):
                finish = "length"
            tokens.append(wire.Token(row.request.id, row.index, token, finish, result.tops.get(row.id)))
            if finish:
                self._finish(row, save=True)
        self._output_tokens += len(tokens)
        return tokens

    # ------------------------------------------------------------ prefill

    def _next_prefill(self) -> Sequence | None:
        """The sequence whose chunk comes next, admitted if it was waiting."""

        started = min(self._prefilling, key=self._urgency, default=None)
        while waiting := self._next_waiting():
            if started is not None and self._urgency(started) <= self._urgency(waiting):
                break
            sharing = self._admit(waiting)
            if sharing is not None:
                return sharing
            if waiting.state is State.WAITING:
                break
            if waiting.state is State.PREFILLING:
                return waiting
            # its whole prompt was cached: it is a row already, so look for the next one
        return started

    def _urgency(self, sequence: Sequence) -> float:
        """Whose prompt comes first: the shortest, aged by its waiting time."""
        return sequence.to_prefill * self.pace.token_s + sequence.arrival_s

    def _next_waiting(self) -> Sequence | None:
        return min((s for s in self._waiting if not s.inflight), key=self._urgency, default=None)

    def _admit(self, sequence: Sequence) -> Sequence | None:
        """Start `sequence` if slots and memory allow; returns the one in prefill whose prefix it waits for."""
        before = (*self._prefilling, *self._prefilled)
        live = sum(1 + len(s.siblings) for s in before) + self._running
        rows = 1 + len(sequence.siblings)
        shape = self.limits.shape
        target = len(sequence.tokens) + min(GROWTH_TOKENS, self._max_tokens(sequence) - sequence.outputs)
        need = shape.bytes(len(sequence.tokens)) + rows * shape.bytes(target)
        if live + rows > self.limits.slots:
            return None
        if live and self._active_bytes() + need + self._copy_bytes() > self.limits.kv_bytes:
            return None
        entry, length = (-1, 0) if self.limits.reuse == "off" else self._prefix.match(sequence.tokens)
        for other in self._prefilling:
            if _shared(other.tokens, sequence.tokens) >= length + SHARED_TOKENS:
                return other
        self._waiting.remove(sequence)
        sequence.state = State.PREFILLING
        sequence.computed = length
        sequence.scheduled = sequence.outputs
        self._orders.append(wire.Open(sequence.id, entry, length))
        self._evict(self.limits.kv_bytes - self._active_bytes() - need - self._copy_bytes())
        if not sequence.outputs:
            self._hit_tokens += length
            self._events.append(wire.Started(sequence.request.id, length))
        if sequence.to_prefill:
            self._prefilling.append(sequence)
        else:
            self._prefill_done(sequence)
        return None

    def _prefill_step(self, lead: Sequence, running: bool) -> wire.Step:
        """One chunk of `lead`, as long as the time budget allows, or its whole prompt together with others."""
        if not running:
            self._prefill_s = 0.0
        budget_s = self._prefill_budget_s() - self._prefill_s if running else IDLE_CHUNK_S / self.limits.stages
        tokens = SMALL_CHUNK + int(budget_s / self.pace.token_s)  # the rest of the budget would buy a small one anyway
        affordable = min(tokens, self.limits.chunk_tokens)
        group = [lead]
        if lead.to_prefill <= affordable:
            group += self._companions(lead, affordable)
        start = min(sequence.computed for sequence in group)
        chunks = []
        for sequence in group:
            stop = min(len(sequence.tokens) - 1, start + affordable)
            chunks.append(wire.Chunk(sequence.id, sequence.tokens[start:stop]))
            sequence.computed = stop
        step = self._emit(wire.Step(0, start=start, chunks=chunks), tuple(group))
        self._prefill_s += self.pace.chunk_s(step.computed)
        self._stepped = 0
        for sequence in group:
            if not sequence.to_prefill:
                self._prefilling.remove(sequence)
                self._keep_prompt(sequence)
                self._prefill_done(sequence)
        return step

    def _companions(self, lead: Sequence, affordable: int) -> list[Sequence]:
        """Sequences whose whole prompts are prefilled in one step with `lead`'s, `affordable` tokens in all."""
        limits = self.limits
        if limits.reuse != "any" or not limits.batchable or lead.to_prefill > TOGETHER_TOKENS:
            return []
        group = [lead]
        most = -(-(len(self._prefilling) + len(self._waiting)) // limits.stages)  # a pipeline wants a chunk per stage

        def fits(other: Sequence) -> bool:
            starts = [sequence.computed for sequence in (*group, other)]
            ends = [len(sequence.tokens) - 1 for sequence in (*group, other)]
            start, width = min(starts), max(ends) - min(starts)
            padded = len(ends) * width
            free = limits.kv_bytes - self._active_bytes() - self._copy_bytes()
            return (
                max(starts) - start <= REALIGNED_TOKENS
                and width <= TOGETHER_TOKENS
                and FILLED * padded <= sum(ends) - len(ends) * start
                and padded <= affordable
                and len(ends) * limits.shape.bytes(max(ends)) <= free
            )

        for other in sorted(self._prefilling, key=self._urgency):
            if other is not lead and len(group) < most and fits(other):
                group.append(other)
        while len(group) < most and (waiting := self._next_waiting()) is not None:
            if len(waiting.tokens) - lead.computed > TOGETHER_TOKENS:
                break
            if self._admit(waiting) is not None or waiting.state is State.WAITING:
                break
            if waiting.state is State.PREFILLING:
                if not fits(waiting):
                    break
                group.append(waiting)
        return group[1:]

    def _prefill_done(self, sequence: Sequence) -> None:
        sequence.state = State.PREFILLED
        self._prefilled.append(sequence)

    def _keep_prompt(self, sequence: Sequence) -> None:
        """Make a prefix entry of what was just prefilled; later prompts that share it start from there."""
        if self.limits.reuse == "off" or sequence.computed < BLOCK:
            return
        tokens = sequence.tokens[: sequence.computed]
        entry = self._add_entry(tokens, self.limits.shape.bytes(len(tokens)))
        if entry >= 0:
            sequence.entry = entry
            self._orders.append(wire.Keep(sequence.id, entry))

    # ------------------------------------------------------------ decode

    def _enter_prefilled(self) -> None:
        """Everything prefilled joins now, right before a decode step, so that one copy of a bucket serves all."""
        enters: dict[int, list[wire.NewRow]] = {}
        leads, self._prefilled = self._prefilled, []
        for lead in leads:
            self._enter(lead, enters)
        self._orders += [wire.Enter(bucket, rows) for bucket, rows in enters.items()]
        self._orders += [wire.Close(lead.id) for lead in leads]

    def _enter(self, lead: Sequence, enters: dict[int, list[wire.NewRow]]) -> None:
        """Put a prefilled sequence, and the samples that share its prefill, into buckets."""
        rows = [lead, *lead.siblings]
        lead.siblings = []
        together = self.limits.batchable and self.limits.stages == 1
        for group in [rows] if together else [[row] for row in rows]:
            bucket = self._place(lead.computed, len(group))
            for row in group:
                row.state = State.RUNNING
                row.computed = lead.computed
                row.bucket = bucket.id
                row.entry = lead.entry
            bucket.rows += group
            entering = [self._new_row(row, lead) for row in group]
            enters.setdefault(bucket.id, []).extend(entering)

    def _place(self, length: int, rows: int) -> Bucket:
        """The bucket where `rows` rows of `length` tokens waste the least, or a new one when that is cheaper.

        Micro-batches of a pipeline are filled evenly instead, as long as the waste is bearable.
        """
        shape = self.limits.shape

        def padding(bucket: Bucket) -> int:
            longest = max(bucket.length, length)
            together = (len(bucket.rows) + rows) * shape.bytes(longest)
            return together - len(bucket.rows) * shape.bytes(bucket.length) - rows * shape.bytes(length)

        fits = [b for b in self._buckets.values() if padding(b) <= self.limits.weights_bytes]
        enough = len(self._buckets) >= self.pace.parts(self._running + rows, self.limits.stages)
        if self.limits.batchable and fits and enough:
            return min(fits, key=padding if self.limits.stages == 1 else lambda bucket: len(bucket.rows))
        self._serial += 1
        bucket = self._buckets[self._serial] = Bucket(self._serial)
        return bucket

    def _fuse(self) -> None:
        """Join buckets that have grown alike, so that the weights are read once for both."""
        if not self.limits.batchable or len(self._buckets) <= self.pace.parts(self._running, self.limits.stages):
            return
        shape = self.limits.shape
        ordered = sorted(self._buckets.values(), key=lambda bucket: bucket.length)
        for short, long in pairwise(ordered):
            padding = len(short.rows) * (shape.bytes(long.length) - shape.bytes(short.length))
            if padding <= self.limits.weights_bytes // 2:
                self._orders.append(wire.Fuse(long.id, short.id))
                for row in short.rows:
                    row.bucket = long.id
                long.rows += short.rows
                del self._buckets[short.id]
                return

    @property
    def _running(self) -> int:
        """Rows in all buckets."""
        return sum(len(bucket.rows) for bucket in self._buckets.values())

    def _next_bucket(self) -> Bucket | None:
        """The bucket that has waited longest among those that may be stepped now."""
        ready = [b for b in self._buckets.values() if max(row.unread for row in b.rows) < self._ahead(b)]
        return min(ready, key=lambda bucket: bucket.stepped, default=None)

    def _ahead(self, bucket: Bucket) -> int:
        """How many results each row of `bucket` may be waiting for, with the next step."""
        waits = not self.limits.lookahead or any(
            row.request.needs_host or self._needs_host(row.sampling) for row in bucket.rows
        )
        return 1 if waits else 2

    def _decode_step(self, bucket: Bucket) -> wire.Step:
        """One token for every row of `bucket`."""
        rows = tuple(bucket.rows)
        fed = [wire.Row(row.id, -1 if row.unread else row.tokens[-1], row.computed) for row in rows]
        for row in rows:
            row.computed += 1
            row.scheduled += 1
        step = self._emit(wire.Step(0, bucket=bucket.id, rows=fed), rows, bucket)
        bucket.stepped = step.id
        self._stepped += 1
        if self._stepped * self._prefill_parts >= len(self._buckets):
            self._prefill_s = 0.0
        for row in rows:
            if row.scheduled >= self._max_tokens(row):  # its last token is on its way: it need not be looked ahead
                self._exit(row, save=True)
        return step

    @property
    def _prefill_parts(self) -> int:
        """Into how many chunks, before as many buckets' steps, the prefill of a round goes.

        One costs the least per token. But a bucket's step waits at each stage for the chunk before it: from three
        stages on, the first one would run dry before the bucket's result is back.
        """
        return 1 if self.limits.stages < 3 else len(self._buckets)

    def _prefill_budget_s(self) -> float:
        """How long prefill may take for its part of a round: as long as decoding, more when more wait than run.

        Short prompts get more: a row that joins sooner makes every later step fuller.
        """
        if not self._buckets:  # those that came together start together
            return PREFILL_LONGEST_S
        short = sum(sequence.to_prefill <= TOGETHER_TOKENS for sequence in self._waiting)
        everybody = len(self._waiting) + len(self._prefilling)
        crowd = max(everybody / self._running, 1 + CROWD * short / self._running)
        share_s = max(len(self._buckets) * self.pace.decode_s, PREFILL_SHARE_S)
        return max(share_s, min(crowd * share_s, PREFILL_LONGEST_S)) / self._prefill_parts

    # ------------------------------------------------------------ leaving

    def _finish(self, sequence: Sequence, *, save: bool) -> None:
        """`sequence` is over, wherever it stands."""
        if sequence.state is State.WAITING:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
        elif sequence.state in (State.PREFILLING, State.PREFILLED):
            (self._prefilling if sequence.state is State.PREFILLING else self._prefilled).remove(sequence)
            self._orders.append(wire.Close(sequence.id))
        elif sequence.bucket >= 0:
            self._exit(sequence, save=save)
        sequence.state = State.FINISHED
        samples = self._samples.get(sequence.request.id, [])
        if all(sample.state is State.FINISHED for sample in samples):
            self._samples.pop(sequence.request.id, None)

    def _exit(self, row: Sequence, *, save: bool) -> None:
        """Take `row` out of its bucket; its KV becomes a prefix entry if that is allowed and worth it."""
        bucket = self._buckets[row.bucket]
        bucket.rows.remove(row)
        row.bucket = -1
        length = min(row.computed, len(row.tokens))
        entry = -1
        if save and self.limits.reuse == "any" and length >= BLOCK:
            if row.entry in self._prefix:  # the longer entry holds the shorter
                self._prefix.remove(row.entry)
                self._orders.append(wire.Forget(row.entry))
            entry = row.entry = self._add_entry(row.tokens[:length], self.limits.shape.exact_bytes(length))
        self._orders.append(wire.Exit(bucket.id, row.id, entry, length))
        if not bucket.rows:
            del self._buckets[bucket.id]
        self._fuse()

    def _cut_entry(self, sequence: Sequence) -> None:
        """Forget the entry of a sequence that left already, if it holds more than the answer that counts."""
        if sequence.bucket < 0 and self._prefix.length(sequence.entry) > len(sequence.tokens):
            self._prefix.remove(sequence.entry)
            self._orders.append(wire.Forget(sequence.entry))

    def _make_room(self) -> bool:
        """Before a decode step, keep KV within the limit; True when that preempted a sequence."""
        limit = self.limits.kv_bytes
        over = self._active_bytes(grow=1) + self._copy_bytes() - limit
        preempted = False
        while over > 0:
            rows = [row for bucket in self._buckets.values() for row in bucket.rows]
            if len(rows) < 2:
                break
            youngest = max(rows, key=lambda row: (row.arrival_s, row.id))
            self._exit(youngest, save=False)
            youngest.state = State.WAITING
            youngest.computed = 0
            self._waiting.append(youngest)
            self._preempted += 1
            preempted = True
            over = self._active_bytes(grow=1) + self._copy_bytes() - limit
        self._evict(limit - self._active_bytes(grow=1) - self._copy_bytes())
        return preempted

    def _fail(self, flight: _Flight, error: str) -> None:
        """Fail every request of a step that raised, and of its bucket, whose KV cannot be trusted any more."""
        later = [f for f in self._flights.values() if f.step.id > flight.step.id]
        for entry in (entry for f in (flight, *later) for entry in f.entries):
            self._prefix.remove(entry)
            self._orders.append(wire.Forget(entry))
        victims = {row.request.id for row in (*flight.rows, *(flight.bucket.rows if flight.bucket else ()))}
        for request_id in sorted(victims & self._samples.keys()):
            self._events.append(wire.RequestFailed(request_id, error))
            self.abort(wire.Abort(request_id))

    # ------------------------------------------------------------ bookkeeping

    def _emit(self, step: wire.Step, rows: tuple[Sequence, ...] = (), bucket: Bucket | None = None) -> wire.Step:
        """Number `step`, put the orders so far before it, and remember what its result is for."""
        self._steps += 1
        orders, self._orders = self._orders, []
        step = wire.Step(self._steps, orders, step.bucket, step.rows, step.start, step.chunks)  # type: ignore[arg-type]
        entries = tuple(_entries(orders))
        for row in rows:
            row.inflight += 1
        self._flights[step.id] = _Flight(step, rows, bucket, entries)
        return step

    def _sequence(self, request: wire.Submit, index: int, now_s: float) -> Sequence:
        self._serial += 1
        seed = self._draw_seed() if request.sampling.seed is None else request.sampling.seed + index * 0x9E3779B1
        return Sequence(self._serial, request, index, now_s, seed, list(request.prompt))

    def _new_row(self, row: Sequence, lead: Sequence) -> wire.NewRow:
        sampling = row.sampling
        penalised = sampling.repetition != 1.0 or sampling.presence or sampling.frequency
        prompt, output = row.tokens[: row.prompt_length], row.tokens[row.prompt_length :]
        return wire.NewRow(row.id, lead.id, sampling, row.seed, *((prompt, output) if penalised else ()))

    def _max_tokens(self, sequence: Sequence) -> int:
        return max(1, min(sequence.request.max_tokens, self._longest - sequence.prompt_length))

    def _active_bytes(self, grow: int = 0) -> int:
        """KV of rows and of sequences in prefill, if every row had `grow` more tokens."""
        shape = self.limits.shape
        rows = sum(len(b.rows) * shape.bytes(b.length + grow) for b in self._buckets.values())
        return rows + sum(shape.bytes(len(s.tokens)) for s in (*self._prefilling, *self._prefilled))

    def _copy_bytes(self) -> int:
        """The largest copy that a join, a leave or growth makes for a moment."""
        shape = self.limits.shape
        return max((len(b.rows) * shape.bytes(b.length + 1) for b in self._buckets.values()), default=0)

    def _add_entry(self, tokens: list[int], size: int) -> int:
        """A new prefix entry of `size` bytes for `tokens` within the byte budget, or -1 when it would not fit."""
        free = self.limits.kv_bytes - self._active_bytes() - self._copy_bytes()
        budget = min(self.limits.prefix_bytes, free)
        if size > budget:
            return -1
        self._evict(budget - size)
        self._serial += 1
        self._prefix.add(self._serial, tokens, size)
        return self._serial

    def _evict(self, limit_bytes: int) -> None:
        self._orders += [wire.Forget(entry) for entry in self._prefix.evict(max(0, limit_bytes))]

    def _refuse(self, request: wire.Submit, reason: str) -> None:
        self._events.append(wire.RequestFailed(request.id, reason, "bad"))


def _entries(orders: list[wire.Order]) -> Iterator[int]:
    """The prefix entries that `orders` make."""
    for order in orders:
        if isinstance(order, wire.Keep | wire.Exit) and order.entry >= 0:
            yield order.entry


def _shared(a: list[int], b: list[int]) -> int:
    """How many leading tokens of two prompts are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
