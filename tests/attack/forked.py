"""Makes a request in a forked copy of this process, which has imported the program already."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.attack.world import World

STARTED = 99
"""The exit code of a request that was taken, and would have started a program."""
_SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    """What a request came to."""

    code: int
    """The exit code; negative for a signal."""
    out: str
    err: str
    seconds: float
    is_late: bool = False
    """Whether it was ended, because it gave no answer in time."""


def forked(words: list[str], world: World, seconds: float = _SECONDS) -> Answer:
    """Makes a request as ``ortlaunch WORDS...`` in the world's working folder."""
    out, err = (world.path.parent / f"{world.path.name}-{name}" for name in ("out", "err"))
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _request(words, world, out, err)
    handle = os.pidfd_open(child)
    try:
        is_late = not select.select([handle], [], [], seconds)[0]
        if is_late:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(handle)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # What it may have left running.
    texts = (path.read_text(errors="replace") for path in (out, err))
    return Answer(os.waitstatus_to_exitcode(status), *texts, time.monotonic() - began, is_late)


def separate(words: list[str], world: World) -> Answer:
    """Makes a request in a process of its own, as a user does."""
    began = time.monotonic()
    command = [sys.executable, "-m", "ortlaunch", *words]
    variables = world.environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, cwd=world.work, env=variables, capture_output=True, text=True, errors="replace", timeout=_SECONDS
    )
    return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def _request(words: list[str], world: World, out: Path, err: Path) -> NoReturn:
    """What the copy does, to its end."""
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(_SECONDS), int(_SECONDS)))
        for descriptor, path in ((0, Path(os.devnull)), (1, out), (2, err)):
            flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(path, flags, 0o600), descriptor)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(world.environment)
        os.chdir(world.work)
        sys.argv = ["ortlaunch", *words]
        _start_nothing()
        code = _called()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _called() -> int:
    from ortlaunch.cli import main

    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _start_nothing() -> None:
    """A request that is taken by mistake trains nothing: it ends where it would start its workers."""
    original = subprocess.Popen.__init__

    def started(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        if not isinstance(args, str) and str(args[0]) == sys.executable:
            sys.stdout.flush()
            os.write(2, b"the request was taken\n")
            os._exit(STARTED)
        original(self, args, *rest, **options)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]
