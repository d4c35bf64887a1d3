"""Starts the process of a verb that looks at a configuration and leaves a report, and reads that report.

The verb's own process imports no torch. The other one reads ``config.yaml`` in a folder of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ortlaunch.base.errors import RequestError
from ortlaunch.base.own_code import last_frames, users_place
from ortlaunch.base.processes import die_with_parent
from ortlaunch.config.load import save_config
from ortlaunch.config.schema import Config

REPORT, REFUSED = "report.json", "refused.txt"
"""Files that the process leaves in the folder: its report, or why it has refused the request."""

_LAST_LINES = 15


def report_of(
    verb: str,
    config: Config,
    variables: Mapping[str, str],
    *,
    status: str,
    quiet: bool,
    words: Sequence[str] = (),
    add_files: Callable[[Path], None] | None = None,
    ended: Callable[[Path, int, str], dict[str, Any] | None] | None = None,
) -> dict[str, Any]:
    """Runs ``python -m ortlaunch.VERB.process FOLDER`` and returns its report.

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

    Raises:
        RequestError: the process refused the request, or ended early.
    """
    with tempfile.TemporaryDirectory(prefix=f"ortlaunch-{verb}-") as name:
        folder = Path(name)
        save_config(config, folder / "config.yaml")
        if add_files is not None:
            add_files(folder)
        log = folder / f"{verb}.log"
        with Console(stderr=True, quiet=quiet).status(status), log.open("wb") as output:
            code = subprocess.run(
                [sys.executable, "-m", f"ortlaunch.{verb}.process", name, *words],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
                check=False,
            ).returncode
        refused, report = folder / REFUSED, folder / REPORT
        if refused.is_file():
            raise RequestError(refused.read_text())
        if code == 0 and report.is_file():
            found: dict[str, Any] = json.loads(report.read_text())
            return found
        text = log.read_text(errors="replace")
        made = ended(folder, -code, text) if ended is not None and code < 0 else None
        if made is not None:
            return made
        frames, text = last_frames(text, -code)
        lines = [line for line in text.splitlines() if line.strip()]
        if code < 0:
            place = users_place(frames)
            lines.append(f"ended by {signal.Signals(-code).name}" + (f" at {place}" if place else ""))
    raise RequestError(f"the {verb} itself ended early: " + "\n".join(lines[-_LAST_LINES:] or [f"exit code {code}"]))
