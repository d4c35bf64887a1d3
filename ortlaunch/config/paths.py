"""Where the configuration tree lies: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

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
