"""Writes the files of a comparison; existing files are replaced only with `--force`."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace


def check_free(option: str, path: Path, *, force: bool) -> None:
    """Checks before the work is done that a file can be written.

    Raises:
        RequestError: the file exists and `force` is not given, or its folder does not exist.
    """
    if path.is_dir():
        raise RequestError(f"{option} {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise RequestError(f"{option} {path}: there is no folder {path.parent}")
    if not force and (path.exists() or path.is_symlink()):
        raise RequestError(
            f"{option} {path} is there already: name another file, or allow it to be replaced by --force"
        )


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically.

    Raises:
        RequestError: the file cannot be written.
    """
    try:
        replace(path, content)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from None
