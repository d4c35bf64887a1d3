"""Makes the folders of runs and sweeps, also in a run root that several users share."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import missing, remove_empty

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes a folder, with the folders above it.

    Args:
        path: the folder.
        mode: its rights, of which the user's umask takes some; the folders above it get what the umask leaves.

    Raises:
        RequestError: it cannot be made. Nothing is left of it.
    """
    new = missing(path)
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        remove_empty(new)
        link = next((one for one in new if isinstance(error, FileExistsError) and one.is_symlink()), None)
        why = f"{link} is a link to a folder that is not there" if link is not None else error.strerror
        raise RequestError(
            f"{path}: the folder cannot be made: {why}: choose another place for runs by run_root=FOLDER"
        ) from error


def make_run_folder(path: Path) -> None:
    """Makes the folder of a run, ``ROOT/EXPERIMENT/NAME``, which only this user can write.

    Raises:
        RequestError: it cannot be made. Nothing is left of it.
    """
    make_folder(path, 0o777 & ~_OTHERS_WRITE)
    share_experiment(path)


def share_experiment(path: Path) -> None:
    """Opens a new experiment's folder to those who may write its run root, if they share that (it has the sticky bit).

    Else the user who begins an experiment would keep all others from having runs in it.

    Args:
        path: the experiment's first run or sweep.
    """
    experiment, root = path.parent, path.parent.parent
    with suppress(OSError):
        shared, own = root.stat(), experiment.stat()
        is_shared = bool(shared.st_mode & stat.S_ISVTX and shared.st_mode & _OTHERS_WRITE)
        # The rights of the root's group are not for a group of another kind.
        is_for_them = bool(shared.st_mode & stat.S_IWOTH) or own.st_gid == shared.st_gid
        if is_shared and is_for_them and _first_names(experiment, 2) == [path.name]:
            experiment.chmod(stat.S_IMODE(shared.st_mode))


def _first_names(folder: Path, count: int) -> list[str]:
    """The names of at most `count` entries of a folder, which may have thousands."""
    with os.scandir(folder) as entries:
        return [one.name for one in islice(entries, count)]
