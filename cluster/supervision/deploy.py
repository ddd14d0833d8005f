"""From hosts and a model to a launch: probe, doctor, versions, plan, weights, hostfile, secret. Blocks, in one thread.

`supervise.py` calls `deploy` before each launch; after a loss, with the hosts that remain. What may differ from run to
run is looked at again each time: devices change their names at a reboot, addresses after a replug.
"""

from __future__ import annotations

import functools
import getpass
import logging
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cluster.cabling import backend
from cluster.cabling import hostfile as hostfiles
from cluster.cabling.addresses import meeting_point
from cluster.cabling.hostfile import HostEntry, Hostfile
from cluster.cabling.topology import Topology, topology
from cluster.config import ClusterConfig
from cluster.doctor import doctor
from cluster.errors import BadSetting, ClusterError, HostUnreachable, NoHostfile, NoHosts, NoPlan, NotFit
from cluster.macs import discover, probe
from cluster.macs.hosts import Host, Unreachable
from cluster.macs.ssh import CONNECT_S, on_all, open_shell
from cluster.paths import Folders
from cluster.plan import chips, model_info, planner
from cluster.plan.placement import gb
from cluster.ship import install, pull, same
from cluster.ship.stage_files import weights_bytes
from cluster.supervision.arrange import LOOPBACK, Arrangement, arrange
from cluster.supervision.sites import Sites
from parallel import wire

logger = logging.getLogger("cluster.deploy")
CONTROL_PORTS = (20000, 32000)  # of rank 0; below where systems take ports from for connections
AUTO = ("auto",)
AGAIN_S = 5.0  # for a host that answered before to let us in; nothing is served meanwhile

Say = Callable[[str, int, int], None]  # phase, done, total (bytes; 0: not known)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that a launch on other machines needs. `address`:`port` is where rank 0 listens.

    `away` are hosts that could not be looked at, `unused` those that the plan does without, each with the reason;
    `available` is each host's free memory before the launch, in bytes.
    """

    arrangement: Arrangement
    sites: Sites
    address: str
    port: int
    away: Mapping[str, str]
    unused: Mapping[str, str]
    available: Mapping[str, int]
    systems: frozenset[str]
    notes: tuple[str, ...] = ()


def owner(folders: Folders) -> str:
    """Who this coordinator is, to others that meet its ranks."""
    return f"{getpass.getuser()}@{socket.gethostname()}: {folders.state}"


def with_others(config: ClusterConfig, name: str, folder: Path, memory_bytes: int) -> ClusterConfig:
    """`config`; with all Macs that Bonjour finds, where it names no place and this machine cannot hold the weights.

    `memory_bytes` is what this machine has. Raises NoHosts when there is nobody. Blocks for the discovery.
    """
    if config.hosts or config.hostfile is not None or config.local is not None or config.force:
        return config
    weights, limit = weights_bytes(folder), int(memory_bytes * chips.default_share(memory_bytes))
    if weights <= limit:
        return config
    told = f"The weights of {name} take {gb(weights)}; this machine can give them {gb(limit)}"
    try:
        hosts = discover.host_names()
    except NoHosts as nobody:
        raise NoHosts(
            f"{told}, and Bonjour knows nobody to share them with. {nobody.message}",
            hint=f"{nobody.hint} Or take a smaller quantisation; --force tries it here.",
        ) from nobody
    logger.info("%s: it runs on %s", told, ", ".join(hosts))
    return replace(config, hosts=tuple(hosts))


def wanted_hosts(config: ClusterConfig) -> list[str]:
    """The hosts that the settings mean. Raises NoHosts when Bonjour finds none."""
    if config.hosts == AUTO:
        return discover.host_names()
    if config.hosts:
        return list(config.hosts)
    assert config.hostfile is not None
    return list(dict.fromkeys(host.ssh for host in hostfiles.read(Path(config.hostfile)).hosts))


def deploy(config: ClusterConfig, folders: Folders, name: str, folder: Path, *, first: bool, say: Say) -> Deployment:
    """Look at the hosts and prepare them for model `name`, which is in `folder` here.

    The `first` time every host must be there and fit; later, what remains has to do. Raises ClusterError.
    """
    say("probing", 0, 0)
    names = wanted_hosts(config)
    pythons = {host: config.python or install.python_of(host) for host in names}
    seen, away = probe.probe_hosts(names, pythons=pythons, connect_s=CONNECT_S if first else AGAIN_S)
    if away and (first or not seen) and not config.force:
        raise HostUnreachable(
            "\n".join(host.reason for host in away), hint=away[0].hint or "Leave it out of --hosts to go on without it."
        )
    sites = Sites(tuple(host.ssh for host in seen), config.python)
    sites.clear(owner(folders))
    if first and not config.force:
        _examine(seen, away)
    say("planning", 0, 0)
    info = _read_once(folder)
    found = topology(seen)
    if config.hostfile is not None:
        arrangement, unused, notes = _by_hostfile(config, info, found)
    elif first:
        arrangement, unused, notes = _by_plan(config, info, found)
    else:
        arrangement, unused, notes = _by_what_remains(config, info, found)
    by_name = {host.ssh: host for host in seen}
    used = [spec.host for spec in arrangement.ranks]
    needs: dict[str, tuple[int, int] | None] = dict.fromkeys(used)
    if arrangement.strategy == "pipeline":
        needs = {spec.host: (spec.start, spec.stop) for spec in arrangement.ranks}
    _same_everywhere(config, [by_name[host] for host in used])
    places = _weights(config, folders, name, folder, needs, found, say)
    ranks = tuple(
        wire.RankSpec(spec.host, spec.start, spec.stop, model=places[spec.host]) for spec in arrangement.ranks
    )
    return Deployment(
        Arrangement(arrangement.strategy, arrangement.backend, arrangement.hostfile, ranks),
        Sites(tuple(used), config.python),
        _address([by_name[host] for host in used]),
        random.randrange(*CONTROL_PORTS),
        {host.name: host.reason for host in away},
        unused,
        {host.ssh: host.available_bytes or 0 for host in seen},
        frozenset(host.system for host in seen),
        notes,
    )


def with_secret(plan: wire.RankPlan, deployment: Deployment, folders: Folders) -> wire.RankPlan:
    """`plan` with the launch's secret on every host, and where it is there. Blocks; raises ClusterError."""
    places = deployment.sites.give_secret(plan.launch, folders.secret.read_text())
    ranks = [msgspec.structs.replace(spec, secret_file=places[spec.host]) for spec in plan.ranks]
    return msgspec.structs.replace(plan, ranks=ranks)


