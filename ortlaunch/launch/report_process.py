"""Starts the process of a verb that looks at a configuration and leaves a report, and reads that report.

The verb's own process imports no torch. The other one reads ``config.yaml`` in a folder of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.own_code import last_frames, where_it_ended
from ortlaunch.base.private_folder import PrivateFolder
from ortlaunch.base.processes import die_with_parent
from ortlaunch.base.programs import module_command
from ortlaunch.config.load import save_config
from ortlaunch.config.schema import RunConfig

REPORT, REFUSED = "report.json", "refused.txt"
"""Files that the process leaves in the folder: its report, or why it has refused the request."""

_LAST_LINES = 15


class ReportProcess:
    """``python -m ortlaunch.VERB.process FOLDER``, which runs until `close`."""

    def __init__(
        self,
        verb: str,
        config: RunConfig,
        variables: Mapping[str, str],
        *,
        words: Sequence[str] = (),
        add_files: Callable[[Path], None] | None = None,
        ended: Callable[[Path, int, str], dict[str, Any] | None] | None = None,
    ) -> None:
        """Starts the process.

        Args:
            verb: the verb, whose package has the process.
            config: the configuration that the process reads.
            variables: what is added to the environment.
            words: further arguments of the process.
            add_files: writes further files to the folder.
            ended: makes the report where a signal has ended the process: of the folder, the signal and the log; None
                where it cannot.

        Raises:
            OSError: the folder or the process cannot be made.
        """
        self._verb = verb
        self._ended = ended
        self._place = PrivateFolder(verb)
        folder = self._folder = self._place.path
        try:
            save_config(config, folder / "config.yaml")
            if add_files is not None:
                add_files(folder)
            with self._log.open("wb") as output:
                self._process = subprocess.Popen(
                    [*module_command(f"ortlaunch.{verb}.process"), str(folder), *words],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=die_with_parent,
                )
        except BaseException:
            self._place.close()
            raise

    @property
    def _log(self) -> Path:
        return self._folder / f"{self._verb}.log"

    def poll(self) -> int | None:
        """Returns the exit code of the process; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the end of the process, at most for some seconds; returns whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def report(self) -> dict[str, Any]:
        """The report of the process, which has ended.

        Raises:
            RequestError: the process refused the request, or ended early.
        """
        code = self._process.returncode
        try:
            refused, report = self._folder / REFUSED, self._folder / REPORT
            if refused.is_file():
                raise RequestError(refused.read_text())
            if code == 0 and report.is_file():
                found: dict[str, Any] = json.loads(report.read_text())
                return found
            text = self._log.read_text(errors="replace")
        except (OSError, ValueError) as error:
            raise RequestError(f"the report of {self._verb} cannot be read: {error}") from error
        made = self._ended(self._folder, -code, text) if self._ended is not None and code < 0 else None
        if made is not None:
            return made
        frames, text = last_frames(text, -code)
        lines = [line for line in text.splitlines() if line.strip()]
        if code < 0:
            lines.append(f"ended by {signal.Signals(-code).name}{where_it_ended(frames)}")
        raise RequestError(
            f"the {self._verb} itself ended early: " + "\n".join(lines[-_LAST_LINES:] or [f"exit code {code}"])
        )

    def close(self) -> None:
        """Ends the process, if it is still there, and removes its folder."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._place.close()


def report_of(
    verb: str,
    config: RunConfig,
    variables: Mapping[str, str],
    *,
    status: str,
    quiet: bool,
    words: Sequence[str] = (),
    add_files: Callable[[Path], None] | None = None,
    ended: Callable[[Path, int, str], dict[str, Any] | None] | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Runs a `ReportProcess` to its end and returns its report.

    Args:
        verb: the verb, whose package has the process.
        config: the configuration that the process reads.
        variables: what is added to the environment.
        status: what is shown on stderr meanwhile.
        quiet: whether to show nothing.
        words: further arguments of the process.
        add_files: writes further files to the folder.
        ended: makes the report where a signal has ended the process: of the folder, the signal and the log; None
            where it cannot.
        timeout: seconds after which the process is ended; None for no limit.

    Raises:
        RequestError: the process refused the request, ended early, or did not end in time.
    """
    # Imported here, because most commands import this module and start no such process.
    from rich.console import Console

    process = ReportProcess(verb, config, variables, words=words, add_files=add_files, ended=ended)
    try:
        with Console(stderr=True, quiet=quiet).status(status):
            has_ended = process.wait(timeout)
        if not has_ended:
            raise RequestError(f"the {verb} did not end within {timeout:.0f} s")
        return process.report()
    finally:
        process.close()
