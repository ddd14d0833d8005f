"""mlx's own reading of a hostfile: its parser, and the checks of mlx.launch up to where it would start the ranks."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path
from unittest import mock

from mlx._distributed_utils import common, launch

BACKENDS = {
    "": launch.launch_ring,
    "ring": launch.launch_ring,
    "nccl": launch.launch_nccl,
    "jaccl": launch.launch_jaccl,
    "jaccl-ring": launch.launch_jaccl,
}


def accepted_by_mlx(file: Path) -> str:
    """What mlx.launch says against a hostfile, or ""."""
    with mock.patch.object(common, "open", lambda path: io.StringIO(path.read_text()), create=True):  # it never closes
        hostfile = common.Hostfile.from_file(file)
    arguments = argparse.Namespace(
        backend=hostfile.backend or "ring",
        env=list(hostfile.envs),
        cwd=None,
        python=None,
        verbose=False,
        starting_port=32323,
        connections_per_ip=1,
        nccl_port=12345,
        repeat_hosts=1,
    )
    if len(hostfile.hosts) == 1 and not hostfile.hosts[0].ips:
        return ""  # one rank is started without mlx.launch
    said = io.StringIO()
    no_start = mock.patch.object(launch, "_launch_with_io")
    with no_start as started, contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        BACKENDS[hostfile.backend](argparse.ArgumentParser(), hostfile.hosts, arguments, ["true"])
    return "" if started.call_count == 1 else said.getvalue() or "it does not start"
