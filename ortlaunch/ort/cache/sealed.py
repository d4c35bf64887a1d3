"""Content with a digest before it, so that a file that is damaged or cut off is noticed."""

from __future__ import annotations

import hashlib

_DIGEST = hashlib.sha256().digest_size


def seal(content: bytes) -> bytes:
    """Returns the bytes of a file with this content."""
    return hashlib.sha256(content).digest() + content


def opened(file: bytes) -> bytes:
    """Returns the content of a sealed file.

    Raises:
        ValueError: the file is damaged.
    """
    content = file[_DIGEST:]
    if hashlib.sha256(content).digest() != file[:_DIGEST]:
        raise ValueError("the file is damaged")
    return content
