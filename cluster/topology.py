"""Which Macs are joined by which cables, and what that allows. Pure functions over facts; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence, Set


def cycle(neighbours: Sequence[Set[int]]) -> tuple[int, ...] | None:
    """One order in which every node follows a neighbour and the last meets the first again, or None.

    `neighbours[i]` are the nodes that i is joined to. Starts at 0. Two nodes make a ring over one link, a single node
    makes none. Depth first, to the neighbour with the fewest ways on; a (where, unvisited) that failed once is not
    tried again, and a branch ends where an unvisited node lost its second way in or cannot be reached. So a full mesh
    takes no backtracking at all, and graphs without an answer stay cheap at the degrees that Macs have (6 ports).
    """
    n = len(neighbours)
    if n < 2:
        return None
    failed: set[tuple[int, frozenset[int]]] = set()

    def reachable(here: int, left: frozenset[int]) -> bool:
        seen, frontier = set(), [here]
        while frontier:
            for node in neighbours[frontier.pop()] & left:
                if node not in seen:
                    seen.add(node)
                    frontier.append(node)
        return len(seen) == len(left)

    def extend(here: int, left: frozenset[int]) -> tuple[int, ...] | None:
        if not left:
            return (here,) if 0 in neighbours[here] else None
        if (here, left) in failed:
            return None
        alive = left | {here, 0}
        if all(len(neighbours[node] & alive) >= min(2, n - 1) for node in left) and reachable(here, left):
            for node in sorted(neighbours[here] & left, key=lambda node: (len(neighbours[node] & left), node)):
                if (rest := extend(node, left - {node})) is not None:
                    return (here, *rest)
        failed.add((here, left))
        return None

    return extend(0, frozenset(range(1, n)))
