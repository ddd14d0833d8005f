"""Topology, a model's sizes and wishes -> a `Plan`: where each layer would live and why; or NoPlan and what is missing.

Pure: no I/O, no clock. The order of choice is one Mac, tensor parallel, pipeline; flags override it.
Called by `cluster plan` and by the supervisor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.cabling.topology import Topology
from cluster.errors import BadSetting, NoPlan
from cluster.macs.hosts import Host
from cluster.plan import chips
from cluster.plan.placement import BACKENDS, Option, Placement, Rank, Wishes, gb, unknown_chips
from parallel import wire

STRATEGIES = ("single", "tensor", "pipeline")
DEFAULT_CONTEXT = 32768  # where neither the user nor the model says less
DEFAULT_SLOTS = 4
WORTH_SAYING = 1.2  # an estimate so much faster than the chosen one is told as a warning
BITS = (8, 6, 5, 4, 3)  # bits per weight that MLX versions of a model come in
PACKED_OVERHEAD = 0.5  # bits per weight of scales and biases
MORE_MACS = 16
MEMORY_GB = (64, 96, 128, 192, 256, 512)  # that Macs come with
NAMES = {"single": "One Mac", "tensor": "Tensor parallel", "pipeline": "Pipeline"}


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen option and the others, each with its reason; hosts left out, with theirs."""

    chosen: Option
    others: tuple[Option, ...]
    left_out: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    wishes: Wishes
    info: wire.ModelInfo

    @property
    def hosts(self) -> tuple[int, ...]:
        """The hosts by rank, as indices into the topology."""
        return tuple(rank.host for rank in self.chosen.ranks)


