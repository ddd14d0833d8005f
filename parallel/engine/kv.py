"""The KV of sequences and buckets on mlx-lm's caches; nothing else touches those.

A sequence in prefill owns a `Solo`, mlx-lm's caches for one sequence, or a `Part` of what several filled together. A
bucket of one row simply keeps a solo; from two rows on it holds left-padded batch caches: `SlotKVCache` for plain KV,
mlx-lm's own for the other kinds. Lengths and paddings are known on the host throughout: reading them back from the
device would wait for everything queued there.

Whatever is shared (a prefix entry and the sequences that started from it) is shared as slices: MLX arrays are values,
and an in-place update copies a buffer that somebody else still refers to.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from parallel.engine.sequence import CacheShape, rows_capacity
from parallel.engine.slots import SlotKVCache

Solo = list[Any]  # one mlx-lm cache per layer


@dataclass(frozen=True, slots=True)
class Part:
    """Row `row` of `batch`, plain KV [B, ...] that several sequences filled together; it begins in the first column.

    The batch is only read, and stays alive as long as any of its parts.
    """

    batch: Solo
    row: int


def new_solo(model: Any) -> Solo:
    """Empty caches for one sequence."""
    solo: Solo = make_prompt_cache(model)
    return solo


def fork(source: Solo | Part, length: int) -> Solo:
    """Caches that hold the first `length` tokens of `source` and may be changed without changing it.

    For caches that cannot be cut, `length` must be all that `source` holds. A `Part` is copied.
    """
    if isinstance(source, Part):
        return [_copy(cache, source.row, length) for cache in source.batch]
    return [_fork(cache, length) for cache in source]


def cut(solo: Solo, length: int) -> None:
    """Forget all but the first `length` tokens of plain KV."""
    for leaf in _leaves(solo):
        leaf.offset = length


def stack(model: Any, solos: list[Solo], length: int) -> Solo:
    """Caches of one batch [B, ...] that hold the first `length` tokens of each of `solos`; plain KV only."""
    batch = new_solo(model)
    if not length:
        return batch
    for leaf, rows in zip(_leaves(batch), zip(*map(_leaves, solos), strict=True), strict=True):
        leaf.keys = mx.concatenate([row.keys[..., :length, :] for row in rows])
        leaf.values = mx.concatenate([row.values[..., :length, :] for row in rows])
        leaf.offset = length
    return batch


def _fork(cache: Any, length: int) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_fork(child, length) for child in cache.caches))
    twin = copy.copy(cache)
    if isinstance(cache, KVCache):
        if cache.keys is not None:
            twin.keys, twin.values = cache.keys[..., :length, :], cache.values[..., :length, :]
        twin.offset = length
    elif isinstance(cache, ArraysCache):
        twin.cache = list(cache.cache)
    elif getattr(cache, "keys", None) is not None:
        twin.keys, twin.values = cache.keys[...], cache.values[...]
    return twin


def _copy(cache: Any, row: int, length: int, of: int | None = None) -> Any:
    """The first `length` tokens of one row of plain KV [B, ...], as a copy: then the others need not stay.

    `of`: how many tokens the row holds, where it ends in the last column rather than begins in the first.
    """
    if isinstance(cache, CacheList):
        return CacheList(*(_copy(child, row, length, of) for child in cache.caches))
    start = 0 if of is None else cache.start(of)
    alone, columns = KVCache(), slice(start, start + length)
    alone.keys, alone.values = (mx.contiguous(a[row : row + 1, :, columns]) for a in (cache.keys, cache.values))
    alone.offset = length
    return alone


def arrays(caches: Solo) -> list[mx.array]:
    """Every array in `caches`, to be evaluated."""
    return [a for cache in caches for _, a in tree_flatten(cache.state) if isinstance(a, mx.array)]


def reuse_of(model: Any) -> str:
    """How KV can be reused: "any" prefix, only at the "boundary" where it was saved, or "off" (an unknown cache)."""
    kinds = {type(leaf) for leaf in _leaves(new_solo(model))}
    if kinds == {KVCache}:
        return "any"
    return "boundary" if kinds <= {KVCache, RotatingKVCache, ArraysCache} else "off"


def batchable(model: Any) -> bool:
    """Whether sequences of unequal length can decode together: every cache can be merged."""
    return all(hasattr(leaf, "merge") for leaf in _leaves(new_solo(model)))


def shape_of(solo: Solo) -> CacheShape:
    """Bytes per token, layers of one window together, read off caches that hold at least one evaluated token."""
    fixed, layers = 0, Counter[int]()
    for leaf in _leaves(solo):
        keys = getattr(leaf, "keys", None)
        if keys is None or isinstance(leaf, ArraysCache):
            fixed += leaf.nbytes
        else:
            per_token = (keys.nbytes + leaf.values.nbytes) // keys.shape[2]
            layers[leaf.max_size if isinstance(leaf, RotatingKVCache) else 0] += per_token
    return CacheShape(fixed, tuple((per_token, window) for window, per_token in layers.items()))


def _leaves(solo: Solo) -> Iterator[Any]:
    for cache in solo:
        if isinstance(cache, CacheList):
            yield from _leaves(list(cache.caches))
        else:
            yield cache


class Bucket:
    """Rows that decode together, in this order: their sequence ids, their lengths on the host, their caches."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.lengths: list[int] = []
        self.caches: Solo = []
        self._batched = False

    def join(self, rows: list[int], sources: list[Solo | Part], lengths: list[int]) -> None:
        """Append `rows`; `sources` become the bucket's, but a `Part` is copied."""
        if not self.rows and len(rows) == 1:
            alone = sources[0]
            self.caches = fork(alone, lengths[0]) if isinstance(alone, Part) else alone
            self._batched = False
        else:
            self._batch()
            self._append(sources, self.lengths + lengths)
        self.rows += rows
        self.lengths += lengths

    def absorb(self, other: Bucket) -> None:
        """Append all rows of `other`, which ends."""
        self._batch()
        lengths = self.lengths + other.lengths
        if other._batched:
            for mine, theirs in zip(self.caches, other.caches, strict=True):
                _extend(mine, theirs, lengths, rows_capacity(len(lengths)))
        else:
            self._append([other.caches], lengths)
        self.rows += other.rows
        self.lengths = lengths

    def drop(self, rows: set[int]) -> None:
        """Drop `rows`, those that are here; the last rows move into their places."""
        gaps, order = [], list(range(len(self.rows)))
        for row in rows & set(self.rows):
            place = next(i for i, old in enumerate(order) if self.rows[old] == row)
            last = len(order) - 1
            if place != last:
                gaps.append((place, last))
                order[place] = order[last]
            order.pop()
        self.rows = [self.rows[i] for i in order]
        self.lengths = [self.lengths[i] for i in order]
        if not order:
            self.caches, self._batched = [], False
        elif self._batched and rows:
            for cache in self.caches:
                _drop(cache, gaps, order, self.lengths)

    def extract(self, row: int, length: int) -> Solo:
        """A copy of the first `length` tokens of `row`; every cache must be a KVCache or a list of them."""
        if not self._batched:
            return fork(self.caches, length)
        i = self.rows.index(row)
        return [_copy(cache, i, length, self.lengths[i]) for cache in self.caches]

    def advance(self) -> None:
        """Every row is about to get one token more."""
        self.lengths = [length + 1 for length in self.lengths]
        if self._batched:
            offset = mx.array(self.lengths)
            for leaf in _leaves(self.caches):
                if isinstance(leaf, SlotKVCache):
                    leaf.next_offset = offset

    def _batch(self) -> None:
        if not self._batched:
            alone, self.caches = self.caches, []
            if alone:
                self._append([alone], self.lengths)
            self._batched = True

    def _append(self, sources: Sequence[Solo | Part], lengths: list[int]) -> None:
        blocks = _blocks(sources, lengths[len(lengths) - len(sources) :])
        layers = [list(layer) for layer in zip(*(block.batch for block in blocks), strict=True)]
        capacity = rows_capacity(len(lengths))
        if not self.caches:
            self.caches = [_merge(layer, blocks, lengths, capacity) for layer in layers]
        else:
            for cache, layer in zip(self.caches, layers, strict=True):
                _insert(cache, layer, blocks, lengths, capacity)


