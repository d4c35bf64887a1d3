"""`ortlaunch [run]`: launches what the command line composes, once or for each combination of a sweep."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import ortlaunch
from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.base.start import split_script

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ortlaunch.compose.hydra_tree import MultirunTask
    from ortlaunch.config.schema import RunConfig
    from ortlaunch.verbs.multirun import Multirun


def main(arguments: list[str]) -> int:
    """Runs `ortlaunch run`, the verb that may be left out.

    Args:
        arguments: the command line after the verb.

    Returns:
        The exit code of the run, or of the sweep.

    Raises:
        RequestError: a combination does not compose, or was refused.
    """
    before, script = split_script(arguments)
    if {"-h", "--help"} & set(before):
        from ortlaunch.verbs.help import help_text

        print(help_text())
        return exit_codes.DONE
    if "--version" in before:
        print(f"ortlaunch {ortlaunch.__version__}")
        return exit_codes.DONE
    from ortlaunch.compose.sweep_folder import discard, sweep_folder

    if script == []:
        raise RequestError("--: no script follows: ortlaunch [KEY=VALUE ...] -- train.py ARGUMENTS")
    words, after = _split_after(before)
    if script is not None:
        from ortlaunch.compose.attached import words_beside

        words = words_beside(words)
    try:
        return _Launches(arguments, words, after, script).run()
    finally:
        discard(sweep_folder())


class _Launches:
    """Launches each combination that Hydra composes; without ``--multirun`` there is only one.

    A request that is wrong before anything has run ends a sweep. Its error is kept and raised later, because Hydra
    would put its own text before it.
    """

    def __init__(self, arguments: list[str], words: list[str], after: list[str], script: list[str] | None) -> None:
        """
        Args:
            arguments: the command line after ``ortlaunch``.
            words: Hydra's part of it.
            after: the runs that must finish first.
            script: the script that the workers run, and its arguments; None for a training in ortlaunch's own loop.
        """
        self._arguments = arguments
        self._words = words
        self._after = after
        self._script = script
        self._code = 0
        self._error: RequestError | None = None
        self._multirun: Multirun | None = None

    def run(self) -> int:
        """Composes and launches all combinations; returns the exit code of the command.

        Raises:
            RequestError: a combination does not compose, or was refused.
        """
        from ortlaunch.compose.composing import CONFIG, SCRIPT
        from ortlaunch.compose.hydra_tree import run_with_hydra

        try:
            run_with_hydra(self._words, self, CONFIG if self._script is None else SCRIPT)
        except RequestError as error:
            self._error = self._error or error
        except KeyboardInterrupt:
            # Between two runs on this machine: those that have run are a sweep, which has to end. A queue gets nothing.
            if self._multirun is None or not self._multirun.has_run:
                raise
            self._code = exit_codes.INTERRUPTED
        return self._close()

    def __call__(self, tree: DictConfig) -> float | None:
        """Launches one combination; returns its objective to a sweeper that chooses by it, None from any other run."""
        from ortlaunch.compose.attached import with_command
        from ortlaunch.compose.hydra_tree import backend_reason, multirun_task
        from ortlaunch.compose.prepare import prepared
        from ortlaunch.config.load import to_run_config
        from ortlaunch.run.sweep import hide_in_hydras_file

        if self._code or self._error is not None:
            return None
        task = multirun_task()
        if task is not None and self._multirun is None:
            hide_in_hydras_file(task.folder)
        try:
            config = prepared(with_command(to_run_config(tree), self._script))
            if self._after:
                from ortlaunch.follow.after import after

                config = after(config, self._after)
            reason = backend_reason()
            self._code = self._launch(config, reason) if task is None else self._next_of_sweep(config, task, reason)
        except RequestError as error:
            if task is None or self._multirun is None or not self._multirun.goes_on:
                self._error = error
            else:
                self._multirun.note_failure(self._multirun.combination(task.overrides), str(error))
            return None
        return self._returned(config) if task is not None and task.by_results and not self._code else None

    def _close(self) -> int:
        if self._multirun is not None and (self._error is None or self._multirun.has_run):
            self._code = self._multirun.close(self._code or (exit_codes.REQUEST if self._error else exit_codes.DONE))
        if self._error is not None:
            raise self._error
        return self._code

    def _launch(self, config: RunConfig, reason: str | None) -> int:
        from ortlaunch.launch.auto import chosen
        from ortlaunch.launch.planning import make_plan
        from ortlaunch.launch.table import launcher_of

        # Its default name stays that of what was asked for.
        asked = config
        config, why = chosen(config)
        return launcher_of(config).submit(
            dataclasses.replace(make_plan(asked, why or reason, self._arguments), config=config)
        )

    def _returned(self, config: RunConfig) -> float | None:
        """Returns the objective of the latest run. Without it the sweep ends, because all runs would lack it."""
        assert self._multirun is not None
        try:
            return self._multirun.objective(config.objective)
        except RequestError as error:
            self._error = error
        return None

    def _next_of_sweep(self, config: RunConfig, task: MultirunTask, reason: str | None) -> int:
        from ortlaunch.verbs.multirun import Multirun, check_returns

        if task.by_results:
            check_returns(config)
        if self._multirun is None:
            self._multirun = Multirun(task.folder, self._arguments, [*self._words, *task.swept])
        return self._multirun.take(config, task.overrides, reason)


def _split_after(arguments: list[str]) -> tuple[list[str], list[str]]:
    if not any(argument.startswith("+after=") for argument in arguments):
        return arguments, []
    from ortlaunch.follow.after import split_after

    return split_after(arguments)
