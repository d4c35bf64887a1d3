"""Runs the process of a verb that looks at a configuration and leaves a report, and reads that report.

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
    """Runs ``python -m ortlaunch.VERB.process FOLDER`` to its end and returns its report.

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
        OSError: the folder or the process cannot be made.
    """
    # Imported here, because most commands import this module and start no such process.
    from rich.console import Console

    with PrivateFolder(verb) as folder, Console(stderr=True, quiet=quiet).status(status):
        save_config(config, folder / "config.yaml")
        if add_files is not None:
            add_files(folder)
        log = folder / f"{verb}.log"
        with log.open("wb") as output:
            try:
                # It ends the process where it does not end in time, or this one is interrupted.
                code = subprocess.run(
                    [*module_command(f"ortlaunch.{verb}.process"), str(folder), *words],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=die_with_parent,
                    timeout=timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                raise RequestError(f"the {verb} did not end within {timeout:.0f} s") from None
        try:
            if (refused := folder / REFUSED).is_file():
                raise RequestError(refused.read_text())
            if code == 0 and (folder / REPORT).is_file():
                found: dict[str, Any] = json.loads((folder / REPORT).read_text())
                return found
            text = log.read_text(errors="replace")
        except (OSError, ValueError) as error:
            raise RequestError(f"the report of {verb} cannot be read: {error}") from error
        made = ended(folder, -code, text) if ended is not None and code < 0 else None
        if made is not None:
            return made
    frames, text = last_frames(text, -code)
    lines = [line for line in text.splitlines() if line.strip()]
    if code < 0:
        lines.append(f"ended by {signal.Signals(-code).name}{where_it_ended(frames)}")
    raise RequestError(f"the {verb} itself ended early: " + "\n".join(lines[-_LAST_LINES:] or [f"exit code {code}"]))
