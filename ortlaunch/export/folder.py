"""The folder that an export leaves: complete under its name, or not there."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ortlaunch.base.errors import RequestError
from ortlaunch.export.record import RECORD


def check_free(out: Path, *, force: bool) -> None:
    """Refuses a folder that holds something.

    Raises:
        RequestError: it does, and `force` is not given or the folder is none that an export has left.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        raise RequestError(f"out={out} exists: choose another folder, or --force to replace it")
    if not (out / RECORD).is_file():
        raise RequestError(f"out={out} is no folder that an export has left (it has no {RECORD}): --force leaves it")


@contextlib.contextmanager
def written(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end; whatever stops it, nothing half written stays.

    Raises:
        RequestError: as `check_free`; or the folder cannot be made.
    """
    check_free(out, force=force)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise RequestError(f"out={out} cannot be written: {error.strerror or error}") from error
    try:
        with _stopped_by_exceptions():
            yield partial
        _replace(out, partial)
    except OSError as error:
        raise RequestError(f"out={out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(out: Path, partial: Path) -> None:
    old = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _stopped_by_exceptions() -> Iterator[None]:
    """Within it, SIGTERM unwinds the stack as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
