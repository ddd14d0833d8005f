"""The three ways to place a model: on one Mac, tensor parallel, pipeline; each with its sums, or its reason why not.

Pure: topology, sizes and wishes in, an `Option` per strategy out. `planner.py` chooses among them. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

from cluster.cabling.topology import MESH_HOSTS, Topology, cycle
from cluster.macs.hosts import Host
from cluster.plan import chips, stages
from parallel import wire

BACKENDS = ("jaccl", "jaccl-ring", "ring")
RESERVE_BYTES = 1 << 30  # beside a twentieth of the limit: MLX's buffers and what else the GPU shows
SPEED_CONTEXT = 4096  # tokens in the cache for which decode speeds are estimated
GRAIN = 256  # caches grow in steps of so many tokens
# Seconds. From measured tensor runs of 671B and 235B models on 2 and 4 M3 Ultra; the TCP figures are round trips.
COLLECTIVE_S = {"jaccl": 110e-6, "jaccl-ring": 160e-6, "ring": 1e-3}
HOP_S = {"jaccl": 0.3e-3, "jaccl-ring": 0.3e-3, "ring": 1e-3}
UNEQUAL = "The chips differ: the slowest sets the pace, and their rounding may differ."
AS_GOOD = 1.05  # a smaller set of Macs is taken when its slowest stage is at most so much slower


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the plan is for: `slots` sequences of `context` tokens at once, prompts in chunks of `chunk_tokens`.

    `split` are layers per rank, in rank order (rank 0 has the last layers, as in mlx-lm); `force` goes past memory.
    """

    context: int
    slots: int
    chunk_tokens: int = 2048
    parallel: str = "auto"  # or "single", "tensor", "pipeline"
    backend: str = "auto"  # or one of BACKENDS
    split: tuple[int, ...] = ()
    force: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """One host's memory as a sum: what is needed, and the limit that the GPU may hold."""

    weights: int
    kv: int
    activations: int
    reserve: int
    limit: int

    @property
    def needs(self) -> int:
        return self.weights + self.kv + self.activations + self.reserve

    @property
    def spare(self) -> int:
        """Bytes left over; negative: short by so many."""
        return self.limit - self.needs


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: its host (an index into the topology, and its name), layers [start, stop), sum, and time per token."""

    rank: int
    host: int
    name: str
    start: int
    stop: int
    budget: Budget
    seconds: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one token sends between two ranks; `cables` carry it (0: the TCP network)."""

    sender: int
    receiver: int
    bytes_per_token: int
    cables: int