def wishes_for(info: wire.ModelInfo, *, context: int = 0, slots: int = 0, **more: object) -> Wishes:
    """Wishes with the defaults for this model: its own context, but not above DEFAULT_CONTEXT."""
    usual = min(info.context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    return Wishes(context=context or usual, slots=slots or DEFAULT_SLOTS, **more)  # type: ignore[arg-type]


def plan(topology: Topology, info: wire.ModelInfo, wishes: Wishes) -> Plan:
    """The plan. Raises NoPlan when nothing fits, BadSetting when the wishes contradict the model or each other."""
    if not topology.hosts:
        raise NoPlan("There is no Mac to plan for.", hint="Name them with --hosts a,b,c.")
    wishes = _checked(topology, info, wishes)
    options = _options(Placement(topology, info, wishes))
    wanted = [option for option in options if wishes.parallel in ("auto", option.strategy)]
    chosen = next((option for option in wanted if not option.why_not), None)
    if chosen is None and wishes.force:
        forced = _options(Placement(topology, info, wishes, over=True))
        able = [one for one in forced if wishes.parallel in ("auto", one.strategy) and not one.why_not and one.ranks]
        chosen = min(able, key=lambda option: option.short, default=None)
    if chosen is None:
        raise _no_plan(topology, info, wishes, wanted)
    others = tuple(_told(option, chosen, wishes) for option in options if option.strategy != chosen.strategy)
    return Plan(
        chosen,
        others,
        tuple(_left_out(topology, chosen)),
        tuple(_warnings(topology, info, chosen, options)),
        wishes,
        info,
    )


def as_values(found: Plan) -> dict[str, Any]:
    """The plan as plain values for `--json`: derived sums included, layers of the model left out."""
    values = dataclasses.asdict(dataclasses.replace(found, info=None))  # type: ignore[arg-type]
    info = msgspec.to_builtins(found.info)
    values |= {"chosen": option_values(found.chosen), "others": [option_values(option) for option in found.others]}
    layers = len(info.pop("layers"))
    values["info"] = info | {"layers": layers, "weights": found.info.weights}
    return values


def option_values(option: Option) -> dict[str, Any]:
    """One option as plain values, each rank's sum included."""
    values = dataclasses.asdict(option)
    for rank, written in zip(option.ranks, values["ranks"], strict=True):
        written["budget"] |= {"needs": rank.budget.needs, "spare": rank.budget.spare}
    return values


def _options(placement: Placement) -> list[Option]:
    return [placement.single(), placement.tensor(), placement.pipeline()]


def _checked(topology: Topology, info: wire.ModelInfo, wishes: Wishes) -> Wishes:
    """The wishes, made consistent: a split means pipeline."""
    if wishes.parallel not in ("auto", *STRATEGIES):
        raise BadSetting(f"--parallel must be auto, {', '.join(STRATEGIES)}, not {wishes.parallel}.")
    if wishes.backend not in ("auto", *BACKENDS):
        raise BadSetting(f"--backend must be auto, {', '.join(BACKENDS)}, not {wishes.backend}.")
    if info.context and wishes.context > info.context:
        raise BadSetting(f"--context {wishes.context} is more than the {info.context} tokens the model was made for.")
    if not wishes.split:
        return wishes
    if wishes.parallel not in ("auto", "pipeline"):
        raise BadSetting(f"--split is for a pipeline, not for --parallel {wishes.parallel}.")
    if len(wishes.split) < 2 or min(wishes.split) < 1 or sum(wishes.split) != len(info.layers):
        raise BadSetting(
            f"--split {','.join(map(str, wishes.split))} must give each of two ranks or more at least one of the "
            f"{len(info.layers)} layers, and all of them together; it has {sum(wishes.split)}."
        )
    if len(wishes.split) > len(topology.hosts):
        raise BadSetting(f"--split is for {len(wishes.split)} ranks, but there are {len(topology.hosts)} Macs.")
    return dataclasses.replace(wishes, parallel="pipeline")


# ---------------------------------------------------------------- reasons and warnings


def _told(option: Option, chosen: Option, wishes: Wishes) -> Option:
    """An option that was not chosen, always with the reason."""
    if option.why_not:
        return option
    if wishes.parallel != "auto":
        return dataclasses.replace(option, why_not="possible, but not what was asked for")
    ratio = option.tokens_per_s / chosen.tokens_per_s
    pace = f"about {option.tokens_per_s:.3g} tokens/s against {chosen.tokens_per_s:.3g}"
    if chosen.strategy == "single" and ratio < 1:
        why = f"the model fits on one Mac and is faster there for one stream ({pace})"
    elif chosen.strategy == "single":
        why = f"the model fits on one Mac, which depends on no cable and no peer ({pace})"
    elif ratio < 1:
        why = f"slower for one stream ({pace})"
    else:
        why = f"{chosen.strategy} comes first where it is possible ({pace})"
    return dataclasses.replace(option, why_not=why)


def _left_out(topology: Topology, chosen: Option) -> Iterator[tuple[str, str]]:
    used = {rank.host for rank in chosen.ranks}
    for index, host in enumerate(topology.hosts):
        if index in used:
            continue
        if chosen.strategy == "single":
            why = "the model fits without it"
        elif chosen.backend.startswith("jaccl") and (never := topology.never_rdma.get(index)):
            why = never
        elif chosen.backend.startswith("jaccl") and not all(topology.rdma_between(index, other) for other in used):
            why = "RDMA does not join it to all the others"
        else:
            why = "the others are enough, and faster without it"
        yield host.name, why


def _warnings(topology: Topology, info: wire.ModelInfo, chosen: Option, options: list[Option]) -> Iterator[str]:
    yield from chosen.warnings
    hosts = [topology.hosts[rank.host] for rank in chosen.ranks]
    for option in options:
        faster = option.tokens_per_s > WORTH_SAYING * chosen.tokens_per_s
        if option.strategy != chosen.strategy and not option.why_not and faster:
            yield (
                f"{NAMES[option.strategy]} on {len(option.ranks)} Macs may decode faster, about "
                f"{option.tokens_per_s:.3g} tokens/s: --parallel {option.strategy}."
            )
    for rank in chosen.ranks:
        host, needs = topology.hosts[rank.host], rank.budget.needs - rank.budget.reserve
        if rank.budget.spare < 0:
            yield f"{host.name} is short by {gb(-rank.budget.spare)}: it may swap, or be stopped by macOS."
        elif host.available_bytes is not None and host.available_bytes < needs:
            yield f"{host.name} has {gb(host.available_bytes)} free now and needs {gb(needs)}: close what runs there."
    yield from _virtual(hosts)
    if unknown := unknown_chips(hosts):
        yield f"The memory bandwidth of {', '.join(unknown)} is not known; it counts as slow."
    if chosen.backend == "ring" and chosen.strategy == "tensor":
        yield "Tensor parallel over TCP waits for the network twice a layer: expect it to be slower than one Mac."
    if len(hosts) > 1 and not info.measured:
        yield "Sizes are from config.json alone; the weights' own headers will decide."


def _virtual(hosts: Iterable[Host]) -> Iterator[str]:
    for host in hosts:
        if host.virtual is not None:
            yield f"{host.name} is a virtual machine: its memory limit is the guest's, and RDMA does not reach it."


# ---------------------------------------------------------------- nothing fits


def _no_plan(topology: Topology, info: wire.ModelInfo, wishes: Wishes, tried: list[Option]) -> NoPlan:
    lines = [
        f"This model does not fit on {_macs(len(topology.hosts))} with {wishes.slots} x {wishes.context} tokens: "
        f"weights {gb(info.weights)}, KV {gb(info.kv_bytes(wishes.context) * wishes.slots)}."
    ]
    for option in tried:
        lines.append(f"{NAMES[option.strategy]}: {option.why_not or 'possible'}.")
        lines += [f"  {line(rank, len(info.layers))}" for rank in option.ranks]
    lines += _virtual(topology.hosts)
    advice = list(_advice(topology, info, wishes))
    hint = "What would make it fit: " + "; ".join(advice) + "." if advice else "Use a smaller model."
    return NoPlan("\n".join(lines), hint=hint, options=tuple(tried))


def line(rank: Rank, layers: int) -> str:
    """One host's sum, in words: needs / has / short by."""
    budget = rank.budget
    where = "" if (rank.start, rank.stop) == (0, layers) else f" layers {rank.start}-{rank.stop - 1}"
    verdict = f"short by {gb(-budget.spare)}" if budget.spare < 0 else f"{gb(budget.spare)} spare"
    return (
        f"{rank.name}{where}: weights {gb(budget.weights)} + KV {gb(budget.kv)} + activations "
        f"{gb(budget.activations)} + reserve {gb(budget.reserve)} = needs {gb(budget.needs)}, has {gb(budget.limit)}, "
        f"{verdict}"
    )


def _fits(topology: Topology, info: wire.ModelInfo, wishes: Wishes) -> bool:
    return Placement(topology, info, wishes).fits()


def _advice(topology: Topology, info: wire.ModelInfo, wishes: Wishes) -> Iterator[str]:
    """What would make it fit, each alone: less context, fewer slots, fewer bits, a higher limit, more Macs."""
    wishes = dataclasses.replace(wishes, force=False)
    context = wishes.context
    while context > 1024 and not _fits(topology, info, dataclasses.replace(wishes, context=context)):
        context //= 2
    if context < wishes.context and _fits(topology, info, dataclasses.replace(wishes, context=context)):
        yield f"--context {context}"
    for slots in range(wishes.slots - 1, 0, -1):
        if _fits(topology, info, dataclasses.replace(wishes, slots=slots)):
            yield f"--slots {slots}"
            break
    if bits := _fewer_bits(topology, info, wishes):
        yield bits
    if limits := _higher_limits(topology, info, wishes):
        yield limits
    if larger := _larger_mac(topology, info, wishes):
        yield larger
    if macs := _more_macs(topology, info, wishes):
        yield macs


def _fewer_bits(topology: Topology, info: wire.ModelInfo, wishes: Wishes) -> str:
    now = 8 * info.weights / info.parameters if info.parameters else 0.0
    for bits in BITS:
        share = (bits + PACKED_OVERHEAD) / now if now else 1.0
        if share < 1 and _fits(topology, _scaled(info, share), wishes):
            return f"a version with {bits} bits per weight (this one has {now:.1f}, all told)"
    return ""


def _scaled(info: wire.ModelInfo, share: float) -> wire.ModelInfo:
    """The same model with its weights at `share` of their bytes."""

    def less(size: int) -> int:
        return int(size * share)

    replace = msgspec.structs.replace
    return replace(
        info,
        layers=[replace(layer, weights=less(layer.weights), active=less(layer.active)) for layer in info.layers],
        embedding=less(info.embedding),
        head=less(info.head),
        outside=less(info.outside),
        tensor=[replace(size, weights=less(size.weights)) for size in info.tensor],
    )


def _higher_limits(topology: Topology, info: wire.ModelInfo, wishes: Wishes) -> str:
    """A wired limit that leaves macOS an eighth of the memory, at least 8 GB, where that is more than now."""
    hosts = tuple(
        dataclasses.replace(host, wired_limit_mb=(host.memory_bytes - max(8 << 30, host.memory_bytes // 8)) >> 20)
        for host in topology.hosts
    )
    pairs = list(zip(hosts, topology.hosts, strict=True))
    if any(chips.limit_bytes(new) < chips.limit_bytes(old) for new, old in pairs):
        return ""
    if not _fits(dataclasses.replace(topology, hosts=hosts), info, wishes):
        return ""
    limits = ", ".join(f"{host.wired_limit_mb} on {host.name}" for host in hosts)
    return f"a higher wired limit, `sudo sysctl iogpu.wired_limit_mb=N` with N {limits} (until a reboot)"


def _larger_mac(topology: Topology, info: wire.ModelInfo, wishes: Wishes) -> str:
    if wishes.parallel not in ("auto", "single"):
        return ""
    largest = max(topology.hosts, key=lambda host: host.memory_bytes)
    for size in MEMORY_GB:
        host = dataclasses.replace(largest, memory_bytes=size << 30, wired_limit_mb=0)
        if (
            host.memory_bytes > largest.memory_bytes
            and not Placement(Topology((host,), ()), info, wishes).single().why_not
        ):
            return f"one Mac with {size} GB"
    return ""


def _more_macs(topology: Topology, info: wire.ModelInfo, wishes: Wishes) -> str:
    """How many more of the largest Mac would do, in a pipeline over any links."""
    if info.pipeline or wishes.parallel in ("single", "tensor"):
        return ""
    largest = max(topology.hosts, key=lambda host: host.memory_bytes)
    ring = dataclasses.replace(wishes, backend="ring", split=())
    for count in range(1, MORE_MACS + 1):
        hosts = (*topology.hosts, *[largest] * count)
        if Placement(Topology(hosts, ()), info, ring).holds_all():
            return f"{count} more {'Mac' if count == 1 else 'Macs'} like {largest.name}"
    return ""


def _macs(count: int) -> str:
    return "this Mac" if count == 1 else f"these {count} Macs"
