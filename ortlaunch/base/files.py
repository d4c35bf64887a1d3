"""Small files that others may read at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Writes a file in one step: whoever reads it sees the old one or the new one, whole.

    Raises:
        OSError: it cannot be written; the old one is there as it was, and nothing else.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """The same for text."""
    replace(path, text.encode())
