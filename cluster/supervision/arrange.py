"""Which ranks a launch has and what each of them holds: from settings, hostfile and model to a `Arrangement`. Pure.

For ranks on this machine and for a hostfile given by the user. Hosts that are looked at first get theirs from
`planner.py`. Called by `supervise.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.cabling.hostfile import HostEntry, Hostfile
from cluster.config import ClusterConfig
from cluster.errors import BadSetting
from cluster.plan.model_info import check_pipeline, check_tensor
from cluster.plan.stages import Layer, Place, split
from parallel import wire

LOOPBACK = "127.0.0.1"
THIS_MACHINE = "this machine"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`hostfile` in rank order and, for each rank, its host and its layers (all of them where none are split)."""

    strategy: str
    backend: str
    hostfile: Hostfile
    ranks: tuple[wire.RankSpec, ...]

    @property
    def layout(self) -> tuple[str, tuple[wire.RankSpec, ...]]:
        """What is equal when the same hosts hold the same layers again, whatever their ports."""
        return self.strategy, self.ranks

    @property
    def local(self) -> bool:
        """Whether all ranks are on this machine."""
        return all(host.ssh == LOOPBACK for host in self.hostfile.hosts)

    def link(self, rank: int) -> str:
        """How the other ranks reach this one: its RDMA devices, or its addresses."""
        host = self.hostfile.hosts[rank]
        devices = {name for leading in host.rdma for name in leading or ()}
        return ", ".join(sorted(devices) if self.backend.startswith("jaccl") else host.ips)


def local_hostfile(ranks: int) -> Hostfile:
    """`ranks` ranks on this machine, joined over loopback."""
    return Hostfile((HostEntry(LOOPBACK, (LOOPBACK,)),) * ranks, "ring")


def arrange(config: ClusterConfig, hostfile: Hostfile, info: wire.ModelInfo) -> Arrangement:
    """Spread the model over the hosts of `hostfile`. Raises SplitRefused, with what works; BadSetting where settings
    contradict each other."""
    size = len(hostfile.hosts)
    strategy = config.parallel
    if hostfile.backend == "nccl" and size > 1:
        if strategy == "pipeline":
            raise BadSetting("MLX's nccl backend has no send and receive, which a pipeline needs: --parallel tensor.")
        strategy = "tensor"
    if strategy == "auto":
        cannot_stage = bool(info.pipeline) or size > len(info.layers)
        strategy = "tensor" if cannot_stage and not info.why_not_tensor(size) else "pipeline"
    if strategy == "tensor":
        if config.split:
            raise BadSetting(
                "--split is for --parallel pipeline: tensor parallel gives every rank a slice of each layer."
            )
        check_tensor(info, size)
        cuts = [(0, len(info.layers))] * size
    else:
        cuts = _cuts(config.split, size, info)
    specs = [
        wire.RankSpec(THIS_MACHINE if host.ssh == LOOPBACK else host.ssh, start, stop)
        for host, (start, stop) in zip(hostfile.hosts, cuts, strict=True)
    ]
    return Arrangement(strategy, hostfile.backend or "ring", hostfile, tuple(specs))


def _cuts(wanted: tuple[int, ...], size: int, info: wire.ModelInfo) -> list[tuple[int, int]]:
    """Layers [start, stop) of each rank; rank 0 is the last stage."""
    count = len(info.layers)
    check_pipeline(info, size)
    if not wanted:
        stages = split(_layers(info), [Place(1 << 60, 1.0)] * size, [range(size)])
        assert stages is not None
        return [(stage.start, stage.stop) for stage in reversed(stages)]
    if len(wanted) != size or sum(wanted) != count:
        raise BadSetting(
            f"--split {','.join(map(str, wanted))} is for {len(wanted)} ranks and {sum(wanted)} layers, "
            f"but there are {size} ranks and the model has {count} layers."
        )
    ends = [count - sum(wanted[:rank]) for rank in range(size)]
    return [(end - layers, end) for end, layers in zip(ends, wanted, strict=True)]


def _layers(info: wire.ModelInfo) -> list[Layer]:
    """What each layer costs its stage. The last one brings half the head: decoding computes it, prefill does not."""
    sizes = [layer.weights for layer in info.layers]
    sizes[-1] += (info.head or info.embedding) // 2
    return [Layer(size, 0, size) for size in sizes]
