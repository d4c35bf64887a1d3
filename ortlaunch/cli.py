"""The command line: which verb, and how its errors end. Everything else is imported by the verb that needs it."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import ortlaunch
from ortlaunch.base.errors import RequestError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ortlaunch.compose.hydra_tree import MultirunTask
    from ortlaunch.config.schema import Config
    from ortlaunch.verbs.multirun import Multirun

EXIT_REQUEST, EXIT_INTERRUPTED = 2, 130

_ALLOCATIONS_PER_COLLECTION = 50_000
"""Python's 700 has a short command search its imports and its configuration for garbage a hundred times."""


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
        code = EXIT_REQUEST
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (head, less) has left: no error of ours, and nothing more to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    # The interpreter's end would search everything once more.
    gc.freeze()
    sys.exit(code)


def dispatch(arguments: list[str]) -> int:
    """Runs the verb that the command line names; no verb means ``run``."""
    if arguments and arguments[0] in VERBS:
        return VERBS[arguments[0]](arguments[1:])
    if arguments and not arguments[0].startswith(("-", "+", "~")) and "=" not in arguments[0]:
        raise RequestError(
            f"{arguments[0]}: no such command. Commands: {', '.join(VERBS)}; keys are given as KEY=VALUE "
            "(ortlaunch --help)"
        )
    return _run(arguments)


def _run(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        from ortlaunch.verbs.help import help_text

        print(help_text())
        return 0
    if "--version" in arguments:
        print(f"ortlaunch {ortlaunch.__version__}")
        return 0
    from ortlaunch.compose.sweep_folder import discard, sweep_folder

    words, after = _split_after(arguments)
    try:
        return _Launches(arguments, words, after).run()
    finally:
        discard(sweep_folder())


class _Launches:
    """Launches each combination that Hydra composes; one alone without ``--multirun``.

    The first that fails ends the sweep: what failed once would mostly fail again, on machines that cost money. Errors
    are kept for the caller, because Hydra would put words of its own before them.
    """

    def __init__(self, arguments: list[str], words: list[str], after: list[str]) -> None:
        """
        Args:
            arguments: the command line after ``ortlaunch``.
            words: what of it is Hydra's.
            after: the runs that come first.
        """
        self._arguments = arguments
        self._words = words
        self._after = after
        self._code = 0
        self._error: RequestError | None = None
        self._multirun: Multirun | None = None

    def run(self) -> int:
        """Composes and launches them all; returns the exit code of the whole.

        Raises:
            RequestError: a combination does not compose, or was refused.
        """
        from ortlaunch.compose.hydra_tree import run_with_hydra

        try:
            run_with_hydra(self._words, self)
        except RequestError as error:
            self._error = self._error or error
        return self._close()

    def __call__(self, tree: DictConfig) -> None:
        from ortlaunch.compose.hydra_tree import multirun_task

        if self._code or self._error is not None:
            return
        task = multirun_task()
        try:
            config = _after(_config(tree), self._after)
            self._code = _launch(config, self._arguments) if task is None else self._next_of_sweep(config, task)
        except RequestError as error:
            self._error = error

    def _close(self) -> int:
        if self._multirun is not None and (self._error is None or self._multirun.has_run):
            self._code = self._multirun.close(self._code or (EXIT_REQUEST if self._error else 0))
        if self._error is not None:
            raise self._error
        return self._code

    def _next_of_sweep(self, config: Config, task: MultirunTask) -> int:
        if self._multirun is None:
            from ortlaunch.verbs.multirun import Multirun

            self._multirun = Multirun(task.folder, self._arguments, [*self._words, *task.swept])
        return self._multirun.take(config, task.overrides)


def _split_after(arguments: list[str]) -> tuple[list[str], list[str]]:
    if not any(argument.startswith("+after=") for argument in arguments):
        return arguments, []
    from ortlaunch.follow.after import split_after

    return split_after(arguments)


def _after(config: Config, names: list[str]) -> Config:
    """Makes a run come after others: its job waits for theirs, or this command does."""
    from ortlaunch.config.schema import SlurmConfig
    from ortlaunch.follow.after import dependency, wait_for

    if not names:
        return config
    if isinstance(config.launcher, SlurmConfig):
        waits = dependency(names, config.launcher.dependency)
        return dataclasses.replace(config, launcher=dataclasses.replace(config.launcher, dependency=waits))
    if not config.launcher.dry_run:
        wait_for(names)
    return config


def _config(tree: DictConfig) -> Config:
    from ortlaunch.compose.rules import check
    from ortlaunch.config.load import to_config
    from ortlaunch.launch.slurm.plan import settled
    from ortlaunch.tracking import trackers

    config = settled(to_config(tree))
    check(config)
    return trackers.resolved(config, Path.cwd())


def _launch(config: Config, arguments: list[str]) -> int:
    from ortlaunch.config.schema import LocalConfig, SlurmConfig
    from ortlaunch.launch.local import machines
    from ortlaunch.launch.planning import make_plan

    if config.launcher.dry_run and config.launcher.nodes > 1 and isinstance(config.launcher, LocalConfig):
        print(machines.dry_run(config.launcher, Path(config.run_root), arguments))
        return 0
    plan = make_plan(config)
    if isinstance(config.launcher, SlurmConfig):
        from ortlaunch.launch.slurm.submit import submit

        return submit(plan, config, arguments)
    if config.launcher.dry_run:
        print(plan.description())
        return 0
    from ortlaunch.launch.local.run import run

    return run(plan, config, arguments)


def _resume(arguments: list[str]) -> int:
    from ortlaunch.verbs.resume import resume

    return resume(arguments)


def _jobs(arguments: list[str]) -> int:
    from ortlaunch.follow.jobs import jobs

    return jobs(arguments)


def _status(arguments: list[str]) -> int:
    from ortlaunch.follow.status import status

    return status(arguments)


def _logs(arguments: list[str]) -> int:
    from ortlaunch.follow.logs import logs

    return logs(arguments)


def _cancel(arguments: list[str]) -> int:
    from ortlaunch.follow.cancel import cancel

    return cancel(arguments)


def _export(arguments: list[str]) -> int:
    from ortlaunch.export.command import main

    return main(arguments)


def _compare(arguments: list[str]) -> int:
    from ortlaunch.compare.command import main
    from ortlaunch.config.schema import Config
    from ortlaunch.config.tracking_uri import default_uri

    return main(arguments, default_uri(), Config.experiment)


def _bench(arguments: list[str]) -> int:
    from ortlaunch.verbs.bench import main

    return main(arguments, _config)


def _check(arguments: list[str]) -> int:
    from ortlaunch.check.command import main

    return main(arguments)


def _sync(arguments: list[str]) -> int:
    from ortlaunch.follow.sync import sync_main

    return sync_main(arguments)


def _models(arguments: list[str]) -> int:
    from ortlaunch.verbs.help import MODELS_HELP, models_text

    if {"-h", "--help"} & set(arguments):
        print(MODELS_HELP)
        return 0
    if arguments and arguments != ["--available"]:
        raise RequestError(f"ortlaunch models takes no {arguments[0]}")
    print(models_text())
    return 0


def _doctor(arguments: list[str]) -> int:
    from ortlaunch.doctor.command import main

    return main(arguments)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "check": _check,
    "jobs": _jobs,
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "resume": _resume,
    "export": _export,
    "compare": _compare,
    "bench": _bench,
    "sync": _sync,
    "models": _models,
    "doctor": _doctor,
}
