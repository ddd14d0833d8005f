"""Logits [B, V] of a bucket to tokens [B], every row by its own rules, in one pass over the batch.

The order is: logit bias and penalties, then greedy choice (temperature 0) or temperature, top-k, top-p, min-p and one
draw. A row's draw depends on its seed and position alone, never on its neighbours. Penalties follow their usual
definitions: repetition (CTRL, Keskar et al. 2019) over prompt and output, presence and frequency (OpenAI) over the
output.

Top-k and top-p need a row's logits in order. On a GPU a partition is a sort, so rows that ask are sorted. On a CPU the
`CANDIDATES` largest are taken first, which is exact unless they hold less than top_p of the mass; whether they do is
known only once the step has run, so such rows are not looked ahead (`needs_host`) and are then sorted fully.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from parallel.wire import NewRow, Sampling

CANDIDATES = 256
_MASK = (1 << 64) - 1
_BLOCK = 256  # tokens drawn from together, see `_choose`


def on_cpu() -> bool:
    """Whether arrays live on a CPU by default."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def needs_host(sampling: Sampling) -> bool:
    """Whether a row's token is certain only after its step has been read: top-p by candidates, on a CPU."""
    return sampling.temperature > 0 and sampling.top_p < 1 and not 0 < sampling.top_k <= CANDIDATES and on_cpu()


@dataclass(slots=True)
class Sampled:
    """What one step sampled, still on the device.

    `tokens` int32 [B]. `chosen` float32 [R], `top_ids` int32 [R, K] and `top_logprobs` float32 [R, K] belong to the R
    rows that asked for log-probabilities. `whole` bool [P] is False where the candidates of a top-p row held too
    little mass: then the sampler must be called again with `full`.
    """

    tokens: mx.array
    chosen: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None
    whole: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """Everything the host reads."""
        return [a for a in (self.tokens, self.chosen, self.top_ids, self.top_logprobs, self.whole) if a is not None]


