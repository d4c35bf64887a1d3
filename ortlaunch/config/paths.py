"""Finds the files that come with the package. They are beside it in a checkout and inside it in an installed wheel."""

from __future__ import annotations

import os
from pathlib import Path

import ortlaunch
from ortlaunch.base.yaml_files import fault_of


def conf_dir() -> Path:
    """The folder with ``config.yaml`` and the config groups.

    Raises:
        FileNotFoundError: the installation has no configuration tree.
    """
    return _shipped("conf", "config.yaml")


def group_options(group: str) -> list[str]:
    """The names that ``group=NAME`` takes, from the files of that config group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def slurm_template() -> Path:
    """The template of the script that SLURM runs.

    Raises:
        FileNotFoundError: the installation does not have it.
    """
    return _slurm_dir() / "job.sh"


def slurm_profiles() -> dict[str, Path]:
    """The files of cluster profiles by name. A user's file hides the machine's of the same name, and both hide ours.

    The function searches the folders in ``ORTLAUNCH_SLURM_PROFILES`` (separated by colons), then
    ``~/.config/ortlaunch/slurm/profiles``, then ``/etc/ortlaunch/slurm/profiles``.
    """
    return _by_name("ORTLAUNCH_SLURM_PROFILES", "slurm/profiles", _slurm_dir() / "profiles")


def ready_jobs() -> dict[str, Path]:
    """The files of ready jobs by name. A user's file hides the machine's of the same name, and both hide ours.

    The function searches the folders in ``ORTLAUNCH_JOBS`` (separated by colons), then ``~/.config/ortlaunch/jobs``,
    then ``/etc/ortlaunch/jobs``.
    """
    return _by_name("ORTLAUNCH_JOBS", "jobs", _shipped("jobs", "gpt2_ort.yaml"))


def headline(path: Path) -> str:
    """The description of a configuration file: its first line, if that is a comment; or why it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline().strip()
    except (OSError, ValueError) as error:
        return f"({path} cannot be read: {fault_of(error)})"
    return first.lstrip("# ") if first.startswith("#") else ""


def jobs_text() -> str:
    """A text with one line for each ready job that ``+jobs=NAME`` takes."""
    jobs = ready_jobs()
    width = max(len(name) for name in jobs)
    return "\n".join(f"{name:<{width}}  {headline(path)}" for name, path in sorted(jobs.items()))


def _by_name(variable: str, below: str, ours: Path) -> dict[str, Path]:
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    named = [Path(folder) for folder in os.environ.get(variable, "").split(":") if folder]
    own = [folder / "ortlaunch" / below for folder in (home, Path("/etc"))]
    found: dict[str, Path] = {}
    for folder in (*named, *own, ours):
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def _slurm_dir() -> Path:
    return _shipped("slurm", "job.sh")


def _shipped(folder: str, marker: str) -> Path:
    package = Path(ortlaunch.__file__).resolve().parent
    for candidate in (package / folder, package.parent / folder):
        if (candidate / marker).is_file():
            return candidate
    raise FileNotFoundError(f"ortlaunch's {folder}/{marker} is missing beside {package}; install ortlaunch again")
