"""The last resort of the command line: an unforeseen error becomes one line, its traceback a file."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from pathlib import Path

from ortlaunch.base.exit_codes import FAILED, REQUEST
from ortlaunch.base.secrets import without_secrets

_OF_A_PATH = {
    errno.EACCES: "this user may not use it; choose another place, or ask its owner",
    errno.EPERM: "this user may not use it; choose another place, or ask its owner",
    errno.EROFS: "choose a place that can be written",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a part of the path is a file: choose another",
    errno.EISDIR: "it is a folder: name a file",
    errno.ELOOP: "the links in it lead in a circle: choose another",
}
"""Errors of the system that show that a path cannot be used, and what to do."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_LONGEST_WORD, _LONGEST_TEXT = 300, 2000
_begun: Path | None = None


def keep_traceback_in(file: Path) -> None:
    """Notes that a run has begun: from now on an error fails the run, and its traceback belongs into the run folder.

    Args:
        file: the file for the traceback.
    """
    global _begun
    _begun = file


def explained(error: Exception) -> tuple[str, int]:
    """Returns the line that tells a user of an error, and the exit code.

    A path that cannot be used before a run has begun makes the request wrong. Everything else is a failure, for which
    the traceback is kept.
    """
    if _begun is None and isinstance(error, OSError) and error.errno in _OF_A_PATH and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}: {_OF_A_PATH[error.errno]}", REQUEST
    if isinstance(error, OSError) and error.errno in _FULL:
        import tempfile  # Only errors need it, and every start would load it.

        # Python names no file where a write fails.
        place = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        said = f"{place}{error.strerror}: make room for the run folder, ~/.cache/ortlaunch and {tempfile.gettempdir()}"
        return said, FAILED
    text = without_secrets(" ".join(str(error).split()))
    what = f"{type(error).__name__}{text and f': {text}'}"
    file = _kept("".join(traceback.format_exception(error)))
    where = f"the traceback is in {file}" if file is not None else f"no place for its traceback; {_place_of(error)}"
    return f"unexpected error: {what} ({where})", FAILED


def told(error: Exception, file: Path) -> int:
    """Prints the line that tells of an error in a job, keeps its traceback, and returns the exit code.

    Args:
        error: the error.
        file: the file for the traceback.
    """
    keep_traceback_in(file)
    message, code = explained(error)
    print(f"ortlaunch: {shortened(message)}", file=sys.stderr, flush=True)
    return code


def _kept(text: str) -> Path | None:
    """Writes a traceback to the run folder, else to the folder for temporary files; returns where, if anywhere."""
    text = without_secrets(text)
    if _begun is not None:
        try:
            with _begun.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return _begun
        except OSError:
            pass  # The folder may be why the command has failed: it is full, or was deleted.
    import tempfile

    try:
        descriptor, name = tempfile.mkstemp(prefix="ortlaunch-error-", suffix=".txt", text=True)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return None
    return Path(name)


def _place_of(error: Exception) -> str:
    """The line of code that has raised the error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"it was raised in {last.filename}, line {last.lineno}"


def shortened(message: str) -> str:
    """A message as a terminal can show it: control characters as escapes, and no words such as 10,000 digits."""
    message = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", message)
    message = re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: f"{word[0][:80]}…{word[0][-20:]}", message)
    return message if len(message) <= _LONGEST_TEXT else f"{message[:_LONGEST_TEXT]}…"