class Sampler:
    """The sampling state of a bucket's rows, in their order. Made anew from the `previous` when rows join or leave."""

    def __init__(self, rows: list[NewRow], *previous: Sampler | None) -> None:
        self.rows = rows
        params = [row.sampling for row in rows]
        self._random = [i for i, p in enumerate(params) if p.temperature > 0]
        self._penalised = [i for i, p in enumerate(params) if p.repetition != 1 or p.presence or p.frequency]
        self._biased = [i for i, p in enumerate(params) if p.bias]
        self._sorted = [i for i in self._random if params[i].top_k > 0 or params[i].top_p < 1]
        self._min_p = any(params[i].min_p > 0 for i in self._random)
        self._logprobs = [i for i, p in enumerate(params) if p.logprobs >= 0]
        self._top = max((p.logprobs for p in params), default=0)
        self._seeds = np.array([row.seed & _MASK for row in rows], np.uint64)
        self._params = params
        self._temperature = mx.array([p.temperature if p.temperature > 0 else 1.0 for p in params])[:, None]
        self._greedy = mx.array([p.temperature <= 0 for p in params])
        floors = [p.min_p if p.temperature > 0 else 0.0 for p in params]
        self._floor = mx.array(np.log(np.maximum(floors, 1e-30)).astype(np.float32))[:, None]
        self._counts: dict[int, tuple[mx.array, mx.array]] = {}
        for sampler in previous:
            if sampler is not None and self._penalised:
                self._counts.update(sampler._counts_by_row())
        self._seen: mx.array | None = None
        self._said: mx.array | None = None
        self._last: mx.array | None = None
        self._bias: mx.array | None = None

    def __call__(self, logits: mx.array, positions: list[int], *, full: bool = False) -> Sampled:
        """Sample from `logits` [B, V] of rows whose inputs stood at `positions`; with `full`, do the last call over."""
        if not full:
            self._count_last()
        adjusted = self._adjust(logits)
        if self._random:
            result = self._draw(adjusted, positions, full)
        else:
            result = Sampled(mx.argmax(adjusted, axis=-1).astype(mx.int32))
        if self._logprobs:
            self._add_logprobs(result, logits)
        self._last = result.tokens
        return result

    # ------------------------------------------------------------ bias and penalties

    def _adjust(self, logits: mx.array) -> mx.array:
        """`logits` as float32 with bias and penalties, or unchanged when no row has any."""
        if not (self._penalised or self._biased):
            return logits
        logits = logits.astype(mx.float32)
        vocabulary = logits.shape[-1]
        if self._biased:
            if self._bias is None:
                self._bias = mx.array(_dense([self._params[i].bias for i in self._biased], vocabulary))
            bias = self._bias
            logits = _replace(logits, self._biased, lambda rows: rows + bias)
        if self._penalised:
            if self._seen is None:
                self._count(vocabulary)
            logits = _replace(logits, self._penalised, self._penalise)
        return logits

    def _penalise(self, rows: mx.array) -> mx.array:
        assert self._seen is not None and self._said is not None
        params = [self._params[i] for i in self._penalised]
        repetition = mx.array([p.repetition for p in params])[:, None]
        seen = self._seen | (self._said > 0)
        rows = mx.where(seen, mx.where(rows > 0, rows / repetition, rows * repetition), rows)
        presence = mx.array([p.presence for p in params])[:, None]
        frequency = mx.array([p.frequency for p in params])[:, None]
        return rows - presence * (self._said > 0) - frequency * self._said

    def _count(self, vocabulary: int) -> None:
        """Token counts of the penalised rows: carried over from the previous sampler, else from the rows' history."""
        seen, said = [], []
        for i in self._penalised:
            row = self.rows[i]
            if row.seq in self._counts:
                a, b = self._counts[row.seq]
            else:
                a = mx.array(np.bincount(np.array(row.prompt, np.int64), minlength=vocabulary)[:vocabulary] > 0)
                b = mx.array(np.bincount(np.array(row.output, np.int64), minlength=vocabulary)[:vocabulary], mx.int32)
            seen.append(a)
            said.append(b)
        self._seen, self._said = mx.stack(seen), mx.stack(said)
        self._counts = {}

    def _count_last(self) -> None:
        """Count the tokens of the last call, which stand by now."""
        if self._penalised and self._last is not None and self._said is not None:
            last = self._last[mx.array(self._penalised)][:, None]
            self._said = mx.put_along_axis(self._said, last, mx.take_along_axis(self._said, last, axis=-1) + 1, axis=-1)
        self._last = None

    def _counts_by_row(self) -> dict[int, tuple[mx.array, mx.array]]:
        self._count_last()
        if self._seen is None or self._said is None:
            return self._counts
        return {self.rows[i].seq: (self._seen[j], self._said[j]) for j, i in enumerate(self._penalised)}

    # ------------------------------------------------------------ drawing

    def _draw(self, logits: mx.array, positions: list[int], full: bool) -> Sampled:
        """One draw per random row, the greedy choice for the others."""
        scaled = logits.astype(mx.float32) / self._temperature
        whole = None
        if self._sorted:
            mask, whole = self._cut(scaled, full)
            scaled = _replace(scaled, self._sorted, lambda rows: mx.where(mask, rows, -mx.inf))
        if self._min_p:
            scaled = mx.where(scaled >= scaled.max(axis=-1, keepdims=True) + self._floor, scaled, -mx.inf)
        tokens = _choose(scaled, mx.array(_uniforms(self._seeds, positions)))
        if len(self._random) < len(self.rows):
            tokens = mx.where(self._greedy, mx.argmax(logits, axis=-1), tokens)
        return Sampled(tokens.astype(mx.int32), whole=whole)

    def _cut(self, scaled: mx.array, full: bool) -> tuple[mx.array, mx.array | None]:
        """Which logits of the rows with top-k or top-p stay: bool [P, V], and whether candidates sufficed, bool [P]."""
        params = [self._params[i] for i in self._sorted]
        rows = scaled if len(self._sorted) == len(self.rows) else scaled[mx.array(self._sorted)]
        vocabulary = rows.shape[-1]
        fits = vocabulary > CANDIDATES and all(p.top_k <= CANDIDATES for p in params)
        by_candidates = fits and not full and on_cpu()
        ordered = -mx.sort(-(mx.topk(rows, CANDIDATES, axis=-1) if by_candidates else rows), axis=-1)
        width = ordered.shape[-1]
        top_k = mx.array([min(p.top_k, width) if p.top_k > 0 else width for p in params])[:, None]
        top_p = mx.array([max(p.top_p, 1e-9) if p.top_p < 1 else 2.0 for p in params])[:, None]
        limited = mx.array([p.top_k > 0 for p in params])[:, None]
        stays = mx.arange(width)[None] < top_k
        kept = mx.where(stays, ordered, -mx.inf)
        mass = mx.where(limited, mx.logsumexp(kept, axis=-1, keepdims=True), mx.logsumexp(rows, axis=-1, keepdims=True))
        probability = mx.exp(kept - mass)
        before = mx.cumsum(probability, axis=-1) - probability
        stays = stays & (before < top_p)
        threshold = mx.where(stays, ordered, mx.inf).min(axis=-1, keepdims=True)
        mask = rows >= threshold
        if not by_candidates:
            return mask, None
        enough = (probability.sum(axis=-1) >= top_p[:, 0]) | limited[:, 0]
        return mask, enough

    # ------------------------------------------------------------ log-probabilities

    def _add_logprobs(self, result: Sampled, raw: mx.array) -> None:
        """Log-probabilities under the model itself: before bias, penalties and temperature."""
        rows = (raw if len(self._logprobs) == len(self.rows) else raw[mx.array(self._logprobs)]).astype(mx.float32)
        tokens = result.tokens if len(self._logprobs) == len(self.rows) else result.tokens[mx.array(self._logprobs)]
        logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
        result.chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        if self._top > 0:
            ids = mx.argpartition(-logprobs, self._top - 1, axis=-1)[:, : self._top]
            result.top_ids = ids.astype(mx.int32)
            result.top_logprobs = mx.take_along_axis(logprobs, ids, axis=-1)

    def read_logprobs(self, sampled: Sampled, tokens: list[int]) -> dict[int, list[tuple[int, float]]]:
        """Per sequence that asked: the chosen token, then its alternatives, best first. Reads evaluated arrays."""
        if sampled.chosen is None:
            return {}
        chosen: list[float] = np.array(sampled.chosen).tolist()
        ids: list[list[int]] = [[]] * len(chosen)
        values: list[list[float]] = [[]] * len(chosen)
        if sampled.top_ids is not None:
            ids, values = np.array(sampled.top_ids).tolist(), np.array(sampled.top_logprobs).tolist()
        tops = {}
        for j, i in enumerate(self._logprobs):
            wanted = self._params[i].logprobs
            best = sorted(zip(ids[j], values[j], strict=True), key=lambda pair: -pair[1])[:wanted]
            tops[self.rows[i].seq] = [(tokens[i], chosen[j]), *best]
        return tops


