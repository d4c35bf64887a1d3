"""The command line: calls a verb and turns its errors into exit codes. Each verb imports what it needs."""

from __future__ import annotations

import gc
import importlib
import os
import sys

from ortlaunch.base import exit_codes, last_resort, output, start
from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import whole_words
from ortlaunch.base.text import say

_ALLOCATIONS_PER_COLLECTION = 200_000
"""Allocations between two garbage collections. With Python's default of 700, a short command would make a hundred
collections over its imports and its configuration; with this number it makes none."""

VERBS = {
    "run": "ortlaunch.verbs.run:main",
    "check": "ortlaunch.check.command:main",
    "estimate": "ortlaunch.estimate.command:main",
    "tune": "ortlaunch.tune.command:main",
    "jobs": "ortlaunch.follow.jobs:jobs",
    "status": "ortlaunch.follow.status:status",
    "logs": "ortlaunch.follow.logs:logs",
    "cancel": "ortlaunch.follow.cancel:cancel",
    "resume": "ortlaunch.verbs.resume:resume",
    "export": "ortlaunch.export.command:main",
    "compare": "ortlaunch.compare.command:main",
    "bench": "ortlaunch.verbs.bench:main",
    "sync": "ortlaunch.follow.sync:sync_main",
    "models": "ortlaunch.verbs.help:models",
    "doctor": "ortlaunch.doctor.command:main",
    "serve": "ortlaunch.serve.command:main",
}
"""The function of each verb as MODULE:FUNCTION; it takes the words after the verb and returns the exit code."""


_MEANT = {
    "train": "run",
    "launch": "run",
    "start": "run",
    "submit": "run",
    "sweep": "run --multirun",
    "benchmark": "bench",
    "list": "jobs",
    "ls": "jobs",
    "ps": "jobs",
    "queue": "jobs",
    "show": "status",
    "info": "status",
    "stop": "cancel",
    "kill": "cancel",
    "continue": "resume",
    "restart": "resume",
    "ui": "serve",
    "env": "doctor",
}
"""Other tools' words for our verbs, for "Did you mean …?"."""

READERS = ("jobs", "status", "logs", "compare", "models")
"""The verbs that only show something. They end when nobody reads their output any more; all others go on."""


def main() -> None:
    """Runs the ``ortlaunch`` command and exits with its code."""
    start.use_utf8()
    start.print_anything()
    with output.guarded(goes_on=sys.argv[1:2] not in ([verb] for verb in READERS)):
        _main()


def _main() -> None:
    # The user sets this variable to see tracebacks. It is read first, because ortlaunch sets it too, for Hydra.
    debug = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)
    words = whole_words(sys.argv[1:], os.environ)
    try:
        start.check_words(words)
        start.check_folder()
        start.check_home(words)
        code = dispatch(words)
    except RequestError as error:
        if debug:
            raise
        say(f"ortlaunch: {last_resort.shortened(str(error))}", file=sys.stderr)
        code = exit_codes.REQUEST
    except KeyboardInterrupt:
        code = exit_codes.INTERRUPTED
    except Exception as error:
        if debug:
            raise
        message, code = last_resort.explained(error)
        say(f"ortlaunch: {last_resort.shortened(message)}", file=sys.stderr)
    # Without this, the interpreter would make another full collection when it exits.
    gc.freeze()
    sys.exit(code)


def dispatch(arguments: list[str]) -> int:
    """Runs the verb that the command line names; no verb means ``run``."""
    if arguments and arguments[0] in VERBS:
        return _call(VERBS[arguments[0]], arguments[1:])
    if arguments and arguments[0].partition("=")[0] == "--server":
        return _call("ortlaunch.serve.client.command:main", arguments)
    if arguments[:1] == ["help"]:
        return dispatch([*arguments[1:], "--help"])
    if arguments and not arguments[0].startswith(("-", "+", "~")) and "=" not in arguments[0]:
        raise RequestError(_unknown_verb(arguments[0]))
    return _call(VERBS["run"], arguments)


def _unknown_verb(name: str) -> str:
    # Imported here, because few command lines need it.
    from ortlaunch.base.nearest import nearest

    meant = _MEANT.get(name) or nearest(name, VERBS)
    hint = f" Did you mean ortlaunch {meant}?" if meant else ""
    return (
        f"{name}: no such command.{hint} Commands: {', '.join(VERBS)}; keys are given as KEY=VALUE (ortlaunch --help)"
    )


def _call(target: str, arguments: list[str]) -> int:
    module, _, function = target.partition(":")
    code: int = getattr(importlib.import_module(module), function)(arguments)
    return code
