"""The user's name and the user's cache folder."""

from __future__ import annotations

import getpass
import os
from pathlib import Path


def user_name() -> str:
    """The user's login name, or the user id where there is no name, for example in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def user_cache() -> Path:
    """The user's cache folder, which holds only what can be made again.

    It is ``$ORTLAUNCH_CACHE``, else ``$XDG_CACHE_HOME/ortlaunch``, else ``~/.cache/ortlaunch``.
    """
    named = os.environ.get("ORTLAUNCH_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ortlaunch"
