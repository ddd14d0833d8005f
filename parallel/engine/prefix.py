"""Which token sequences have their KV kept, and which to drop when full. No tensors, no clock.

An entry is found through a hash chained over blocks of its tokens, so a look-up reads the prompt once, however many
entries there are (the block hashing idea is vLLM's automatic prefix caching); the tokens themselves are then compared,
so a hash collision costs time and never a wrong answer.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

BLOCK = 16
_CANDIDATES = 8  # entries compared token by token per look-up; more of them share the same blocks only rarely


@dataclass(frozen=True, slots=True)
class Entry:
    """A kept sequence: its tokens and the bytes of its KV."""

    id: int
    tokens: array[int]
    bytes: int
    chain: tuple[int, ...]


class PrefixIndex:
    """Entries by content, least recently used first.

    With `whole`, entries serve only prompts that start with all of their tokens (caches that cannot be cut back).
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._by_block: dict[int, dict[int, None]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: int) -> bool:
        return entry in self._entries

    def length(self, entry: int) -> int:
        """How many tokens `entry` holds; 0 when there is no such entry."""
        return len(self._entries[entry].tokens) if entry in self._entries else 0

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """The entry that shares the most leading tokens with `tokens`, and how many: (-1, 0) when none shares a block.

        At most len(tokens) - 1, since a step must have something to feed. Linear in len(tokens).
        """
        wanted = array("q", tokens)
        for block in reversed(_chain(wanted)):
            best, best_length = -1, 0
            for id in list(self._by_block.get(block, ()))[-_CANDIDATES:]:
                entry = self._entries[id]
                length = min(_common(entry.tokens, wanted), len(tokens) - 1)
                if length > best_length and (not self._whole or length == len(entry.tokens)):
                    best, best_length = id, length
            if best >= 0:
                self._entries.move_to_end(best)
                return best, best_length
        return -1, 0

    def add(self, id: int, tokens: list[int], size_bytes: int) -> None:
        """Remember entry `id` for `tokens`."""
        kept = array("q", tokens)
        entry = Entry(id, kept, size_bytes, _chain(kept))
        self._entries[id] = entry
        for block in self._blocks(entry):
            self._by_block.setdefault(block, {})[id] = None
        self.bytes += size_bytes

    def remove(self, id: int) -> None:
        """Forget entry `id`; nothing happens when it is already gone."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return
        for block in self._blocks(entry):
            ids = self._by_block[block]
            del ids[id]
            if not ids:
                del self._by_block[block]
        self.bytes -= entry.bytes

    def evict(self, limit_bytes: int) -> list[int]:
        """Forget the least recently used entries until at most `limit_bytes` remain; returns their ids."""
        gone = []
        while self._entries and self.bytes > limit_bytes:
            id = next(iter(self._entries))
            self.remove(id)
            gone.append(id)
        return gone

    def _blocks(self, entry: Entry) -> tuple[int, ...]:
        """The blocks under which `entry` is found: all of them, or its last when it is used whole or not at all."""
        return entry.chain[-1:] if self._whole else entry.chain


def _chain(tokens: array[int]) -> tuple[int, ...]:
    """A hash per whole block, each covering everything before it."""
    data = tokens.tobytes()
    width = BLOCK * tokens.itemsize
    chain, last = [], 0
    for start in range(0, len(data) - width + 1, width):
        last = hash((last, data[start : start + width]))
        chain.append(last)
    return tuple(chain)


def _common(a: array[int], b: array[int]) -> int:
    """How many leading tokens are equal, by halving over slice comparisons (linear, and in C)."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
