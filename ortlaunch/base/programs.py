"""How child processes find programs: this environment's, and modules of this package."""

from __future__ import annotations

import os
import sys
import sysconfig


def add_to_path() -> None:
    """Appends this environment's folder of programs to PATH, for this process and its children.

    torch and DeepSpeed compile with ninja. Its package installs it beside this environment's Python. That folder is in
    PATH only where the environment was activated.
    """
    own = sysconfig.get_path("scripts")
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if own not in folders:
        os.environ["PATH"] = os.pathsep.join([*folders, own])


def module_command(module: str) -> list[str]:
    """Returns the command that runs a module with this Python.

    With -P, files of the working folder hide no library: ``python -m`` alone would search that folder first.
    """
    return [sys.executable, "-P", "-m", module]