@dataclass(frozen=True)
class _Block:
    """Sequences that join a bucket in one go: the rows of `batch` that hold them, from the first column on."""

    batch: Solo
    rows: list[int]
    lengths: list[int]

    @cached_property
    def _columns(self) -> mx.array:
        """Where each column comes from [rows, 1, longest, 1], so that all rows end in the last; padding is any."""
        starts = mx.array(self.lengths)[:, None] - max(self.lengths)
        return mx.maximum(starts + mx.arange(max(self.lengths)), 0)[:, None, :, None]

    def aligned(self, cache: KVCache) -> tuple[mx.array, mx.array] | None:
        """Keys and values [rows, heads, longest, dim] of `cache`, right-aligned; None before the first token."""
        return None if cache.keys is None else (self._aligned(cache.keys), self._aligned(cache.values))

    def _aligned(self, array: mx.array) -> mx.array:
        count, longest = len(self.rows), max(self.lengths)
        picked = array[:count] if self.rows == list(range(count)) else array[mx.array(self.rows)]
        if len(set(self.lengths)) == 1:
            return picked[:, :, :longest]
        return mx.take_along_axis(picked, self._columns, axis=2)


def _blocks(sources: Sequence[Solo | Part], lengths: list[int]) -> list[_Block]:
    """`sources` in their order; parts of the same batch that follow each other go together."""
    blocks = []
    places = [(s.batch, s.row) if isinstance(s, Part) else (s, 0) for s in sources]
    for _, group in groupby(zip(places, lengths, strict=True), key=lambda one: id(one[0][0])):
        members = list(group)
        blocks.append(_Block(members[0][0][0], [row for (_, row), _ in members], [length for _, length in members]))
    return blocks


