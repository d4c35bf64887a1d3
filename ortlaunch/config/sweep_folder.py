"""Where a ``--multirun`` puts its folder.

Hydra writes there before it composes the combinations, and tells only its callbacks where that is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepFolder(Callback):
    """Remembers the folder; conf/config.yaml names this class among Hydra's callbacks."""

    latest: ClassVar[Path | None] = None
    """Of the command line that Hydra has taken last; None without ``--multirun``."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called before anything is written."""
        SweepFolder.latest = Path(config.hydra.sweep.dir).absolute()


def sweep_folder() -> Path | None:
    """The folder of the ``--multirun`` that Hydra has taken last, whether or not it is there; None without one."""
    return SweepFolder.latest