@dataclass(frozen=True, slots=True)
class Option:
    """One strategy: placed, or with the reason `why_not`. A refused one still shows its sums where it has any.

    `tokens_per_s` estimates the decode speed of one stream with SPEED_CONTEXT tokens in its cache.
    """

    strategy: str
    backend: str = ""
    ranks: tuple[Rank, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    tokens_per_s: float = 0.0
    why_not: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def short(self) -> int:
        """Bytes by which the worst host is short; negative when all have some to spare."""
        return max((-rank.budget.spare for rank in self.ranks), default=0)


class Placement:
    """The ways for one model on one set of hosts. `over` places also what does not fit, to show it or by force."""

    def __init__(self, topology: Topology, info: wire.ModelInfo, wishes: Wishes, *, over: bool = False) -> None:
        self.topology, self.hosts = topology, topology.hosts
        self.info, self.wishes, self.over = info, wishes, over
        width = 4 if info.dtype == "float32" else 2
        self.activations = wishes.chunk_tokens * (8 * info.hidden + 3 * info.widest) * width
        self.logits = 2 * 4 * wishes.slots * info.vocabulary
        self.context = -(-wishes.context // GRAIN) * GRAIN
        self.limits = [chips.limit_bytes(host) for host in self.hosts]
        self.reserves = [limit // 20 + RESERVE_BYTES for limit in self.limits]
        self.speeds = [chips.bandwidth(host) * chips.EFFICIENCY for host in self.hosts]
        self.layers = [self._layer(number, layer) for number, layer in enumerate(info.layers)]

    def _layer(self, number: int, layer: wire.LayerInfo) -> stages.Layer:
        """What a layer costs its stage, with the embedding on the first and the head on the last."""
        info = self.info
        first, last = number == 0, number == len(info.layers) - 1
        table = info.head or info.embedding
        fixed = layer.weights + (info.embedding if first else 0) + ((table + info.outside + self.logits) if last else 0)
        if first and last and info.tied:
            fixed -= info.embedding
        kv = layer.kv_bytes(self.context) * self.wishes.slots
        read = layer.active + layer.kv_bytes(min(self.context, SPEED_CONTEXT)) + ((table + info.outside) if last else 0)
        return stages.Layer(fixed, kv, read)

    def room(self, host: int) -> int:
        """Bytes for weights and KV."""
        return self.limits[host] - self.reserves[host] - self.activations

    def _rank(self, rank: int, host: int, start: int, stop: int, seconds: float, *, fixed: int, kv: int) -> Rank:
        logits = self.logits if stop == len(self.layers) else 0
        budget = Budget(fixed - logits, kv, self.activations + logits, self.reserves[host], self.limits[host])
        return Rank(rank, host, self.hosts[host].name, start, stop, budget, seconds)

    # ------------------------------------------------------------ one Mac

    def single(self) -> Option:
        """All of it on one host: the fastest that holds it."""
        fixed, kv = sum(layer.fixed for layer in self.layers), sum(layer.kv for layer in self.layers)
        fixed -= self.info.embedding if self.info.tied and len(self.layers) > 1 else 0  # one table, not two
        read = sum(layer.read for layer in self.layers)
        able = [host for host in range(len(self.hosts)) if fixed + kv <= self.room(host)]
        roomiest = max(range(len(self.hosts)), key=lambda host: (self.room(host), self.speeds[host], -host))
        host = max(able, key=lambda host: (self.speeds[host], self.room(host), -host), default=roomiest)
        seconds = read / self.speeds[host]
        rank = self._rank(0, host, 0, len(self.layers), seconds, fixed=fixed, kv=kv)
        why_not = "" if able or self.over else f"needs {gb(rank.budget.needs)} on one Mac; {_short(rank)}"
        return Option("single", "", (rank,), (), 1 / seconds, why_not)

    def fits(self) -> bool:
        """Whether any strategy that the wishes allow is possible, without looking for the best."""
        wanted = self.wishes.parallel
        if wanted in ("auto", "single") and not self.single().why_not:
            return True
        if wanted in ("auto", "tensor") and not self.tensor().why_not:
            return True
        if wanted not in ("auto", "pipeline") or self.info.pipeline or len(self.hosts) < 2:
            return False
        if self.wishes.split:
            return not self._by_hand(self.wishes.split).why_not
        return any(
            stages.fits(self.layers, self._places(members), _in_terms_of(members, orders))
            for backend in self._backends()
            for members, orders in self._sets(backend, {})
        )

    def holds_all(self) -> bool:
        """Whether all hosts together, in the order given, hold the model as a pipeline, however they are joined."""
        return stages.fits(self.layers, self._places(range(len(self.hosts))), [range(len(self.hosts))])

    # ------------------------------------------------------------ tensor parallel

    def tensor(self) -> Option:
        """Every layer cut over alike chips that RDMA joins all to all; the number of ranks that decodes fastest."""
        if len(self.hosts) < 2:
            return Option("tensor", why_not="needs two Macs or more")
        reasons: dict[str, None] = {}
        found: list[Option] = []
        for size in range(min(len(self.hosts), MESH_HOSTS), 1, -1):
            if problems := self.info.why_not_tensor(size):
                more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
                reasons[f"on {size} ranks: {problems[0]}{more}"] = None
            else:
                found += self._tensors(size, reasons)
        able = [option for option in found if not option.why_not]
        if able:
            return max(able, key=lambda option: (option.tokens_per_s, -option.short))
        nearest = min(found, key=lambda option: option.short, default=None)
        return nearest or Option("tensor", why_not="; ".join(reasons))

    def _tensors(self, size: int, reasons: dict[str, None]) -> Iterator[Option]:
        """Options on `size` ranks: alike chips in a mesh, or what there is when the user asks for tensor parallel."""
        asked = self.wishes.parallel == "tensor"
        sets = list(combinations(range(len(self.hosts)), size))
        alike = [one for one in sets if all(chips.alike(self.hosts[one[0]], self.hosts[host]) for host in one)]
        if not alike and not asked:
            kinds = ", ".join(dict.fromkeys(host.chip or "an unknown chip" for host in self.hosts))
            reasons[f"on {size} ranks: wants as many equal chips, these are {kinds}"] = None
            return
        backends = self._backends() if asked or self.wishes.backend != "auto" else ("jaccl",)
        for members in alike or sets:
            refusals = []
            for backend in backends:
                reason, orders = self.join(backend, members, "tensor")
                if not reason:
                    yield self._tensor_on(backend, orders[0] if orders else self.by_room(members), equal=bool(alike))
                    break
                refusals.append(reason)
            else:
                reasons["; ".join(refusals)] = None

    def _tensor_on(self, backend: str, members: Sequence[int], *, equal: bool) -> Option:
        info, size = self.info, len(members)
        weights = next(found.weights for found in info.tensor if found.ranks == size)
        kv = sum(layer.kv_bytes(self.context, size) for layer in info.layers) * self.wishes.slots
        cache = sum(layer.kv_bytes(min(self.context, SPEED_CONTEXT), size) for layer in info.layers)
        table = info.head or info.embedding
        active = sum(layer.active for layer in info.layers) + table + info.outside
        read = cache + active * weights / max(1, info.weights)
        waiting = 2 * len(info.layers) * COLLECTIVE_S[backend]
        ranks = tuple(
            self._rank(rank, host, 0, len(info.layers), read / self.speeds[host], fixed=weights + self.logits, kv=kv)
            for rank, host in enumerate(members)
        )
        sent = 2 * len(info.layers) * info.hidden * (4 if info.dtype == "float32" else 2)
        pairs = permutations(range(size), 2) if backend == "jaccl" else ((a, (a + 1) % size) for a in range(size))
        traffic = tuple(Traffic(a, b, sent, self._cables(backend, members[a], members[b])) for a, b in pairs)
        worst = min(ranks, key=lambda rank: rank.budget.spare)
        why_not = ""
        if worst.budget.spare < 0 and not self.over:
            why_not = f"needs {gb(worst.budget.needs)} on every rank; {_short(worst)}"
        warnings = () if equal else (UNEQUAL,)
        speed = 1 / (max(rank.seconds for rank in ranks) + waiting)
        return Option("tensor", backend, ranks, traffic, speed, why_not, warnings)

    # ------------------------------------------------------------ pipeline

    def pipeline(self) -> Option:
        """Runs of layers on two hosts and more, over the best backend on which they fit."""
        if len(self.hosts) < 2:
            return Option("pipeline", why_not="needs two Macs or more")
        if self.info.pipeline:
            return Option("pipeline", why_not=self.info.pipeline)
        if len(self.layers) < 2:
            return Option("pipeline", why_not="the model has a single layer")
        if self.wishes.split:
            return self._by_hand(self.wishes.split)
        reasons: dict[str, None] = {}
        joined: list[tuple[str, tuple[int, ...], Sequence[Sequence[int]]]] = []
        for backend in self._backends():
            found = []
            for members, orders in self._sets(backend, reasons):
                joined.append((backend, members, orders))
                if (option := self._staged(backend, members, orders)) is not None:
                    found.append(option)
            if found:
                best = min(self._slowest(option) for option in found)
                good = [option for option in found if self._slowest(option) <= best * AS_GOOD]
                return min(good, key=lambda option: len(option.ranks))
        if not joined:
            return Option("pipeline", why_not="; ".join(reasons))
        return self._over(*max(joined, key=lambda one: sum(self.room(host) for host in one[1])))

    def _sets(
        self, backend: str, reasons: dict[str, None]
    ) -> Iterator[tuple[tuple[int, ...], Sequence[Sequence[int]]]]:
        """Per number of hosts, the joined set with the most room, and the orders in which it may be a chain."""
        for size in range(min(len(self.hosts), len(self.layers)), 1, -1):
            able = []
            for members in combinations(range(len(self.hosts)), size):
                reason, orders = self.join(backend, members, "pipeline")
                if reason:
                    reasons[reason] = None
                else:
                    able.append((members, orders))
            if able:
                yield max(able, key=lambda one: sum(self.room(host) + self.speeds[host] / 1e3 for host in one[0]))

    def _staged(self, backend: str, members: Sequence[int], orders: Sequence[Sequence[int]]) -> Option | None:
        hosts = self.by_room(members)[::-1]
        cut = stages.split(self.layers, self._places(hosts), _in_terms_of(hosts, orders))
        return None if cut is None else self._of_stages(backend, [(hosts[s.place], s.start, s.stop) for s in cut])

    def by_room(self, members: Sequence[int]) -> list[int]:
        """The members with the most room first, whatever the order in which they were named."""
        return sorted(members, key=lambda host: (-self.room(host), -self.speeds[host], host))

    def _places(self, hosts: Sequence[int]) -> list[stages.Place]:
        return [stages.Place(self.room(host), self.speeds[host]) for host in hosts]

    def _over(self, backend: str, members: Sequence[int], orders: Sequence[Sequence[int]]) -> Option:
        """What does not fit, spread so that the worst host is short by least."""
        order = list(orders[0] if orders else self.by_room(members)[::-1])
        cut = stages.least_over(self.layers, self._places(order))
        return self._of_stages(backend, [(order[stage.place], stage.start, stage.stop) for stage in cut])

    def _by_hand(self, split: tuple[int, ...]) -> Option:
        """The split that the user gave, on the hosts in their order (of a ring: in the ring's)."""
        reasons: dict[str, None] = {}
        members = tuple(range(len(split)))
        for backend in self._backends():
            reason, orders = self.join(backend, members, "pipeline")
            if reason:
                reasons[reason] = None
                continue
            order, stop, cut = orders[0] if orders else members, len(self.layers), []
            for host, count in zip(order, split, strict=True):
                cut.append((host, stop - count, stop))
                stop -= count
            return self._of_stages(backend, cut[::-1])
        return Option("pipeline", why_not="; ".join(reasons))

    def _of_stages(self, backend: str, cut: Sequence[tuple[int, int, int]]) -> Option:
        """`cut` are (host, start, stop), first layers first; rank 0 has the last layers."""
        ranks = []
        for rank, (host, start, stop) in enumerate(reversed(cut)):
            run = self.layers[start:stop]
            fixed, kv = sum(layer.fixed for layer in run), sum(layer.kv for layer in run)
            seconds = sum(layer.read for layer in run) / self.speeds[host]
            ranks.append(self._rank(rank, host, start, stop, seconds, fixed=fixed, kv=kv))
        traffic = tuple(
            Traffic(a.rank, b.rank, self.info.wire, self._cables(backend, a.host, b.host)) for b, a in pairwise(ranks)
        )
        worst = min(ranks, key=lambda rank: rank.budget.spare)
        why_not = ""
        if worst.budget.spare < 0 and not self.over:
            why_not = f"does not fit on {len(ranks)} Macs; {_short(worst)}"
        speed = 1 / (sum(rank.seconds for rank in ranks) + (len(ranks) - 1) * HOP_S[backend])
        return Option("pipeline", backend, tuple(ranks), traffic[::-1], speed, why_not)

    @staticmethod
    def _slowest(option: Option) -> float:
        return max(rank.seconds for rank in option.ranks)

    # ------------------------------------------------------------ how hosts are joined

    def _backends(self) -> tuple[str, ...]:
        return BACKENDS if self.wishes.backend == "auto" else (self.wishes.backend,)

    def join(self, backend: str, members: Sequence[int], strategy: str) -> tuple[str, Sequence[Sequence[int]]]:
        """(why `backend` cannot join these hosts, or ""; the orders that it allows, none for any)."""
        for host in members:
            virtual = self.hosts[host].virtual
            if virtual is not None:
                reason = virtual.why_not_placed(hosts=len(members), strategy=strategy, backend=backend)
                if reason:
                    return f"{self.hosts[host].name} {reason}", ()
        if backend == "ring":
            return "", ()
        if backend == "jaccl":
            return self._why_no_mesh(members), ()
        neighbours = [
            {other for other, b in enumerate(members) if a != b and self.topology.rdma_between(a, b)} for a in members
        ]
        found = cycle(neighbours)
        if found is None:
            return "jaccl-ring needs a closed ring of cables with RDMA", ()
        hosts = [members[number] for number in found]
        turns = [hosts[i:] + hosts[:i] for i in range(len(hosts))]
        return "", [*turns, *(turn[::-1] for turn in turns)]

    def _why_no_mesh(self, members: Sequence[int]) -> str:
        if len(members) > MESH_HOSTS:
            return f"a jaccl mesh takes at most {MESH_HOSTS} Macs"
        for a, b in combinations(members, 2):
            if not self.topology.rdma_between(a, b):
                cables = self.topology.between(a, b)
                why = cables[0].why_not if cables else "no cable"
                return f"no RDMA between {self.hosts[a].name} and {self.hosts[b].name} ({why})"
        return ""

    def _cables(self, backend: str, a: int, b: int) -> int:
        return 0 if backend == "ring" else len(self.topology.rdma_between(a, b))


def _in_terms_of(hosts: Sequence[int], orders: Sequence[Sequence[int]]) -> list[list[int]]:
    """Orders of hosts as orders of their places in `hosts`."""
    where = {host: place for place, host in enumerate(hosts)}
    return [[where[host] for host in order] for order in orders]


def gb(size: float) -> str:
    """Bytes in GB, as models are sold: 10^9."""
    return f"{size / 1e9:.1f} GB"


def _short(rank: Rank) -> str:
    return f"{rank.name} may hold {gb(rank.budget.limit)}, short by {gb(-rank.budget.spare)}"


def unknown_chips(hosts: Sequence[Host]) -> list[str]:
    """The names of hosts whose memory bandwidth is not known."""
    return [host.name for host in hosts if not chips.knows(host)]
