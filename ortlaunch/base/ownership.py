"""Decides whether only the user can have written a folder, so that what it holds can be believed.

Run roots are often shared. A run folder decides which model is built, which server gets the record and which processes
are signalled, and its configuration names Python code. So a folder that another user may have written is refused
where it would be acted on, unless the user trusts it by ``ORTLAUNCH_TRUST``. Commands that only show a run read it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.user import name_of

TRUST = "ORTLAUNCH_TRUST"
"""Names the folders that are believed although others may write them, with ``:`` between them."""
_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ACCESS_LIST = "system.posix_acl_access"


def require_own(*paths: Path, use: str) -> None:
    """Refuses files and folders that another user owns or may write. What does not exist is left to the caller.

    Args:
        *paths: the files and folders.
        use: what would be done with them, for the message, such as ``resume``.

    Raises:
        RequestError: the message names the path, who may write it, and what to do.
    """
    for path in paths:
        why = why_foreign(path)
        if why is not None:
            raise RequestError(f"{use}: {path} {why}. {_remedy(path)}")


def why_foreign(path: Path) -> str | None:
    """Why others may have written a file or folder, as the rest of a sentence; None if only this user or root may.

    A link counts as what it points to. What does not exist is not foreign, and neither is what `TRUST` names.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    user = os.geteuid()
    if found.st_uid not in (user, _ROOT):
        why = f"belongs to the user {name_of(found.st_uid)}"
    elif found.st_mode & stat.S_IWOTH:
        why = "can be written by every user"
    elif found.st_mode & stat.S_IWGRP and (_has_access_list(path) or not _is_private(found.st_gid, found.st_uid)):
        why = f"can be written by the group {_group(found.st_gid)}"
    else:
        return None
    return None if _is_trusted(path) else why


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Lets no group and no other user write what is created inside the block, whatever the user's umask is."""
    before = os.umask(_OTHERS_WRITE)
    os.umask(before | _OTHERS_WRITE)  # The umask can only be read by setting it.
    try:
        yield
    finally:
        os.umask(before)


def _is_trusted(path: Path) -> bool:
    names = [name for name in os.environ.get(TRUST, "").split(os.pathsep) if name]
    folders = [Path(name).expanduser().resolve() for name in names]
    return any(path.resolve().is_relative_to(folder) for folder in folders)


def _remedy(path: Path) -> str:
    trust = f"to trust it: {TRUST}=FOLDER with it or a folder above it (docs: security)"
    if path.stat().st_uid == os.geteuid():
        return f"Take the right from others: chmod go-w {path}; or, {trust}"
    return f"What it holds could run code as you; {trust}"


def _is_private(group: int, owner: int) -> bool:
    """Whether a group is the owner's own, as many systems give each user one: it has that name and no other member."""
    import grp
    import pwd

    try:
        name = pwd.getpwuid(owner).pw_name
        found = grp.getgrgid(group)
    except KeyError:
        return group == owner
    return found.gr_name == name and set(found.gr_mem) <= {name}


def _has_access_list(path: Path) -> bool:
    """Whether an access list names further users. The mode's rights of the group are then the most that they have."""
    try:
        return bool(os.getxattr(path, _ACCESS_LIST))
    except OSError:
        return False


def _group(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
