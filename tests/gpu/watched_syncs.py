"""Counts how often a worker's host waits for its GPU between log steps; a run imports it by ``model.imports``.

torch warns at each such call (``torch.cuda.set_sync_debug_mode``). A log step waits on purpose, so the warnings are off
while one is recorded. The count is in ``syncs-rank-N.json`` in the folder that the run was started in.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ortlaunch.trainer.recorder import Recorder
from tests.support.waits import asked_by

_SYNC = "called a synchronizing CUDA operation"


class _Watch:
    """The warnings since the first log step, by the line outside torch that waited, and torch's where it is another."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self.steps = 0
        self.planted: bool | None = None
        self.begun = False
        """Whether the first step is over; what a start waits for does not count."""
        self._cuda = torch.cuda.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""

    def switch(self, *, on: bool) -> None:
        """Lets torch warn, or not."""
        if self._cuda:
            torch.cuda.set_sync_debug_mode("warn" if on else "default")

    def plant(self) -> None:
        """Waits once, to see that this is noticed."""
        if self._cuda:
            before = self.lines.copy()
            torch.ones(1, device="cuda").item()
            self.planted = self.lines != before
            self.lines = before

    def save(self) -> None:
        """Writes the count; a worker ends without running what is registered for its exit."""
        found = {"steps": self.steps, "planted": self.planted, "lines": self.lines}
        Path(f"syncs-rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def _watch() -> None:
    """Puts the watch around the recorder's methods, which the loop calls at each step and log step."""
    watch = _Watch()
    show, log, step_done = warnings.showwarning, Recorder.log, Recorder.step_done

    def counted(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if _SYNC in str(message):
            line, inner = asked_by(__name__), f"{Path(filename).stem}:{lineno}"
            watch.lines[line if line.endswith(inner) else f"{line} in {inner}"] += 1
        else:
            show(message, category, filename, lineno, *rest)

    def watched_log(self: Recorder, *arguments: Any, **keywords: Any) -> None:
        watch.switch(on=False)
        log(self, *arguments, **keywords)
        watch.save()
        watch.switch(on=True)
        if not watch.begun:
            watch.begun = True
            watch.plant()

    def watched_step(self: Recorder) -> None:
        step_done(self)
        watch.steps += watch.begun

    warnings.showwarning = counted
    warnings.filterwarnings("always", message=_SYNC)
    Recorder.log = watched_log  # type: ignore[method-assign]
    Recorder.step_done = watched_step  # type: ignore[method-assign]


_watch()
