"""Where the configuration tree lies: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

import os
from pathlib import Path

import ortlaunch


def conf_dir() -> Path:
    """The folder with ``config.yaml`` and the config groups.

    Raises:
        FileNotFoundError: the installation carries no configuration tree.
    """
    package = Path(ortlaunch.__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"ortlaunch's configuration tree is missing beside {package}; install ortlaunch again")


def group_options(group: str) -> list[str]:
    """Names that ``group=NAME`` takes, from the files of that config group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def slurm_template() -> Path:
    """The template of the script that SLURM runs.

    Raises:
        FileNotFoundError: the installation does not carry it.
    """
    return _slurm_dir() / "job.sh"


def slurm_profiles() -> dict[str, Path]:
    """Files of cluster profiles by name: a user's own before the machine's, and those before ours.

    They are looked for in the folders that ``ORTLAUNCH_SLURM_PROFILES`` names (separated by colons), in
    ``~/.config/ortlaunch/slurm/profiles`` and in ``/etc/ortlaunch/slurm/profiles``.
    """
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    named = [Path(folder) for folder in os.environ.get("ORTLAUNCH_SLURM_PROFILES", "").split(":") if folder]
    own = [folder / "ortlaunch" / "slurm" / "profiles" for folder in (home, Path("/etc"))]
    found: dict[str, Path] = {}
    for folder in (*named, *own, _slurm_dir() / "profiles"):
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def _slurm_dir() -> Path:
    package = Path(ortlaunch.__file__).resolve().parent
    for candidate in (package / "slurm", package.parent / "slurm"):
        if (candidate / "job.sh").is_file():
            return candidate
    raise FileNotFoundError(f"ortlaunch's slurm/job.sh is missing beside {package}; install ortlaunch again")
