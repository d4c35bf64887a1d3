"""Programs that came with packages of this Python environment."""

from __future__ import annotations

import os
import sysconfig


def add_to_path() -> None:
    """Lets this process and its children find them, after the user's own.

    torch and DeepSpeed compile by calling ninja, whose package puts it beside this environment's Python: a folder that
    is in PATH only where the environment was activated.
    """
    own = sysconfig.get_path("scripts")
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if own not in folders:
        os.environ["PATH"] = os.pathsep.join([*folders, own])