def _merge(layer: list[Any], blocks: list[_Block], lengths: list[int], capacity: int) -> Any:
    """One batched cache from the blocks' caches of one layer."""
    if isinstance(layer[0], CacheList):
        children = zip(*(cache.caches for cache in layer), strict=True)
        return CacheList(*(_merge(list(child), blocks, lengths, capacity) for child in children))
    if isinstance(layer[0], KVCache):
        batch = SlotKVCache()
        _insert(batch, layer, blocks, lengths, capacity)
        return batch
    return layer[0].merge(layer)


def _insert(cache: Any, layer: list[Any], blocks: list[_Block], lengths: list[int], capacity: int) -> None:
    if isinstance(cache, CacheList):
        for child, rows in zip(cache.caches, zip(*(c.caches for c in layer), strict=True), strict=True):
            _insert(child, list(rows), blocks, lengths, capacity)
    elif isinstance(cache, SlotKVCache):
        cache.insert([b.aligned(leaf) for b, leaf in zip(blocks, layer, strict=True)], lengths, capacity)
    else:
        cache.extend(layer[0].merge(layer))


def _extend(cache: Any, other: Any, lengths: list[int], capacity: int) -> None:
    """Append the rows of the batched cache `other`."""
    if isinstance(cache, CacheList):
        for child, more in zip(cache.caches, other.caches, strict=True):
            _extend(child, more, lengths, capacity)
    elif isinstance(cache, SlotKVCache):
        cache.insert([other.aligned(max(lengths[cache.count :]))], lengths, capacity)
    else:
        cache.extend(other)


def _drop(cache: Any, gaps: list[tuple[int, int]], order: list[int], lengths: list[int]) -> None:
    if isinstance(cache, CacheList):
        for child in cache.caches:
            _drop(child, gaps, order, lengths)
    elif isinstance(cache, SlotKVCache):
        cache.remove(gaps, lengths)
    else:
        cache.filter(mx.array(order))
