"""Expected failures, as values: what was seen, what to type next, the exit code and the HTTP status.

Raised where the fact is known, printed only by `cli.py`, turned into JSON only by `api.py`. Every class
here has its section in docs/failures.md; a test keeps that list complete.
"""

from __future__ import annotations


class ClusterError(Exception):
    """An expected failure. `message` names the host, file or field; `hint` is what to type or plug next."""

    exit_code = 1
    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadRequest(ClusterError):
    """A request that can never be served as it is. `param` names the field."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.code = code


class QueueFull(ClusterError):
    """More requests wait than the queue holds; the client should come back after `retry_after_s` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry_after_s = 5


class NotReady(ClusterError):
    """The engine is still loading, or is being relaunched; the client should come back."""

    status = 503
    type = "server_error"
    code = "not_ready"
    retry_after_s = 5


class EngineLost(ClusterError):
    """The engine process died or stopped answering while the request was open."""

    status = 503
    type = "server_error"
    code = "engine_lost"
    retry_after_s = 5


class StepFailed(ClusterError):
    """A step of the engine raised; the requests in it failed, the engine goes on."""

    status = 500
    type = "server_error"
    code = "step_failed"


class BadSetting(ClusterError):
    """A flag or a key of the configuration file has a value that cannot be used."""

    exit_code = 2


class UnknownSetting(ClusterError):
    """The configuration file has a key that is no setting."""

    exit_code = 2


class ConfigUnreadable(ClusterError):
    """The configuration file is missing, cannot be read, or is no YAML mapping."""

    exit_code = 2


class FolderUnusable(ClusterError):
    """The state, log or cache folder cannot be made or written."""


class StateUnreadable(ClusterError):
    """The record of the running cluster does not decode."""


class AlreadyRunning(ClusterError):
    """Another `cluster up` runs here with other settings."""


class NothingRuns(ClusterError):
    """A command needs a running cluster and there is none."""


class PortTaken(ClusterError):
    """Another program listens on the port of the API."""


class AddressUnusable(ClusterError):
    """The API cannot be bound to the given host: unknown, not this machine's, or not permitted."""


class RankFailed(ClusterError):
    """A rank did not start, or failed before it was ready."""


class ProcessStuck(ClusterError):
    """A process of this cluster does not end, not even by SIGKILL."""


class StartFailed(ClusterError):
    """A detached `cluster up` ended before it was ready."""


class ServerUnanswering(ClusterError):
    """The running cluster's API does not answer, or answers with an error."""


class BenchFailed(ClusterError):
    """`cluster bench` got no usable answer from the server to load, or its timing process ended early."""


# ---------------------------------------------------------------- models and downloads (weights.py, demo.py)


class NoSuchModel(ClusterError):
    """The name given as MODEL is no folder here and no Hugging Face repository name."""


class NotAModelFolder(ClusterError):
    """The folder has no readable config.json, so it is no model in MLX format."""


class NotMlxFormat(ClusterError):
    """The model is there, but its weights are in a format that MLX does not read (GGUF, PyTorch)."""


class MissingShards(ClusterError):
    """The index of the weights names files that are not in the folder."""


class DamagedShard(ClusterError):
    """A weight file is shorter or longer than its own header says, or its header is unreadable."""


class RepositoryNotFound(ClusterError):
    """The Hugging Face Hub has no such repository, or does not show it to this user."""


class RepositoryGated(ClusterError):
    """The repository's terms must be accepted on its web page, and a token must show who asks."""


class HubUnreachable(ClusterError):
    """The Hugging Face Hub cannot be reached (or is switched off) and the model is not complete in the local cache."""


class DownloadFailed(ClusterError):
    """A download broke off; what had arrived in full is kept."""


class NotEnoughDisk(ClusterError):
    """The files do not fit on the disk that they would go to; nothing was downloaded."""


class DemoUnavailable(ClusterError):
    """The demo model's package could not be fetched, or is not the one that is pinned."""


class ConversionFailed(ClusterError):
    """The demo model's weights could not be converted to MLX format."""


# ---------------------------------------------------------------- virtual Macs (cluster/vm)


