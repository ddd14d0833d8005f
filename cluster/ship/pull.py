"""Every host gets the weights that its layers need: copied from here and from host to host, checked, resumable.

`cluster pull` and `cluster up` call `read_model`, then `ensure`, once `weights.resolve` has the model in a folder.
Which files a host needs says `stage_files.py`; how they get there `carry.py`. It loads nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.cabling.addresses import is_link_local, network_of, port_addresses
from cluster.cabling.topology import Topology
from cluster.errors import CopyFailed, DamagedShard
from cluster.macs.ssh import LOCAL_NAMES
from cluster.ship.arrivals import Sums
from cluster.ship.carry import ANY_PYTHON, Errand, File, Progress, Routes, bring
from cluster.ship.stage_files import Layers, model_files, needed

BLOB = re.compile(r"[0-9a-f]{64}")  # the Hub's cache names large files by their SHA-256
LAN_SPEED = 1.0  # Gb/s, where nothing is known


@dataclass(frozen=True, slots=True)
class Model:
    """A model's files in `folder` here. `sum` stands for all of them: equal on hosts whose files are those."""

    name: str
    folder: Path
    files: Mapping[str, File]

    @property
    def sum(self) -> str:
        text = json.dumps(sorted((name, file.sum) for name, file in self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_model(
    name: str,
    folder: Path,
    *,
    cache: Path,
    again: bool = False,
    progress: Progress = lambda host, what, done, total: None,
    stop: threading.Event | None = None,
) -> Model:
    """The files of a model here, with their sums: computed once (some seconds per 10 GB), then remembered in `cache`.

    Raises DamagedShard when a file of the Hub's cache is not what its name says.
    """
    sums, files = Sums(str(cache / "sums.json")), {}
    names = model_files(folder)
    sizes = {name: (folder / name).stat().st_size for name in names}
    before, total = 0, sum(sizes.values())

    def told(at: int) -> None:
        if stop is not None and stop.is_set():
            raise CopyFailed("Stopped while the model's files were read.")
        progress("this machine", "checking", before + at, total)

    for file in names:
        found = sums.of(str(folder / file), again=again, told=told)
        blob = (folder / file).resolve().name
        if BLOB.fullmatch(blob) and blob != found:
            raise DamagedShard(
                f"{folder / file} is not what the Hub has: its SHA-256 is {found[:12]}..., not {blob[:12]}...",
                hint=f"Delete it and fetch it again: rm '{(folder / file).resolve()}', then the same command.",
            )
        files[file] = File(sizes[file], found)
        before += sizes[file]
    return Model(name, folder, files)


def ensure(
    model: Model,
    needs: Mapping[str, Layers],
    *,
    models: Mapping[str, str] | None = None,
    routes: Routes | None = None,
    again: bool = False,
    progress: Progress = lambda host, what, done, total: None,
    note: Callable[[str], None] = lambda text: None,
    stop: threading.Event | None = None,
) -> dict[str, str]:
    """See to it that every host of `needs` has what it needs of the model; returns its folder on each host.

    `needs` are the layers [start, stop) per host, as ssh knows it, or None for the whole model. `models` is the folder
    for models on a host (default: this project's cache there). A folder that has the files already is taken as it is:
    there, under LM Studio's or the Hub's cache, or under the same path as here. Raises as `carry.bring`.
    """
    wanted = needed(model.folder, needs)
    far = [host for host in needs if host not in LOCAL_NAMES]
    errands = [
        Errand(
            host,
            tuple(wanted[host]),
            {"name": model.name, "models": (models or {}).get(host, ""), "also": [str(model.folder)]},
            ANY_PYTHON,
        )
        for host in far
    ]
    folders = {host: str(model.folder) for host in needs}
    if errands:
        folders |= bring(
            errands,
            model.folder,
            model.files,
            what=model.name,
            routes=routes,
            again=again,
            progress=progress,
            note=note,
            stop=stop,
        )
    return folders


def routes(topology: Topology) -> dict[tuple[str, str], tuple[str, float]]:
    """For hosts that cables with addresses join: the address at the other end of the fastest, and its Gb/s."""
    found: dict[tuple[str, str], tuple[str, float]] = {}
    for cable in topology.cables:
        for near, far in ((cable.a, cable.b), (cable.b, cable.a)):
            source, target = topology.hosts[near.host], topology.hosts[far.host]
            subnets = [network_of(a) for a in port_addresses(source, near.port) if not is_link_local(a)]
            ends = [a.ip for a in port_addresses(target, far.port) if network_of(a) in subnets]
            speed = float(cable.speed or LAN_SPEED)
            if ends and speed > found.get((source.ssh, target.ssh), ("", 0.0))[1]:
                found[source.ssh, target.ssh] = (ends[0], speed)
    return found
