"""Programs that packages installed into this Python environment."""

from __future__ import annotations

import os
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
