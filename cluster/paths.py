"""Where this project keeps its files: three folders by the platform's conventions.

The variable CLUSTER_HOME moves all three under one folder. It is read once, where the command line begins; everything
else is handed a `Folders`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from cluster.errors import FolderUnusable


@dataclass(frozen=True, slots=True)
class Folders:
    """`state`: the record of the running cluster and its secret. `logs`: what processes print. `cache`: models."""

    state: Path
    logs: Path
    cache: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Folders:
        """The platform's folders, or those under CLUSTER_HOME when that is set."""
        if home := environment.get("CLUSTER_HOME"):
            root = Path(home).expanduser().absolute()
            return cls(root / "state", root / "logs", root / "cache")
        return cls(
            platformdirs.user_state_path("cluster", appauthor=False),
            platformdirs.user_log_path("cluster", appauthor=False),
            platformdirs.user_cache_path("cluster", appauthor=False),
        )

    def make(self) -> None:
        """Make all three; state and logs are for their owner only. Raises FolderUnusable."""
        for folder, mode in ((self.state, 0o700), (self.logs, 0o700), (self.cache, 0o755)):
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=mode)
                if mode == 0o700:
                    folder.chmod(mode)
            except OSError as error:
                raise FolderUnusable(
                    f"The folder {folder} cannot be used: {error.strerror or error}.",
                    hint="Make it writable, or set CLUSTER_HOME to a folder that is.",
                ) from error

    @property
    def secret(self) -> Path:
        """The launch's secret, mode 0600; exists only while a cluster runs."""
        return self.state / "secret"

    @property
    def fast_synch_off(self) -> Path:
        """Exists once a step stalled with MLX_METAL_FAST_SYNCH on; remove it to let `auto` switch it on again."""
        return self.state / "fast-synch-off"

    @property
    def coordinator_log(self) -> Path:
        """What the coordinator says."""
        return self.logs / "coordinator.log"

    @property
    def launcher_log(self) -> Path:
        """What mlx.launch says, and what no rank has labelled."""
        return self.logs / "launcher.log"

    def rank_log(self, rank: int) -> Path:
        """What the rank prints."""
        return self.logs / f"rank-{rank}.log"
