"""Standard output and standard error: what happens when they cannot be written, and where a worker's output goes.

The reader of a pipe may be gone (``ortlaunch … | head``), the terminal closed, the disk full. A command that trains
gives such an output up and goes on; a command that only shows something ends, as Unix tools do.

All output of a worker goes to the rank's log file; what rank 0 prints also goes to the terminal. Only what Python code
prints to standard output reaches the terminal. Warnings, log records and the banners of libraries go to standard error
or directly to the file descriptors. These reach only the log file.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ortlaunch.base.exit_codes import BROKEN_PIPE, DONE, FAILED
from ortlaunch.base.files import PRIVATE
from ortlaunch.base.secrets import CARRIER

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Guarded(io.TextIOBase):
    """A stream whose failures are handed to a function instead of the code that prints."""

    def __init__(self, stream: IO[Any], failed: Callable[[IO[Any], OSError], None]) -> None:
        """
        Args:
            stream: the stream.
            failed: is called with the stream and the error when it cannot be written.
        """
        self._stream: Any = stream
        self._failed = failed

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(self._stream, error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(self._stream, error)

    def close(self) -> None:
        """Leaves the stream open: it is the process's own."""

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded(*, goes_on: bool) -> Iterator[None]:
    """Guards standard output and standard error within the context.

    Args:
        goes_on: an output that cannot be written is given up without a word. Otherwise the command ends: as if by
            SIGPIPE when the reader of a pipe is gone, and with one line and exit code 1 in every other case.

    Raises:
        SystemExit: the command ends because its output cannot be written.
    """
    _open_standard_streams()
    before = sys.stdout, sys.stderr
    out = _Guarded(sys.stdout, _give_up if goes_on else _end)
    sys.stdout, sys.stderr = out, _Guarded(sys.stderr, _give_up)  # type: ignore[assignment]
    try:
        yield
        # What is still in the buffer would otherwise fail when the interpreter exits.
        out.flush()
    except SystemExit as end:
        if end.code in (None, DONE):
            out.flush()
        raise
    finally:
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _open_standard_streams() -> None:
    """Opens the null device in place of standard streams that are closed.

    Otherwise the next file that is opened, such as a journal, would get the number of a standard stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one, because those before it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _give_up(stream: IO[Any], _error: OSError) -> None:
    """Sends what is printed from now on nowhere, also what child processes print."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _end(stream: IO[Any], error: OSError) -> None:
    """Ends the command because its output cannot be written."""
    _give_up(stream, error)
    if error.errno == errno.EPIPE:
        raise SystemExit(BROKEN_PIPE)
    print(f"ortlaunch: the output cannot be written: {error.strerror or error}", file=sys.stderr)
    raise SystemExit(FAILED)


def _pass_over(_stream: IO[Any], _error: OSError) -> None:
    """Leaves the text in the stream's buffer. It is written later if there is room again."""


class _Tee(io.BufferedIOBase):
    """The bytes of a text stream, which go to the log and to the terminal. Every other call goes to the log."""

    name = "<stdout>"

    def __init__(self, log: IO[bytes], terminal: IO[bytes]) -> None:
        self._log = log
        self._terminal = terminal

    def write(self, data: ReadableBuffer) -> int:
        self._terminal.write(data)
        return self._log.write(data)

    def flush(self) -> None:
        self._log.flush()
        self._terminal.flush()

    def fileno(self) -> int:
        # ORTModule redirects by file descriptor while it exports.
        return self._log.fileno()

    def writable(self) -> bool:
        return True


def _mode() -> int:
    """The mode of a new log. A program that was given a secret may print it."""
    return PRIVATE if os.environ.get(CARRIER) else 0o644


def redirect(log_file: Path, *, to_terminal: bool) -> None:
    """Appends this process's standard output and standard error to `log_file`.

    Args:
        log_file: the rank's log.
        to_terminal: also write what Python prints to standard output to the terminal.
    """
    terminal = os.dup(1)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _mode())
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # A training does not end because its log or its terminal cannot be written.
    sys.stderr = _Guarded(sys.stderr, _pass_over)  # type: ignore[assignment]
    if to_terminal:
        log: Any = _Guarded(sys.stdout.buffer, _pass_over)
        there: Any = _Guarded(os.fdopen(terminal, "wb"), _give_up)
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
        sys.stdout = io.TextIOWrapper(_Tee(log, there), encoding, errors, line_buffering=True)
        sys.stdout.mode = "w"  # type: ignore[misc]
    else:
        os.close(terminal)
        sys.stdout = _Guarded(sys.stdout, _pass_over)  # type: ignore[assignment]


def quiet_library_logs() -> None:
    """Moves the log handlers that libraries attached to standard output to standard error."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    for logger in loggers:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)


def append_to(path: Path) -> None:
    """Appends this process's standard output and standard error to a file, after the output of earlier attempts.

    The process goes on when the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _mode())
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = _Guarded(sys.stdout, _pass_over)  # type: ignore[assignment]
    sys.stderr = _Guarded(sys.stderr, _pass_over)  # type: ignore[assignment]
