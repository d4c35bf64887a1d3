"""Makes files look as if another user had made them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")

OTHER_USER = 65534
"""The user nobody, which every Linux has."""
SHARED_GROUP = 65534
"""A group that is nobody's own here."""


def give_away(path: Path) -> None:
    """Makes another user the owner of a file, or of a folder with all that is in it."""
    for one in (path, *path.rglob("*")):
        os.chown(one, OTHER_USER, SHARED_GROUP, follow_symlinks=False)


def share(path: Path, mode: int) -> None:
    """Gives a group of several users the rights of a mode."""
    os.chown(path, -1, SHARED_GROUP)
    path.chmod(mode)
