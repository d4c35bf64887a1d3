"""Small files that other processes may read at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Replaces a file atomically: a reader sees either the whole old file or the whole new one.

    Raises:
        OSError: the file cannot be written. The old file is unchanged, and no partial file remains.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically with this text."""
    replace(path, text.encode())