class NotAMacGuest(ClusterError):
    """`cluster vm run` was typed on something else than a macOS guest."""


class ProgramRefused(ClusterError):
    """The program cannot be given the layer: a script, protected, hardened, not for Apple silicon, or not there."""


class LayerUnbuildable(ClusterError):
    """Apple's command line tools are missing or could not build the layer."""


class CombinationRefused(ClusterError):
    """The compatibility map says that this combination gives wrong results, or does not know it."""


class ComparisonFailed(ClusterError):
    """`vm run --compare` could not compare: a run failed, stayed stock, or printed nothing to compare."""


class WrongAnswer(ClusterError):
    """The program generated another text with the raised profile than with the stock one."""


class ProfileUnreadable(ClusterError):
    """The Metal profile of a machine could not be read."""


# ---------------------------------------------------------------- hostfiles (hostfile.py, backend.py)


class HostfileUnreadable(ClusterError):
    """The hostfile is missing or cannot be read."""


class HostfileInvalid(ClusterError):
    """The hostfile has faults; `faults` are all of them, one sentence each."""

    def __init__(self, name: str, faults: list[str]) -> None:
        many = f"{len(faults)} faults:\n  " if len(faults) > 1 else ""
        super().__init__(
            f"{name}: {many}" + "\n  ".join(faults),
            hint="`cluster hostfile -o FILE` writes one from the cables that are plugged.",
        )
        self.faults = tuple(faults)


class HostfileUnwritable(ClusterError):
    """The hostfile cannot be written where it should go; what was there stays."""


class NoHostfile(ClusterError):
    """No hostfile can be made from these Macs as they are; the message says what stands in the way."""


# ---------------------------------------------------------------- splits and plans (model_info.py, planner.py)


class ModelNotUnderstood(ClusterError):
    """Mlx-lm cannot build the model from its config.json, or its sizes could not be read."""


class SplitRefused(ClusterError):
    """The model cannot be cut that way into that many ranks; the hint has the ways that work."""


class NoPlan(ClusterError):
    """The model fits on these Macs in no way; `message` tells needs, has and short by, `options` each way's sums."""

    def __init__(self, message: str, *, hint: str = "", options: tuple[object, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.options = options


# ---------------------------------------------------------------- other machines (ssh.py, probe.py, discover.py)


class HostUnreachable(ClusterError):
    """No ssh connection to a host: name unknown, no route, refused, silent, or the connection broke."""


class HostKeyUnknown(ClusterError):
    """The host's key is not in known_hosts, and nobody is asked: a prompt would hang."""


class HostKeyChanged(ClusterError):
    """The host shows another key than known_hosts has: reinstalled, another machine, or someone in between."""


class LoginRefused(ClusterError):
    """The host answers, but none of the keys at hand gets in."""


class SshUnusable(ClusterError):
    """The system's `ssh` is missing, or does not accept its own configuration file."""


class CommandTimedOut(ClusterError):
    """A command on a host did not end in time."""


class CopyFailed(ClusterError):
    """A file could not be copied to or from a host."""


class NoHosts(ClusterError):
    """No Mac was named, and none was found on the network."""


class RecordingUnreadable(ClusterError):
    """The folder given to --recorded holds no recorded hosts."""


# ---------------------------------------------------------------- the same on all hosts (install.py, pull.py, same.py)


class FolderOccupied(ClusterError):
    """The folder for a model on a host also holds weights of another one, which would be loaded with it."""


class HostNotInstallable(ClusterError):
    """A host lacks what the environment needs before it can be put there: Python, or room on the disk."""


class WheelsUnavailable(ClusterError):
    """The pinned packages for a host's system and Python could not be fetched, or nothing says which they are."""


class InstallFailed(ClusterError):
    """The environment could not be made on a host, or is not the same there as here afterwards."""


class VersionsDiffer(ClusterError):
    """The hosts do not run the same macOS, Python, mlx, mlx-lm, cluster or model; each difference is named."""


# ---------------------------------------------------------------- several hosts (deploy.py, sites.py)


class HostBusy(ClusterError):
    """Another coordinator's ranks run on a host."""


class NotFit(ClusterError):
    """Doctor found what keeps these hosts from running as a cluster."""
