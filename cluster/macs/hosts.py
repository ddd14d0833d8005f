"""Facts about Macs, as seen by `probe.py`: frozen values, no behaviour but what follows from themselves.

Topology, doctor, planner and hostfile are pure functions over these. A fact that could not be read is None (or empty),
never a guess; `Host.unread` says which command failed and how.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.vm.facts import VirtualMachine


@dataclass(frozen=True, slots=True)
class Address:
    """An IPv4 address on an interface: `ip` as text, `prefix` its subnet's length in bits."""

    interface: str
    ip: str
    prefix: int


@dataclass(frozen=True, slots=True)
class Peer:
    """What a Thunderbolt port sees at the other end of its cable, when that is a Mac.

    `rdma_service` is whether it advertises RDMA: a Mac with RDMA disabled does not. `behind` names the dock between.
    """

    domain_uuid: str
    name: str
    model: str
    rdma_service: bool
    behind: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """A Thunderbolt receptacle. `device` is its network interface ("en5", "" unknown); speeds in Gb/s, 0 unknown.

    `speed` is the link's when something is connected; `max_speed` is what the port says it can do when nothing is.
    `attached` names a device that is no Mac (display, disk).
    """

    number: int
    device: str
    domain_uuid: str
    connected: bool
    speed: int
    max_speed: int
    peers: tuple[Peer, ...] = ()
    attached: str = ""

    @property
    def rdma(self) -> str:
        """The name of the RDMA device that belongs to this port, whether or not it exists."""
        return f"rdma_{self.device}" if self.device else ""


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One device of `ibv_devinfo -v`. `state` as printed ("PORT_ACTIVE"); `gids` in table order; limits, 0 unknown."""

    name: str
    state: str
    gids: tuple[str, ...] = ()
    max_qp: int = 0
    max_mr: int = 0
    max_pd: int = 0

    @property
    def active(self) -> bool:
        return self.state == "PORT_ACTIVE"


@dataclass(frozen=True, slots=True)
class Power:
    """Minutes until sleep (0 never) and whether the Mac restarts after a power failure (None: no such setting)."""

    sleep_min: int
    disksleep_min: int
    autorestart: bool | None


@dataclass(frozen=True, slots=True)
class Versions:
    """Of what a rank runs on; "" where it is missing. `python` is the interpreter that ranks would use there."""

    python: str = ""
    mlx: str = ""
    mlx_lm: str = ""
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Unread:
    """A command that gave no usable answer on a host, and what it said."""

    command: str
    reason: str


@dataclass(frozen=True, slots=True)
class Host:
    """One machine. `name` is how the user calls it, `ssh` what goes into a hostfile; `uuid` its hardware UUID.

    Sizes in bytes. `wired_limit_mb` 0 is macOS's own default. `rdma_enabled` is what `rdma_ctl status` says (None: no
    such tool); believe ports and devices before it. `bridge_members` are the interfaces of bridge0, and `bridge_up`
    whether it is up. `interfaces` maps each hardware port's name to its device. `batch_ssh` is "" when the system's own
    ssh gets in without a question, else what it said ("" too in a recording without it).
    """

    name: str
    ssh: str
    uuid: str = ""
    model: str = ""  # "Mac15,14"
    model_name: str = ""  # "Mac Studio"
    chip: str = ""  # "Apple M3 Ultra"
    gpu_cores: int = 0
    memory_bytes: int = 0
    available_bytes: int | None = None
    wired_limit_mb: int | None = None
    macos: str = ""
    build: str = ""
    system: str = "Darwin"  # what `uname -s` would say
    ports: tuple[Port, ...] = ()
    rdma_enabled: bool | None = None
    rdma_devices: tuple[RdmaDevice, ...] = ()
    interfaces: dict[str, str] = field(default_factory=dict)
    addresses: tuple[Address, ...] = ()
    bridge_members: tuple[str, ...] = ()
    bridge_up: bool = False
    power: Power | None = None
    firewall: bool | None = None
    disk_free_bytes: int | None = None
    versions: Versions = Versions()
    virtual: VirtualMachine | None = None
    batch_ssh: str = ""
    unread: tuple[Unread, ...] = ()


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A host that could not be looked at: why, and what to type."""

    name: str
    reason: str
    hint: str
