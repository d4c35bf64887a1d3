"""The user's name and the user's cache folder."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def user_name() -> str:
    """The user's login name, or the user id where there is no name, for example in a container."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


@cache
def name_of(user: int) -> str:
    """The name of a Unix user, or the number of one without a name."""
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def account_name() -> str:
    """The Unix user whom this process belongs to. `user_name` believes the environment, which may name another one."""
    return name_of(os.geteuid())


def user_cache() -> Path:
    """The user's cache folder, which holds only what can be made again.

    It is ``$ORTLAUNCH_CACHE``, else ``$XDG_CACHE_HOME/ortlaunch``, else ``~/.cache/ortlaunch``.
    """
    named = os.environ.get("ORTLAUNCH_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ortlaunch"
