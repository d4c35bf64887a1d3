"""Notices workers that stand still while others wait for them, and says so while it lasts.

Every worker writes a sign of life about every two seconds, whatever it computes (`ortlaunch.trainer.watch`). One that
was stopped, suspended or paused, or whose machine is gone, writes none, and nothing else tells the others.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from ortlaunch.base.awake import AwakeClock, why_not_running
from ortlaunch.base.text import moment
from ortlaunch.run.identity import Process
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.run.state import NOBODY_STANDS, STANDING_TAG

_LOOK_SECONDS = 2.0
_STOPPED_SECONDS = 5.0
"""A worker that is seen to be stopped is reported after this time without a sign of life."""
_SILENT_SECONDS = 30.0
"""Any other worker is reported after this time, if another worker gives signs of life."""
_OWN_SECONDS = 5.0


class Stalls:
    """Reads the workers' signs of life. The launcher, or the job's first process, calls `look` again and again."""

    def __init__(self, run: Run, clock: AwakeClock | None = None) -> None:
        """
        Args:
            run: the run, whose folder exists.
            clock: counts the time in which this process could run.
        """
        self._run = run
        self._clock = clock or AwakeClock()
        self._looked = 0.0
        self._marks: dict[int, int] = {}
        """The modification time of each worker's file, in nanoseconds."""
        self._seen: dict[int, float] = {}
        """When it last changed, on this process's clock."""
        self._told: dict[int, str] = {}
        """What was said of the workers that stand still."""

    def look(self) -> list[str]:
        """Looks whether a worker stands still or goes on again, and journals that.

        Returns:
            Lines for the user; empty if nothing has changed.
        """
        lines = []
        if (stood := self._clock.tick()) > _OWN_SECONDS:
            lines.append(
                f"ortlaunch: this command could not run for {stood:.0f} s, until {moment(time.time())} "
                "(it was stopped or suspended, or its terminal took no output): it goes on"
            )
        now = self._clock.seconds
        # A worker that goes on may end its run within the next two seconds: it is looked for at each call.
        if now - self._looked < _LOOK_SECONDS and not self._told:
            return lines
        self._looked = now
        self._take_signs(now)
        before = dict(self._told)
        for rank in sorted(self._seen.keys() | self._told.keys()):
            lines += self._judge(rank, now)
        if self._told != before:
            self._journal()
        return lines

    def _take_signs(self, now: float) -> None:
        marks: dict[int, int] = {}
        with suppress(OSError), os.scandir(self._run.health) as entries:
            for entry in entries:
                number = entry.name.removeprefix("rank-").removesuffix(".json")
                if number.isdecimal():
                    with suppress(OSError):
                        marks[int(number)] = entry.stat().st_mtime_ns
        # A worker that has ended in order has removed its file.
        self._seen = {rank: self._seen[rank] if self._marks.get(rank) == mark else now for rank, mark in marks.items()}
        self._marks = marks

    def _judge(self, rank: int, now: float) -> list[str]:
        silent = now - self._seen.get(rank, now)
        if rank in self._told:
            if silent > _LOOK_SECONDS:
                return []
            since = self._told.pop(rank)
            return [f"ortlaunch: rank {rank} goes on at {moment(time.time())}: {since}"]
        if silent <= _STOPPED_SECONDS:
            return []
        beat = self._run.beat(rank)
        process = Process(str(beat.get("host")), int(beat.get("pid") or 0), 0, str(beat.get("machine") or ""))
        why = why_not_running(process.pid) if process.is_here else ""
        if not why and (silent <= _SILENT_SECONDS or not self._others_go_on(rank, now)):
            return []
        text = f"no sign of life since {moment(time.time() - silent)}, after step {beat.get('step')}"
        self._told[rank] = f"rank {rank} on {process.host} (process {process.pid}): {text}{f': {why}' if why else ''}"
        return [f"ortlaunch: {self._told[rank]}. The other workers wait for it"]

    def _others_go_on(self, rank: int, now: float) -> bool:
        return any(now - seen <= _STOPPED_SECONDS for other, seen in self._seen.items() if other != rank)

    def _journal(self) -> None:
        text = "; ".join(self._told.values()) or NOBODY_STANDS
        with suppress(OSError), Journal(self._run.journal_file) as journal:
            journal.tags({STANDING_TAG: text})