@functools.cache
def _read_once(folder: Path) -> wire.ModelInfo:
    """The same for all launches of a cluster: reading takes seconds in which nothing is served."""
    return model_info.read(folder)


def answering(hosts: Sequence[str]) -> list[str]:
    """Those of `hosts` to which ssh gets through now. Blocks."""

    def knock(host: str) -> str:
        with open_shell(host) as shell:
            shell.run(["true"])
            return host

    return [host for host, said in zip(hosts, on_all(hosts, knock), strict=True) if not isinstance(said, ClusterError)]


def _examine(seen: list[Host], away: list[Unreachable]) -> None:
    if blocking := [finding for finding in doctor.examine(seen, away) if finding.blocks]:
        lines = "".join(f"\n  {finding.code}: {finding.seen} {finding.do}" for finding in blocking)
        raise NotFit(
            f"These hosts cannot run as a cluster yet:{lines}",
            hint="`cluster doctor` says more; --force goes on as it is.",
        )


def _by_plan(
    config: ClusterConfig, info: wire.ModelInfo, found: Topology
) -> tuple[Arrangement, dict[str, str], tuple[str, ...]]:
    """The planner's choice of hosts, and the hostfile that joins them."""
    wishes = planner.wishes_for(
        info,
        context=config.context or 0,
        slots=0,
        chunk_tokens=config.prefill_step_size,
        parallel=config.parallel,
        backend=config.backend,
        split=config.split,
        force=config.force,
    )
    plan = planner.plan(found, info, wishes)
    hosts = [found.hosts[index] for index in plan.hosts]
    ranks = tuple(
        wire.RankSpec(host.ssh, rank.start, rank.stop) for host, rank in zip(hosts, plan.chosen.ranks, strict=True)
    )
    left_out = dict(plan.left_out)
    if len(hosts) == 1:
        return Arrangement("single", "", Hostfile((HostEntry(hosts[0].ssh),)), ranks), left_out, plan.warnings
    joined = backend.join(topology(hosts), backend=plan.chosen.backend, order=range(len(hosts)))
    return (
        Arrangement(plan.chosen.strategy, plan.chosen.backend, joined.hostfile, ranks),
        left_out,
        (*plan.warnings, *joined.notes),
    )


def _by_what_remains(
    config: ClusterConfig, info: wire.ModelInfo, found: Topology
) -> tuple[Arrangement, dict[str, str], tuple[str, ...]]:
    """As `_by_plan`; a strategy or a split that needs the hosts that were lost gives way to what serves at all."""
    try:
        return _by_plan(config, info, found)
    except (NoPlan, BadSetting) as wished:
        if config.parallel == "auto" and not config.split:
            raise
        try:
            arrangement, unused, notes = _by_plan(replace(config, parallel="auto", split=()), info, found)
        except NoPlan:
            raise wished from None
    note = f"The hosts that remain cannot run as wished; they run as {arrangement.strategy}."
    return arrangement, unused, (note, *notes)


def _by_hostfile(
    config: ClusterConfig, info: wire.ModelInfo, found: Topology
) -> tuple[Arrangement, dict[str, str], tuple[str, ...]]:
    """The user's own hosts in the user's own order; what contradicts the facts is told."""
    given = hostfiles.read(Path(config.hostfile or ""))
    here = {host.ssh for host in found.hosts}
    if missing := [host.ssh for host in given.hosts if host.ssh not in here]:
        raise NoHostfile(
            f"{config.hostfile} names {', '.join(missing)}, which cannot be reached.",
            hint="Use --hosts instead, with which a cluster goes on without hosts that are lost.",
        )
    return arrange(config, given, info), {}, ()


def _same_everywhere(config: ClusterConfig, hosts: Sequence[Host]) -> None:
    """Raise VersionsDiffer where the ranks would run on different systems, Pythons or packages; each one is named."""
    same.check(install.versions([host.ssh for host in hosts], python=config.python))


def _weights(
    config: ClusterConfig,
    folders: Folders,
    name: str,
    folder: Path,
    needs: Mapping[str, tuple[int, int] | None],
    found: Topology,
    say: Say,
) -> dict[str, str]:
    """The model's folder on every host, with what its layers need in it."""
    copied: dict[str, tuple[int, int]] = {}

    def progress(host: str, what: str, done: int, total: int) -> None:
        copied[host] = (done, total)
        say("copying", sum(done for done, _ in copied.values()), sum(total for _, total in copied.values()))

    model = pull.read_model(name, folder, cache=folders.cache)
    return pull.ensure(model, needs, models=config.models, routes=pull.routes(found), progress=progress)


def _address(hosts: list[Host]) -> str:
    """Where the ranks and this coordinator meet: a LAN address of rank 0's host."""
    met = meeting_point(hosts)
    if met is None:
        return LOOPBACK
    return met[0][0].ip
