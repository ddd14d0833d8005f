"""The ranks joined through MLX: the group's start, the check of its links, and what crosses them inside a step.

The rules come from what the real libraries do: per pair both ends issue the same operations in the same order and
sizes, one communication per eval, sends and receives on streams of their own, and a receive only when a Step says that
one is due. No device kernel ever waits for the network: `arrive` waits on the host.
"""

from __future__ import annotations

import signal
import time
from collections.abc import MutableMapping
from typing import Any

import mlx.core as mx

USED = {  # variables of each backend; the rest of its family would choose another one, or join another launch
    "ring": {"MLX_RANK", "MLX_HOSTFILE", "MLX_RING_VERBOSE"},
    "jaccl": {"MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"},
    "jaccl-ring": {"MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING"},
    "nccl": {"MLX_RANK", "MLX_WORLD_SIZE"},
}
CHOOSING = {"MLX_RANK", "MLX_WORLD_SIZE", "MLX_HOSTFILE", "MLX_RING_VERBOSE", "MLX_IBV_DEVICES", "MLX_IBV_COORDINATOR"}
CONNECT_S = 45
CHECKED_WORDS = 1 << 18  # uint32: 1 MiB, more than a frame, since crossed cables pass small messages


class LinkBroken(Exception):
    """The group is not what the plan says, or a link delivers wrong data; the message names the ranks."""


def clean_environment(backend: str, environment: MutableMapping[str, str]) -> None:
    """Remove every variable that could make MLX join something other than `backend` of this launch."""
    for name in list(environment):
        of_family = name.startswith(("JACCL_", "MLX_JACCL_")) or name in CHOOSING
        if of_family and name not in USED[backend]:
            del environment[name]


def connect(backend: str, rank: int, size: int) -> Any:
    """The group of this launch. Raises LinkBroken when it is another one, RuntimeError when MLX cannot join it.

    Joining holds the interpreter, so no thread can end this process meanwhile; an alarm of the system does, after
    `CONNECT_S` seconds.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(CONNECT_S)
    group = mx.distributed.init(strict=True, backend=backend.removesuffix("-ring"))
    signal.alarm(0)
    if (group.rank(), group.size()) != (rank, size):
        raise LinkBroken(f"this is rank {rank} of {size}, but {backend} made it {group.rank()} of {group.size()}")
    return group


def check_links(group: Any, backend: str) -> None:
    """A small sum over all ranks, then a pattern of 1 MiB each way on every pair that can talk. Raises LinkBroken.

    Over nccl, which has no send and receive in MLX, every rank's pattern goes to all at once.
    """
    rank, size = group.rank(), group.size()
    total = int(mx.distributed.all_sum(mx.array(1 << rank), group=group).item())  # type: ignore[arg-type]
    if total != (1 << size) - 1:
        raise LinkBroken(f"a sum over all ranks gave {total:b} in binary, a one for each rank that took part")
    if backend == "nccl":
        everyone = mx.distributed.all_gather(_pattern(rank, rank), group=group)
        mx.eval(everyone)
        for source, received in enumerate(everyone.split(size)):
            _compare(received, source, source, rank)
        return
    for low in range(size):
        for high in range(low + 1, size):
            if rank in (low, high) and (backend == "jaccl" or high - low in (1, size - 1)):
                for source, target in ((low, high), (high, low)):
                    _check_link(group, source, target)


def _pattern(source: int, target: int) -> mx.array:
    return mx.arange(CHECKED_WORDS, dtype=mx.uint32) * (2 * source + 3) + target


def _check_link(group: Any, source: int, target: int) -> None:
    pattern = _pattern(source, target)
    if group.rank() == source:
        mx.eval(mx.distributed.send(pattern, target, group=group))
        return
    received = mx.distributed.recv(pattern.shape, pattern.dtype, source, group=group)
    mx.eval(received)
    _compare(received, source, target, target)


def _compare(received: mx.array, source: int, target: int, rank: int) -> None:
    """Raise LinkBroken unless `rank` received what `source` sends to `target`."""
    if not mx.array_equal(received, _pattern(source, target)).item():
        raise LinkBroken(
            f"what rank {source} sent did not arrive at rank {rank}: the cables do not lead where the hostfile says"
        )


class Links:
    """What a step needs of the other ranks. This one: nothing, there are none.

    The `first` rank is fed token ids, the `last` one has logits, and the one that `samples` decides. `waited_s` is how
    long this rank has waited for data.
    """

    first = last = samples = True
    lookahead = True  # whether a row's next token may be used before the host has read it

    def __init__(self) -> None:
        self.waited_s = 0.0

    def receive(self, rows: int, tokens: int) -> mx.array:
        """The hidden states [rows, tokens, width] that the stage before this one sends for the step that is due."""
        raise NotImplementedError

    def send(self, hidden: mx.array) -> mx.array:
        """`hidden` on its way to the next stage: to be evaluated after, and apart from, whatever it depends on."""
        raise NotImplementedError

    def share(self, tokens: mx.array | None, logits: mx.array) -> mx.array:
        """The token ids int32 [B] that the sampling rank chose, on every rank."""
        assert tokens is not None
        return tokens

    def arrive(self, received: mx.array) -> None:
        """Wait until `received` is here."""
        begun_s = time.monotonic()
        mx.eval(received)
        self.waited_s += time.monotonic() - begun_s


class StageLinks(Links):
    """Stages of a pipeline, in mlx-lm's order: the highest rank is the first stage, rank 0 the last.

    `boundary` is the width and dtype of what enters this stage.
    """

    lookahead = False

    def __init__(self, group: Any, boundary: tuple[int, mx.Dtype]) -> None:
        super().__init__()
        rank = group.rank()
        self.first = rank == group.size() - 1
        self.last = self.samples = rank == 0
        self._group = group
        self._width, self._dtype = boundary
        self._in, self._out = _stream(), _stream()

    def receive(self, rows: int, tokens: int) -> mx.array:
        shape, source = (rows, tokens, self._width), self._group.rank() + 1
        return mx.distributed.recv(shape, self._dtype, source, group=self._group, stream=self._in)

    def send(self, hidden: mx.array) -> mx.array:
        return mx.distributed.send(hidden, self._group.rank() - 1, group=self._group, stream=self._out)


class ShardLinks(Links):
    """Tensor parallel: every rank computes every step; rank 0's choice reaches the others inside the graph."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.samples = group.rank() == 0
        self._group = group

    def share(self, tokens: mx.array | None, logits: mx.array) -> mx.array:
        # the sum comes after the model's own collectives on every rank: there it depends on the logits, too
        mine = tokens if tokens is not None else mx.depends(mx.zeros(logits.shape[0], mx.int32), logits)
        return mx.distributed.all_sum(mine, group=self._group)


def _stream() -> Any:
    return mx.new_stream(mx.gpu if mx.cuda.is_available() else mx.cpu)
