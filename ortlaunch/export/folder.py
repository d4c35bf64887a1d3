"""The output folder of an export: it is complete under its name, or does not exist."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import missing, remove_empty
from ortlaunch.export.record import RECORD


def check_free(out: Path, *, force: bool) -> None:
    """Refuses an output folder that is not empty.

    Raises:
        RequestError: it holds files, and `force` is not given or it was not written by an export.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        raise RequestError(f"out={out} exists: choose another folder, or --force to replace it")
    if not (out / RECORD).is_file():
        raise RequestError(f"out={out} was not written by an export (it has no {RECORD}): --force does not replace it")


def check_out(out: Path) -> None:
    """Refuses a folder for weights that holds something already, or that cannot be made.

    Raises:
        RequestError: it is refused.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} is not empty: give --out a new or empty folder")
    new = missing(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{out} cannot be made: {error.strerror}: give --out another folder") from error
    finally:
        remove_empty(new)


@contextlib.contextmanager
def written(out: Path, *, force: bool) -> Iterator[Path]:
    """Yields a folder to write into and renames it to `out` at the end; after an error nothing is left behind.

    Raises:
        RequestError: `check_free` refuses the folder, or it cannot be created.
    """
    check_free(out, force=force)
    partial = out.with_name(f".{out.name}.partial")
    new = missing(partial.parent)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        remove_empty(new)
        raise RequestError(f"out={out} cannot be written: {error.strerror or error}") from error
    try:
        with _stopped_by_exceptions():
            yield partial
        _replace(out, partial)
    except OSError as error:
        raise RequestError(f"out={out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        remove_empty(new)


def _replace(out: Path, partial: Path) -> None:
    old = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _stopped_by_exceptions() -> Iterator[None]:
    """Makes SIGTERM raise an exception, as Ctrl-C does, so that clean-up code runs."""
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
