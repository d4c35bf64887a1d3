"""Says in one line what is wrong with a YAML file."""

from __future__ import annotations

import yaml

FAULTS = (OSError, ValueError, yaml.YAMLError, RecursionError)
"""What reading a YAML file may raise: no permission, bytes that are no text, wrong syntax, a depth without end."""


def fault_of(error: BaseException) -> str:
    """The reason in one line, with the line of the file if the parser knows it."""
    if isinstance(error, yaml.MarkedYAMLError):
        parts = [part for part in (error.problem, error.context) if part]
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        return f"{where}{_line(', '.join(parts)) or 'no YAML'}"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 text at byte {error.start}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"no text at character {error.position}: {_line(error.reason)}"
    if isinstance(error, OSError):
        return error.strerror or _line(str(error)) or type(error).__name__
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return _line(str(error)) or type(error).__name__


def _line(text: str) -> str:
    return " ".join(text.split())
