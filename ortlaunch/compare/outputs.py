"""Files that a comparison leaves: none of the user's is written over unasked."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace


def check_free(option: str, path: Path, *, force: bool) -> None:
    """Looks before the work is done whether a file can be written.

    Raises:
        RequestError: it is there already and `force` does not allow to replace it, or its folder is not.
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
    """Writes a file in one step.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        replace(path, content)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from None
