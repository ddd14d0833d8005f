"""A batched KV cache whose rows join and leave in place.

mlx-lm's `BatchKVCache` copies the whole batch when a row joins or leaves: with 32 rows of 8K tokens of an 8B model that
is 34 GB for one newcomer. Here the batch has spare rows; a newcomer is written into one, and the last row moves into
the place of one that left. To a model it is a `BatchKVCache`: right-aligned rows, padding on the left.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

GRAIN = 256  # columns that the batch grows by, as mlx-lm's caches do


class SlotKVCache(BatchKVCache):
    """KV of `count` rows in arrays [capacity, heads, columns, dim]; every row ends at column `_idx`.

    `next_offset`, where it is set, is what `offset` becomes with the next token: one array for all layers of a step.
    """

    def __init__(self) -> None:
        super().__init__([])
        self.keys: Any = None
        self.values: Any = None
        self._idx: int = 0
        self._padded = False
        self.next_offset: mx.array | None = None
        self.offset: mx.array = mx.array([], mx.int32)
        self.count = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values` [count, heads, n, dim] to every row; returns all columns so far."""
        start, n = self._idx, keys.shape[2]
        if self.keys is None:
            self._allocate(self.count, start + n, keys, values)
        elif start + n > self.keys.shape[2]:
            self.keys, self.values = (_wider(a, start, n) for a in (self.keys, self.values))
        self._idx += n
        self.offset = self.offset + n if self.next_offset is None else self.next_offset
        self.next_offset = None
        self.keys[: self.count, :, start : self._idx] = keys
        self.values[: self.count, :, start : self._idx] = values
        return self.keys_and_values()

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array | None:
        """As `BatchKVCache`, but none where one token attends to everything and no row is padded."""
        if N == 1 and not self._padded and not kwargs.get("window_size"):
            return None
        mask: mx.array = super().make_mask(N, return_array, **kwargs)
        return mask

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All columns of all rows."""
        return self.keys[: self.count, :, : self._idx], self.values[: self.count, :, : self._idx]

    def insert(self, blocks: list[tuple[mx.array, mx.array] | None], lengths: list[int], capacity: int) -> None:
        """Append rows; `lengths` are those of all rows then. Room for `capacity` rows is made where it is missing.

        A block is keys and values [n, heads, columns, dim] of n rows that end in its last column, or None for a row, or
        all that join, without a token yet.
        """
        joining = lengths[self.count :]
        shift = max(0, *joining) - self._idx if joining else 0
        first = next((block for block in blocks if block is not None), None)
        if self.keys is None:
            self._idx = max(0, self._idx + shift)
            if first is not None:
                self._allocate(capacity, self._idx, *first)
        elif shift > 0 or len(lengths) > self.keys.shape[0]:
            self._move(max(capacity, len(lengths)), max(0, shift))
        row = self.count
        for block in blocks:
            if block is None:
                row += 1
                continue
            keys, values = block
            columns = slice(self.start(keys.shape[2]), self._idx)
            self.keys[row : row + keys.shape[0], :, columns] = keys
            self.values[row : row + keys.shape[0], :, columns] = values
            row += keys.shape[0]
        self._known(lengths)

    def remove(self, gaps: list[tuple[int, int]], lengths: list[int]) -> None:
        """For each (to, from) of `gaps`, in order, row `from` moves to `to`; `lengths` are those of the rows left."""
        if self.keys is not None:
            for to, last in gaps:
                self.keys[to : to + 1, :, : self._idx] = self.keys[last : last + 1, :, : self._idx]
                self.values[to : to + 1, :, : self._idx] = self.values[last : last + 1, :, : self._idx]
            self.count = len(lengths)
            if self._idx - max(lengths) >= GRAIN:  # the longest rows left: what they alone needed goes
                self._move(self.keys.shape[0], max(lengths) - self._idx)
        self._known(lengths)

    def aligned(self, longest: int) -> tuple[mx.array, mx.array] | None:
        """Keys and values of all rows, the last `longest` columns of them: a block for `insert`."""
        if self.keys is None:
            return None
        columns = slice(self.start(longest), self._idx)
        return self.keys[: self.count, :, columns], self.values[: self.count, :, columns]

    def start(self, length: int) -> int:
        """The first column of a row of `length` tokens."""
        return self._idx - length

    def _known(self, lengths: list[int]) -> None:
        self.count = len(lengths)
        self._padded = any(length != self._idx for length in lengths)
        self.offset = mx.array(lengths)
        self.left_padding = mx.array([self._idx - length for length in lengths])

    def _allocate(self, capacity: int, columns: int, keys: mx.array, values: mx.array) -> None:
        columns = -(-max(columns, 1) // GRAIN) * GRAIN
        self.keys = mx.zeros((capacity, keys.shape[1], columns, keys.shape[3]), keys.dtype)
        self.values = mx.zeros((capacity, values.shape[1], columns, values.shape[3]), values.dtype)

    def _move(self, capacity: int, shift: int) -> None:
        """Copy into new arrays of `capacity` rows, all columns `shift` further right (negative: cut on the left)."""
        old_keys, old_values, start = self.keys, self.values, self._idx
        self._idx += shift
        self._allocate(capacity, self._idx, old_keys, old_values)
        source, target = slice(max(0, -shift), start), slice(max(0, shift), self._idx)
        self.keys[: self.count, :, target] = old_keys[: self.count, :, source]
        self.values[: self.count, :, target] = old_values[: self.count, :, source]


def _wider(array: mx.array, used: int, n: int) -> mx.array:
    """`array` with room for `n` more columns after the `used` ones."""
    columns = -(-(used + n) // GRAIN) * GRAIN - array.shape[2]
    shape = (array.shape[0], array.shape[1], columns, array.shape[3])
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=2)
