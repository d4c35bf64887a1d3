"""Journals what comes of a script's workers: what is measured of them from outside, and what they log on other nodes.

The program around torchrun on each node measures, and writes what it finds into the workers' signs of life
(`ortlaunch.launch.script_watch`). The workers of ortlaunch's own loop journal more than that themselves.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortlaunch.run.journal import Journal, read_events
from ortlaunch.run.run import Run

_LOOK_SECONDS = 2.0
PEAK = "summary/peak_memory_gib"
_MOST_SECONDS = 60.0
"""Longest time between two samples that are journalled: each pause is twice the one before."""


class Samples:
    """Reads the workers' signs of life. The launcher, or the job's first process, calls `look` again and again."""

    def __init__(self, run: Run) -> None:
        """
        Args:
            run: the run, whose folder exists.
        """
        self._run = run
        self._begun = self._looked = time.monotonic()
        self._journalled, self._pause = 0, _LOOK_SECONDS
        self._values: dict[str, float] = {}
        self._taken: dict[Path, int] = {}
        """How much of each other node's spool is in the journal."""

    def look(self) -> list[str]:
        """Takes over what other nodes have logged, reads what was measured, and journals that from time to time.

        Returns:
            Lines for the user: none.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return []
        self._looked = now
        self._take_over()
        self._read()
        if now - self._begun - self._journalled >= self._pause:
            self._pause = min(_MOST_SECONDS, 2 * self._pause)
            self.journal()
        return []

    def journal(self) -> None:
        """Journals what was measured last. At the end of the run this is the summary."""
        self._take_over()
        if not self._values:
            return
        self._journalled = round(time.monotonic() - self._begun)
        # A full disk must not end the workers.
        with suppress(OSError), Journal(self._run.journal_file) as journal:
            journal.metrics(self._journalled, self._values)

    def _take_over(self) -> None:
        for spool in self._run.spool_files():
            with suppress(OSError):
                taken, self._taken[spool] = read_events(spool, self._taken.get(spool, 0))
                with Journal(self._run.journal_file) as journal:
                    for event in taken:
                        journal.take(event)

    def _read(self) -> None:
        beats = [self._run.beat(rank) for rank in self._run.beating_ranks()]
        measured = [beat for beat in beats if isinstance(beat.get("rss_gib"), float)]
        if not measured:
            return
        # As in ortlaunch's own loop, the memory to compare by is the GPU's where there is one.
        peak = max(_number(beat, "gpu_peak_gib" if "gpu_peak_gib" in beat else "peak_gib") for beat in measured)
        self._values["memory/rss_gib"] = max(_number(beat, "rss_gib") for beat in measured)
        self._values[PEAK] = max(peak, self._values.get(PEAK, 0.0))
        for beat in measured:
            prefix = f"system/rank-{beat.get('rank')}"
            self._values[f"{prefix}/cpu_utilization_percentage"] = _number(beat, "cpu_percent")
            self._values[f"{prefix}/memory_gib"] = _number(beat, "rss_gib")
            for name, key in (("gpu_utilization_percentage", "gpu_percent"), ("gpu_memory_gib", "gpu_gib")):
                if key in beat:
                    self._values[f"{prefix}/{name}"] = _number(beat, key)


def _number(beat: dict[str, Any], name: str) -> float:
    value = beat.get(name)
    return value if isinstance(value, float) else 0.0
