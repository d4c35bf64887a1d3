"""`--on-end COMMAND`: a command of the administrator that is run for each run that ends, and again until it succeeds.

What was told is in a file beside the database. An end that came while the service was down is told at its next start.
"""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ortlaunch.base.files import PRIVATE, replace
from ortlaunch.serve.index.listing import ended
from ortlaunch.serve.service import Service

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 2.0
_COMMAND_SECONDS = 60.0
_FIRST_WAIT, _LONGEST_WAIT = 5.0, 3600.0
"""Seconds until a command that has failed is run again, each time twice as long."""
_LATEST_SECONDS = 7 * 86400.0
"""An end that is older than this is not told any more, for example after the service was down for long."""


class OnEnd:
    """Runs the command for one end after the other."""

    def __init__(self, command: str, file: Path, ended: Callable[[float], Iterable[Mapping[str, Any]]]) -> None:
        """
        Args:
            command: the command line.
            file: where it stands what was told.
            ended: returns the runs that have ended after a time, each with its `key` and when it `ended`.
        """
        self._words = shlex.split(command)
        self._file = file
        self._ended = ended
        self._since, self._told = 0.0, dict[str, float]()
        self._due: dict[str, tuple[float, float]] = {}
        """When a command that has failed is run again, and how long the wait was."""
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begins. Ends from before the first start are not told."""
        if self._file.exists():
            content = json.loads(self._file.read_text())
            self._since, self._told = content["since"], content["told"]
        else:
            self._since = time.time()
            self._keep()
        self._stopping.clear()
        threading.Thread(target=self._work, name="on-end", daemon=True).start()

    def stop(self) -> None:
        """Begins no command any more."""
        self._stopping.set()

    def tell(self) -> int:
        """Runs the command for each end that was not told yet; returns how often it has succeeded."""
        since = max(self._since, time.time() - _LATEST_SECONDS)
        self._told = {key: ended for key, ended in self._told.items() if ended > since}
        count = 0
        for run in self._ended(since):
            key, ended = run["key"], run["ended"]
            due, wait = self._due.get(key, (0.0, _FIRST_WAIT / 2))
            if self._stopping.is_set() or self._told.get(key) == ended or time.monotonic() < due:
                continue
            if self._has_run({"event": "run.ended", "id": key, "run": dict(run)}):
                self._told[key] = ended
                count += 1
                # One by one: a service that is killed tells one run again at most.
                self._keep()
            else:
                self._due[key] = (time.monotonic() + 2 * wait, min(2 * wait, _LONGEST_WAIT))
        return count

    def _has_run(self, message: dict[str, Any]) -> bool:
        try:
            subprocess.run(
                self._words,
                input=json.dumps(message).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_COMMAND_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()[-500:]
            _LOG.warning("--on-end for %s: %s %s", message["id"], error, said)
            return False
        return True

    def _keep(self) -> None:
        replace(self._file, json.dumps({"since": self._since, "told": self._told}).encode(), PRIVATE)

    def _work(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            try:
                self.tell()
            except Exception:
                _LOG.exception("it cannot be told now which runs have ended")
                self._stopping.wait(_COMMAND_SECONDS)


def make_on_end(service: Service) -> OnEnd | None:
    """Returns what runs the command of a service; None without one."""
    command = service.settings.on_end
    return OnEnd(command, service.settings.on_end_file, partial(ended, service)) if command else None
