"""The command line: which verb, and how its errors end. Everything else is imported by the verb that needs it."""

from __future__ import annotations

import gc
import importlib
import os
import sys

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError

_ALLOCATIONS_PER_COLLECTION = 50_000
"""Python's 700 has a short command search its imports and its configuration for garbage a hundred times."""

VERBS = {
    "run": "ortlaunch.verbs.run:main",
    "check": "ortlaunch.check.command:main",
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
}
"""The function of each verb as MODULE:FUNCTION; it takes the words after the verb and returns the exit code."""


def main() -> None:
    """Entry point of the ``ortlaunch`` command."""
    # The user's own choice to see Hydra's tracebacks is read before Hydra is told to raise.
    debug = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)
    try:
        code = dispatch(sys.argv[1:])
    except RequestError as error:
        if debug:
            raise
        print(f"ortlaunch: {error}", file=sys.stderr)
        code = exit_codes.REQUEST
    except KeyboardInterrupt:
        code = exit_codes.INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (head, less) has left: no error of ours, and nothing more to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = exit_codes.DONE
    # The interpreter's end would search everything once more.
    gc.freeze()
    sys.exit(code)


def dispatch(arguments: list[str]) -> int:
    """Runs the verb that the command line names; no verb means ``run``."""
    if arguments and arguments[0] in VERBS:
        return _call(VERBS[arguments[0]], arguments[1:])
    if arguments and not arguments[0].startswith(("-", "+", "~")) and "=" not in arguments[0]:
        raise RequestError(
            f"{arguments[0]}: no such command. Commands: {', '.join(VERBS)}; keys are given as KEY=VALUE "
            "(ortlaunch --help)"
        )
    return _call(VERBS["run"], arguments)


def _call(target: str, arguments: list[str]) -> int:
    module, _, function = target.partition(":")
    code: int = getattr(importlib.import_module(module), function)(arguments)
    return code
