"""Finds the folder of a ``--multirun``.

Hydra writes to this folder before it composes the combinations, and it tells the path only to its callbacks.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, read_write

from ortlaunch.base.files import is_there, missing, remove_empty

_BY_THE_SECOND = re.compile(r"multirun-\d{8}-\d{6}")
"""The name that conf/config.yaml gives to the folder."""
_MOST = 1000
"""Sweeps that may begin in the same second."""


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a ``--multirun``."""

    path: Path
    new: list[Path]
    """The folders that did not exist before, among this folder and its parents."""


class SweepWatch(Callback):
    """Notes the folder before it is made; conf/config.yaml names this class among Hydra's callbacks."""

    latest: ClassVar[SweepFolder | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Notes the folder. Hydra calls this before it writes anything."""
        path = Path(config.hydra.sweep.dir).absolute()
        new = missing(path)
        own = _made(path) if _BY_THE_SECOND.fullmatch(path.name) else None
        if own is None:
            SweepWatch.latest = SweepFolder(path, new)
            return
        SweepWatch.latest = SweepFolder(own, [own, *(one for one in new if one != path)])
        if own != path:
            with read_write(config.hydra):
                config.hydra.sweep.dir = str(own)


def _made(path: Path) -> Path | None:
    """Makes the folder, and returns it; a sweep that begins in the same second as another gets a number.

    None if it cannot be made: Hydra meets the same error, and says it.
    """
    for number in range(1, _MOST):
        own = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            own.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            return None
        return own
    return None


def sweep_folder() -> SweepFolder | None:
    """Returns the folder of the latest ``--multirun``, whether or not it exists; None without one."""
    return SweepWatch.latest


def discard(folder: SweepFolder | None) -> None:
    """Removes what Hydra wrote for a sweep that was not made after all, and the folders that it made for that.

    Args:
        folder: the sweep's folder; None without a sweep.
    """
    if folder is None:
        return
    # Only a sweep needs this module.
    from ortlaunch.run.sweep import HYDRA_FILE, SWEEP_FILE

    if is_there(folder.path / SWEEP_FILE):
        return
    # The path may be one that no file system takes.
    with suppress(OSError):
        (folder.path / HYDRA_FILE).unlink()
    remove_empty(folder.new)
