"""Prints what came from a file, a server or a command line: without secrets, and unable to control the terminal."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any, TextIO

from ortlaunch.base.secrets import hidden, without_secrets

_ERROR_LENGTH = 300


def printable(text: str) -> str:
    """The text on one line, with unprintable characters replaced by '?'.

    These are control characters (escape sequences, line breaks), invisible ones that change a text's direction, and
    bytes that are no text. Names come from files and servers of others and must not control the terminal.
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def printable_lines(text: str) -> str:
    """The text with its line breaks and tabs, and otherwise as `printable`.

    Every line after the first is indented, so that no text can look like a line of its own.
    """
    first, *more = text.splitlines() or [""]
    lines = [first, *(line if line.startswith("  ") else f"  {line}" for line in more)]
    return "\n".join("\t".join(printable(part) for part in line.split("\t")) for line in lines)


def log_line(text: str) -> str:
    """A line of a log: with its tabs, after its last carriage return (as a terminal leaves a progress bar)."""
    shown = text.rstrip("\r").rpartition("\r")[2]
    return "\t".join(printable(part) for part in shown.split("\t"))


def say(text: str, *, file: TextIO | None = None) -> None:
    """Prints a message at once. It may have several lines; see `printable_lines`.

    Args:
        text: the message, with names and errors of any origin.
        file: the stream; standard output by default.
    """
    print(printable_lines(without_secrets(text)), file=file or sys.stdout, flush=True)


def counted(count: int, noun: str) -> str:
    """A number of things: ``1 trial``, ``2,000 trials``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Bytes in MiB or GiB: ``512 MiB``, ``1.50 GiB``."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def moment(seconds: float) -> str:
    """A time in seconds since the epoch as this machine's clock shows it: ``2026-11-25 20:40:00``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def json_text(document: Any, **options: Any) -> str:
    """A document as JSON with exact values, without secrets. Unprintable characters are escaped for the terminal."""
    text = json.dumps(hidden("", document), indent=2, ensure_ascii=False, **options)
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1] if not char.isascii() else f"\\u{ord(char):04x}"


def public_text(text: str) -> str:
    """A name or value for a table or a page: without secrets, and as `printable`."""
    return printable(without_secrets(text))


def library_error(error: BaseException) -> str:
    """What a library's exception says, on one line and without the SQL that a database's error repeats."""
    said = re.split(r"\s*(?:\[SQL:|\(Background on this error)", str(error))[0]
    text = " ".join(said.split())
    return text if len(text) <= _ERROR_LENGTH else f"{text[:_ERROR_LENGTH]} …"
