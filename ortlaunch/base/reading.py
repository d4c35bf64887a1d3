"""Reads files of folders that other people or programs may have written, such as run folders.

A reader must neither wait nor fill the memory, whatever is in the place of a file. Only plain files are opened: a FIFO
would make ``open`` wait for a writer, and a device may never end. A file of text or JSON has a largest size. All
damage is an `OSError` or a `ValueError`, and `noticing` collects what was damaged.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

LARGEST = 64 << 20
"""The largest file that is read whole, in bytes."""


@dataclass(frozen=True)
class Damage:
    """A file that could not be read, and why."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path} cannot be read: {self.why}"


_noticed: ContextVar[list[Damage] | None] = ContextVar("noticed", default=None)


@contextlib.contextmanager
def noticing() -> Iterator[list[Damage]]:
    """Yields a list that gets the damage which readers notice inside the block, each file once."""
    found: list[Damage] = []
    token = _noticed.set(found)
    try:
        yield found
    finally:
        _noticed.reset(token)


def notice(path: Path | str, why: object) -> None:
    """Adds a damaged file to the list of the innermost `noticing`, if there is one."""
    found = _noticed.get()
    if found is not None and all(one.path != Path(path) for one in found):
        found.append(Damage(Path(path), in_words(why)))


def in_words(error: object) -> str:
    """Why a file cannot be read, in one line without its path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def open_plain(path: Path | str, *, follow: bool = True) -> BinaryIO:
    """Opens a plain file for reading. It never waits.

    Args:
        path: the file.
        follow: whether it may be a link.

    Raises:
        OSError: there is no such file, it cannot be read, or it is no plain file.
    """
    # With O_NONBLOCK, opening a FIFO without a writer returns at once. On a plain file it has no effect.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {_kind(mode)} and no plain file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path | str, largest: int = LARGEST, *, follow: bool = True) -> bytes:
    """Reads a plain file whole.

    Args:
        path: the file.
        largest: the largest size in bytes.
        follow: whether it may be a link.

    Raises:
        OSError: as `open_plain`, or the file is larger.
    """
    with open_plain(path, follow=follow) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest:,} bytes", str(path))
    return content


def read_text(path: Path | str, largest: int = LARGEST, *, follow: bool = True) -> str:
    """Reads a plain file whole as UTF-8, like `read_bytes`. What is no UTF-8 is replaced.

    Raises:
        OSError: as `read_bytes`.
    """
    return read_bytes(path, largest, follow=follow).decode("utf-8", "replace")


def read_tail(path: Path | str, largest: int) -> str:
    """Reads at most the last `largest` bytes of a plain file as UTF-8. What is no UTF-8 is replaced.

    Raises:
        OSError: as `open_plain`.
    """
    with open_plain(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - largest))
        return file.read(largest).decode("utf-8", "replace")


def is_inside(name: str) -> bool:
    """Whether a relative path, as it is written, stays inside the folder that it is joined to."""
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts and "\0" not in name


def parse_json(content: bytes | str) -> Any:
    """Parses JSON.

    Raises:
        ValueError: it is no JSON, or it is nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError(in_words(error)) from None


def load_json(path: Path | str) -> Any:
    """Reads a file of JSON.

    Raises:
        OSError: as `read_bytes`.
        ValueError: as `parse_json`.
    """
    return parse_json(read_bytes(path))


def read_json(path: Path | str) -> dict[str, Any] | None:
    """The JSON object in a file; None where the file is missing or holds no JSON object, which is noticed."""
    try:
        content = load_json(path)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return None
    except (OSError, ValueError) as error:
        notice(path, error)
        return None
    if not isinstance(content, dict):
        notice(path, "it holds no JSON object")
        return None
    return content


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
