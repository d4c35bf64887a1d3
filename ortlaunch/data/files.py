"""Finds and reads the files that a path, folder or glob names."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from ortlaunch.base.errors import RequestError

UNSET = ("", "???")
TOKENS_SUFFIX = ".bin"
"""The ending of the files of tokens that are taken from a folder."""
TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")


def find_files(value: str, key: str = "data.path", suffix: str = "") -> list[Path]:
    """Lists regular files. They are sorted within each part of `value`, and no file comes twice.

    Args:
        value: a file, a folder (read recursively, without hidden files and folders) or a glob; commas separate several
            of them. If a file or folder has the whole text as its name, it is that file or folder.
        key: the configuration key, for messages.
        suffix: the ending of the files to take from a folder.

    Raises:
        RequestError: `value` is empty, or a part of it matches no file.
    """
    found = [file for part in _parts(value, key) for file in _expand(part, key, suffix)]
    return list(dict.fromkeys(found))


def check_paths(value: str, key: str = "data.path", suffix: str = "") -> None:
    """Checks that every part of a list of files, folders and globs exists, and that its folders hold a file.

    Args:
        value: as `find_files` takes it.
        key: the configuration key, for messages.
        suffix: as `find_files` takes it.

    Raises:
        RequestError: `value` is empty, no file or folder has the name of a part of it or matches it, or a part is a
            folder without such a file, or a device.
    """
    for part in _parts(value, key):
        if _exists(part):
            next(_regular_files(_path(part), f"{key}={part}", suffix))
        elif not glob.glob(str(_path(part)), recursive=True):
            raise RequestError(f"{key}={part}: no such file or folder, and no file matches it as a pattern")


def check_token_type(name: str) -> None:
    """Raises RequestError if a name of NumPy is not that of a type of tokens."""
    if name not in TOKEN_TYPES:
        raise RequestError(f"data.dtype={name}: unknown; choose one of {', '.join(TOKEN_TYPES)}")


def check_tokenizer(value: str | None) -> None:
    """Checks that the file or folder of a tokenizer exists.

    Raises:
        RequestError: it does not exist.
    """
    if value and not Path(value).expanduser().exists():
        raise RequestError(f"data.tokenizer={value}: no such file or folder")


def read_bytes(path: Path) -> bytes:
    """Reads a whole file.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from error


def _parts(value: str, key: str) -> list[str]:
    """The files, folders and globs that a value names."""
    words = [part.strip() for part in value.split(",") if part.strip()]
    if value.strip() in UNSET or not words:
        raise RequestError(f"{key} is not set: give a file, a folder or a glob")
    return [value] if _exists(value) else words


def _expand(part: str, key: str, suffix: str) -> list[Path]:
    path = _path(part)
    if _exists(part):
        return sorted(_regular_files(path, f"{key}={part}", suffix))
    if glob.has_magic(part):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        # `**` matches folders and the files in them. Folders are walked only if the glob matches no file.
        files = [match for match in matches if match.is_file()]
        files = files or [file for match in matches for file in sorted(_walk(match, suffix)) if file.is_file()]
    else:
        where = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        raise RequestError(f"{key}={part}: no such file or folder{where}")
    if not files:
        raise RequestError(f"{key}={part}: matches no {suffix + ' ' if suffix else ''}file")
    return files


def _regular_files(path: Path, given: str, suffix: str) -> Iterator[Path]:
    """Yields a file, or the files in a folder, each as soon as it is found. There is at least one.

    Args:
        path: exists.
        given: the key with its value, for messages.
        suffix: the ending of the files to take from a folder.

    Raises:
        RequestError: the folder holds no such file, or the path is a device.
    """
    if path.is_file():
        yield path
    elif path.is_dir():
        is_empty = True
        for file in _walk(path, suffix):
            if file.is_file():
                is_empty = False
                yield file
        if is_empty:
            kind = f"file that ends in {suffix}" if suffix else "file"
            raise RequestError(f"{given}: the folder holds no {kind} (names that begin with a dot are left out)")
    else:
        raise RequestError(f"{given}: is neither a regular file nor a folder")


def _walk(folder: Path, suffix: str) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root, name) for name in names if name.endswith(suffix) and not name.startswith("."))


def _exists(part: str) -> bool:
    try:
        return _path(part).exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False  # A list of files may be longer than a name can be.


def _path(part: str) -> Path:
    return Path(part).expanduser()
