"""The list of the Unix users for whom the service may act by sudo: the file ``unix_users`` beside its database."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.reading import read_text

_LARGEST = 1 << 20


def listed_users(path: Path) -> list[str]:
    """Returns the users of a list. It has one name on each line; empty lines and those that begin with # do not count.

    Whether the list can be believed is for the caller to check (`ortlaunch.base.ownership`).

    Args:
        path: the list.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    names = [line.strip() for line in read_text(path, _LARGEST).splitlines()]
    return [name for name in names if name and not name.startswith("#")]
