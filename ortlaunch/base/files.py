"""Small files that other processes may read at any moment."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ortlaunch.base.secrets import is_hidden

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o644
"""No group may write these files, whatever the umask is: programs believe them."""

PRIVATE = 0o600
"""The mode of files for their owner alone."""


def replace(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replaces a file atomically: a reader sees either the whole old file or the whole new one.

    Args:
        path: the file.
        content: its content.
        mode: its mode; None for that of new files.

    Raises:
        OSError: the file cannot be written. The old file is unchanged, and no partial file remains.
    """
    # Threads of one process, and processes of two containers with the same id, may write the same file at once.
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        # A link that somebody has made under this name is removed and never written through.
        partial.unlink(missing_ok=True)
        with open(os.open(partial, _NEW, _MODE if mode is None else mode), "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str, errors: str = "strict") -> None:
    """Replaces a file atomically with this text, from which secrets were removed.

    Where some were, what is left of the text is for the owner alone: not every secret can be recognized.

    Args:
        path: the file; it is replaced.
        text: its content.
        errors: how characters are written that are no text; see `str.encode`.

    Raises:
        OSError: the file cannot be written. The old file is unchanged.
    """
    replace(path, text.encode(errors=errors), PRIVATE if is_hidden(text) else None)


def is_there(path: Path) -> bool:
    """Whether a path exists. One that no file system takes, because a name in it is too long, does not."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises for such a path.


def size_of(path: Path) -> int:
    """The bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def missing(path: Path) -> list[Path]:
    """Returns those of a folder and the folders above it that are not there, the innermost first."""
    return [one for one in (path, *path.parents) if not is_there(one)]


def nearest_folder(path: Path) -> Path:
    """Returns a folder, or the nearest one above it that is there."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes those of some folders that are empty, and leaves the others.

    Args:
        folders: the folders, the innermost first, such as `missing` has returned them before they were made.
    """
    for folder in folders:
        # A path may be one that no file system takes.
        with suppress(OSError):
            folder.rmdir()
