"""Who uses this machine, and where their cache lies."""

from __future__ import annotations

import getpass
import os
from pathlib import Path


def user_name() -> str:
    """The user's login; the number of one that has none, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def user_cache() -> Path:
    """The user's folder for what can be made again.

    ``$ORTLAUNCH_CACHE``, else ``$XDG_CACHE_HOME/ortlaunch``, else ``~/.cache/ortlaunch``.
    """
    named = os.environ.get("ORTLAUNCH_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ortlaunch"
