"""Tells the user's own code from the libraries' and this package's in tracebacks."""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import importlib.metadata
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path

_FATAL = "Fatal Python error: "
_NAMES = {
    signal.SIGSEGV: "Segmentation fault",
    signal.SIGABRT: "Aborted",
    signal.SIGFPE: "Floating-point exception",
    signal.SIGBUS: "Bus error",
    signal.SIGILL: "Illegal instruction",
}
"""What `faulthandler` calls the signals that it reports."""
_DOING = {"run_forward": "ONNX Runtime", "run_backward": "ONNX Runtime", "_export_model": "the export to ONNX"}
"""What a process does while one of these functions of onnxruntime-training runs."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')


def report_deaths() -> None:
    """Has a signal that ends native code leave the Python stack on standard error, where `last_frames` reads it."""
    # A descriptor of its own, because libraries redirect standard error for a while.
    faulthandler.enable(os.dup(2))


@functools.cache
def is_users(file: str) -> bool:
    """Whether a source file is the user's own."""
    if file.startswith(_others()) or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return False
    return Path(file).is_file() and not is_put_there_by_pip(Path(file))


def imported() -> dict[str, Path]:
    """The files of the imported modules that are the user's own, by module; a script by its file's name."""
    named = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    own = {name: Path(file) for name, file in named.items() if isinstance(file, str) and is_users(file)}
    return {path.name if name == "__main__" else name: path for name, path in own.items()}


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """A digest of each file; of one that is gone an empty text."""
    found = {}
    for name, path in sorted(files.items()):
        try:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            found[name] = ""
    return found


def digest(files: Mapping[str, str]) -> str:
    """One digest of several; the order of the files does not count."""
    return hashlib.sha256(repr(sorted(files.values())).encode()).hexdigest()[:16]


@functools.cache
def _others() -> tuple[str, ...]:
    """Returns what the files of the standard library and of this package begin with."""
    return tuple(f"{folder}{os.sep}" for folder in (sysconfig.get_path("stdlib"), Path(__file__).parents[1]))


def is_put_there_by_pip(path: Path) -> bool:
    """Whether ``pip install --target`` has put a file into a folder of the search path."""
    folders = [entry for entry in sys.path if entry and path.is_relative_to(entry)]
    return any(not _put_by_pip(folder).isdisjoint(path.relative_to(folder).parts[:1]) for folder in folders)


@functools.cache
def _put_by_pip(folder: str) -> frozenset[str]:
    """Returns the names of what pip has put into a folder, which may hold the user's code too."""
    installed = [importlib.metadata.Distribution.at(path) for path in Path(folder).glob("*.dist-info")]
    return frozenset(file.parts[0] for one in installed for file in one.files or ())


def last_frames(log: str, number: int) -> tuple[list[tuple[str, int, str]], str]:
    """Returns what ran when a signal ended a process, by `faulthandler`'s report in its log.

    Args:
        log: what the process has written.
        number: the signal.

    Returns:
        File, line and function of each call, the innermost first, empty where there is no report; and the log before
        the report.
    """
    before, begin, report = log.rpartition(f"{_FATAL}{_NAMES.get(number, 'none')}\n")  # type: ignore[call-overload]
    if not begin:
        return [], log
    # Threads that have waited meanwhile may come first.
    current = report.partition("Current thread ")[2] or report
    thread = current.partition("(most recent call first):\n")[2].partition("\n\n")[0]
    found = map(_FRAME.match, thread.splitlines())
    return [(frame["file"], int(frame["line"]), frame["name"]) for frame in found if frame], before


def where_it_ended(frames: list[tuple[str, int, str]]) -> str:
    """Says where a signal has met a process, as the continuation of "ended by SIGSEGV"; empty where nothing is known.

    Args:
        frames: as from `last_frames`.
    """
    doing = next((_DOING[name] for file, _, name in frames if name in _DOING and "onnxruntime" in file), "")
    place = users_place(frames)
    where = (f" in {doing}" if doing else "") + (f" at {place}" if place else "")
    return f"{where}: use backend=eager or backend=compile, or change that part of the model" if doing else where


def place_of(error: BaseException) -> str:
    """Returns the innermost line of the user's own code that an error came through, as `users_place`."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return users_place([(frame.filename, frame.lineno or 0, frame.name) for frame in frames])


def users_place(frames: list[tuple[str, int, str]]) -> str:
    """Returns the innermost line of the user's own code as ``file:line``; empty where there is none."""
    return next((f"{file}:{line}" for file, line, _ in frames if is_users(file)), "")
