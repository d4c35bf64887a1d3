"""Small files that other processes may read at any moment."""

from __future__ import annotations

import os
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o644
"""No group may write these files, whatever the umask is: programs believe them."""


def replace(path: Path, content: bytes) -> None:
    """Replaces a file atomically: a reader sees either the whole old file or the whole new one.

    Raises:
        OSError: the file cannot be written. The old file is unchanged, and no partial file remains.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # The name can be guessed. A link that somebody has made under it is removed and never written through.
        partial.unlink(missing_ok=True)
        with open(os.open(partial, _NEW, _MODE), "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically with this text."""
    replace(path, text.encode())
