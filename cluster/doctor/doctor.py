"""What keeps several Macs from working as one, in the order in which to fix it. Pure functions over facts.

Every finding says what was seen and where, why it matters, and what to type or plug. A cause is told, not what follows
from it: a port that is down because the other Mac has RDMA disabled is no finding of its own. The rules are in
doctor_hosts.py and doctor_cables.py; repair.py knows commands for what can be put right over ssh. `cluster doctor`,
`plan`, `hostfile` and `up` show the findings.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.cabling.topology import topology
from cluster.doctor import cables, machines
from cluster.doctor.findings import Finding, Group
from cluster.macs.hosts import Host, Unreachable

# What needs a restart comes first, since that undoes some of the rest; then cables, then what can be typed.
ORDER = (
    *("unreachable", "local-network", "ssh", "unread", "virtual", "not-a-mac", "no-tb5"),
    *("old-macos", "macos-mismatch", "early-macos", "rdma-disabled", "no-rdma-devices", "peer-rdma-disabled"),
    *("no-cables", "missing-cable", "slow-link", "studio-en2", "dock", "one-sided", "self-cable", "port-unknown"),
    *("bridge-loop", "bridge-active", "bridge-member", "port-down", "rdma-worn"),
    *("address-overlap", "no-ipv4-gid", "gid-index", "other-subnet", "no-lan", "no-shared-lan"),
    *("no-mlx", "old-mlx", "mlx-mismatch", "mlx-lm-mismatch", "python-mismatch"),
    *("sleep", "wired-limit", "firewall", "uneven-memory"),
)
RULES = (
    *(machines.reach, machines.machines, machines.systems, machines.software, machines.settings),
    *(cables.switches, cables.cabling, cables.links, cables.ports, cables.bridges, cables.addresses),
)


def examine(hosts: Sequence[Host], unreachable: Sequence[Unreachable] = ()) -> list[Finding]:
    """Every finding about these hosts together, in the order in which to fix them; one per code."""
    group = Group(topology(hosts))
    found = [*machines.away(unreachable), *(finding for rule in RULES for finding in rule(group))]
    by_code = {finding.code: finding for finding in reversed(found)}
    return sorted(reversed(by_code.values()), key=lambda finding: ORDER.index(finding.kind))
