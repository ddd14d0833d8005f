"""The KV of sequences and buckets on mlx-lm's caches; nothing else touches those.

A sequence in prefill owns a `Solo`, mlx-lm's caches for one sequence. A bucket of one row simply keeps that; from two
rows on it holds mlx-lm's left-padded batch caches. Lengths and paddings are known on the host throughout: reading them
back from the device would wait for everything queued there.

Whatever is shared (a prefix entry and the sequences that started from it) is shared as slices: MLX arrays are values,
and an in-place update copies a buffer that somebody else still refers to.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from parallel.engine.sequence import CacheShape

Solo = list[Any]  # one mlx-lm cache per layer


def new_solo(model: Any) -> Solo:
    """Empty caches for one sequence."""
    solo: Solo = make_prompt_cache(model)
    return solo


def fork(solo: Solo, length: int) -> Solo:
    """Caches that hold the first `length` tokens of `solo` and may be changed without changing it.

    For caches that cannot be cut, `length` must be all that `solo` holds.
    """
    return [_fork(cache, length) for cache in solo]


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
    """Bytes per token and layer, read off caches that hold at least one evaluated token."""
    fixed, layers = 0, []
    for leaf in _leaves(solo):
        keys = getattr(leaf, "keys", None)
        if keys is None or isinstance(leaf, ArraysCache):
            fixed += leaf.nbytes
        else:
            per_token = (keys.nbytes + leaf.values.nbytes) // keys.shape[2]
            layers.append((per_token, leaf.max_size if isinstance(leaf, RotatingKVCache) else 0))
    return CacheShape(fixed, tuple(layers))


def _leaves(solo: Solo) -> Iterator[Any]:
    for cache in solo:
        if isinstance(cache, CacheList):
            yield from _leaves(list(cache.caches))
        else:
            yield cache


class Bucket:
    """Rows that decode together, in order: their sequence ids, their lengths on the host, their caches."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.lengths: list[int] = []
        self.caches: Solo = []
        self._batched = False

    def join(self, rows: list[int], solos: list[Solo], lengths: list[int]) -> None:
        """Append `rows`; `solos` become the bucket's. One copy of the bucket, unless it holds this one row only."""
        if not self.rows and len(rows) == 1:
            self.caches, self._batched = solos[0], False
        else:
            joining = self._merge(solos)
            if self.rows:
                self._batch()
                for cache, other in zip(self.caches, joining, strict=True):
                    cache.extend(other)
            else:
                self.caches = joining
            self._batched = True
        self.rows += rows
        self.lengths += lengths

    def absorb(self, other: Bucket) -> None:
        """Append all rows of `other`, which ends."""
        self._batch()
        other._batch()
        for cache, more in zip(self.caches, other.caches, strict=True):
            cache.extend(more)
        self.rows += other.rows
        self.lengths += other.lengths

    def drop(self, rows: set[int]) -> None:
        """Drop `rows`, those that are here, and the padding that only they needed, with one copy of the bucket."""
        stay = [i for i, row in enumerate(self.rows) if row not in rows]
        if len(stay) == len(self.rows):
            return
        longest = max(self.lengths)
        self.rows = [self.rows[i] for i in stay]
        self.lengths = [self.lengths[i] for i in stay]
        if self._batched and stay:
            index = mx.array(stay)
            padding = longest - max(self.lengths)
            for cache in self.caches:
                _filter(cache, index, padding)
        elif not stay:
            self.caches = []

    def extract(self, row: int, length: int) -> Solo:
        """A copy of the first `length` tokens of `row`; every cache must be a KVCache or a list of them."""
        i = self.rows.index(row)
        if not self._batched:
            return fork(self.caches, length)
        start = max(self.lengths) - self.lengths[i]
        return [_extract(cache, i, start, length) for cache in self.caches]

    def advance(self) -> None:
        """Every row has one token more."""
        self.lengths = [length + 1 for length in self.lengths]

    def _batch(self) -> None:
        if not self._batched:
            self.caches, self._batched = self._merge([self.caches]), True

    @staticmethod
    def _merge(solos: list[Solo]) -> Solo:
        return [layer[0].merge(list(layer)) for layer in zip(*solos, strict=True)]


def _filter(cache: Any, index: mx.array, padding: int) -> None:
    """Keep the rows in `index`, cut `padding` columns from the left: mlx-lm's filter without reading back."""
    if isinstance(cache, CacheList):
        for child in cache.caches:
            _filter(child, index, padding)
    elif isinstance(cache, BatchKVCache):
        if cache.keys is not None:
            cache.keys = cache.keys[index, :, padding:]
            cache.values = cache.values[index, :, padding:]
        cache.offset = cache.offset[index]
        cache.left_padding = cache.left_padding[index] - padding
        cache._idx -= padding
    else:
        cache.filter(index)


def _extract(cache: Any, row: int, start: int, length: int) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_extract(child, row, start, length) for child in cache.caches))
    alone = KVCache()
    alone.keys = mx.contiguous(cache.keys[row : row + 1, :, start : start + length])
    alone.values = mx.contiguous(cache.values[row : row + 1, :, start : start + length])
    alone.offset = length
    return alone
