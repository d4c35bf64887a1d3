"""What a command does first: it checks its words and its working folder, and settles how text is read and printed."""

from __future__ import annotations

import codecs
import io
import os
import pwd
import re
import sys
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.user import user_cache

_HOME_OF = re.compile(r"(?:^|[=,:])(~[^/\s,=.]+)/")
"""A user's home folder at the beginning of a path: ``~ada/runs``, ``out=~ada/x``."""


def split_script(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Splits a command line at the first ``--``: what is before it, and the script and its arguments.

    Args:
        arguments: the words of a command line.

    Returns:
        Both parts; the second is None where there is no ``--``.
    """
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def use_utf8() -> None:
    """Starts this process again in Python's UTF-8 mode where the locale's file names are ASCII.

    Paths with other characters could not be written to any record there. Python switches the mode on by itself, unless
    a user has switched it off.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii":
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})


def print_anything() -> None:
    """Prints characters that the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def check_words(arguments: list[str]) -> None:
    """Checks that the words of a command line are text, and that the users whose home folders they name exist.

    Raises:
        RequestError: a word cannot be used.
    """
    for word in arguments:
        if not _is_text(word):
            raise RequestError(f"{word!a}: is no UTF-8 text, and could not be recorded")
        for home in _HOME_OF.findall(word):
            try:
                pwd.getpwnam(home.removeprefix("~"))
            except KeyError:
                raise RequestError(f"{word}: there is no user {home.removeprefix('~')} here") from None


def check_folder() -> None:
    """Checks that the working folder exists and that its name is text.

    Raises:
        RequestError: it does not.
    """
    try:
        folder = Path.cwd()
    except OSError as error:
        raise RequestError(
            f"the working folder cannot be used ({error.strerror}): it was deleted or moved; cd to another"
        ) from error
    if not _is_text(str(folder)):
        raise RequestError(f"{str(folder)!a}: the working folder's name is no UTF-8 text, and could not be recorded")


def check_home(arguments: list[str]) -> None:
    """Checks that there is a place for the user's cache. A container's user may have no home folder.

    Raises:
        RequestError: there is none.
    """
    if {"-h", "--help", "--version"} & set(arguments):
        return
    try:
        user_cache()
    except RuntimeError as error:
        raise RequestError(
            f"the user {os.geteuid()} has no home folder: set HOME, or ORTLAUNCH_CACHE to a folder for the cache"
        ) from error


def _is_text(text: str) -> bool:
    """Whether a text from the system holds no undecodable bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