def _replace(logits: mx.array, rows: list[int], change: Callable[[mx.array], mx.array]) -> mx.array:
    """`logits` with `change` applied to some of its rows."""
    if len(rows) == logits.shape[0]:
        return change(logits)
    index = mx.array(rows)
    changed = change(logits[index])
    out = logits[...]
    out[index] = changed
    return out


def _dense(biases: list[dict[int, float]], vocabulary: int) -> np.ndarray:
    """Sparse biases as float32 [len(biases), vocabulary]; ids outside of the vocabulary are ignored."""
    out = np.zeros((len(biases), vocabulary), np.float32)
    for row, bias in zip(out, biases, strict=True):
        for token, value in bias.items():
            if 0 <= token < vocabulary:
                row[token] = value
    return out


def _choose(scaled: mx.array, uniforms: mx.array) -> mx.array:
    """One token per row of `scaled` logits [B, V], by inverting its distribution at `uniforms` [B, 2] in [0, 1).

    First a block of tokens by its mass, then a token in it: two numbers a row instead of one per token, and sums short
    enough that float32 keeps the tail of a large vocabulary.
    """
    rows, vocabulary = scaled.shape
    weights = mx.exp(scaled - scaled.max(axis=-1, keepdims=True))
    weights = mx.pad(weights, [(0, 0), (0, -vocabulary % _BLOCK)]).reshape(rows, -1, _BLOCK)
    block = _invert(weights.sum(axis=-1), uniforms[:, :1])[:, None]
    inside = mx.take_along_axis(weights, block[:, :, None], axis=1)[:, 0]
    return block[:, 0] * _BLOCK + _invert(inside, uniforms[:, 1:])


def _invert(weights: mx.array, uniform: mx.array) -> mx.array:
    """Where the running sum of `weights` [B, N] first passes `uniform` [B, 1] of the whole; never at a zero weight."""
    reached = mx.cumsum(weights, axis=-1)
    whole = reached[:, -1:]
    target = mx.minimum(uniform * whole, whole * (1 - 2.0**-22))  # below the whole, however it was rounded
    return mx.argmax((reached > target) & (weights > 0), axis=-1)


def _uniforms(seeds: np.ndarray, positions: list[int]) -> np.ndarray:
    """Two numbers float32 [B, 2] in [0, 1) per row: SplitMix64 (Steele et al. 2014) of its seed and position."""
    with np.errstate(over="ignore"):
        z = seeds + np.array(positions, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    halves = z.view(np.uint32).reshape(-1, 2)
    return (halves >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
