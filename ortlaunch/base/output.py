"""Redirects a worker's output. All of it goes to the rank's log file; what rank 0 prints also goes to the terminal.

Only what Python code prints to standard output reaches the terminal. Warnings, log records and the banners of
libraries go to standard error or directly to the file descriptors. These reach only the log file.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from ortlaunch.base.files import PRIVATE
from ortlaunch.base.secrets import CARRIER


class _Tee(io.TextIOBase):
    """A stream that writes to the log and to the terminal. Every other call goes to the log."""

    def __init__(self, log: TextIO, terminal: TextIO) -> None:
        self._log = log
        self._terminal = terminal

    def write(self, text: str) -> int:
        self._log.write(text)
        self._terminal.write(text)
        return len(text)

    def flush(self) -> None:
        self._log.flush()
        self._terminal.flush()

    def fileno(self) -> int:
        # ORTModule redirects by file descriptor while it exports.
        return self._log.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._log.encoding


def redirect(log_file: Path, *, to_terminal: bool) -> None:
    """Appends this process's standard output and standard error to `log_file`.

    Args:
        log_file: the rank's log.
        to_terminal: also write what Python prints to standard output to the terminal.
    """
    terminal = os.dup(1)
    # A program that was given a secret may print it.
    mode = PRIVATE if os.environ.get(CARRIER) else 0o644
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if to_terminal:
        sys.stdout = _Tee(sys.stdout, os.fdopen(terminal, "w", buffering=1))
    else:
        os.close(terminal)


def quiet_library_logs() -> None:
    """Moves the log handlers that libraries attached to standard output to standard error."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    for logger in loggers:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)


def append_to(path: Path) -> None:
    """Appends this process's standard output and standard error to a file, after the output of earlier attempts."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
