"""The curves of runs, thinned while their journals are read, and kept so that only what is new is read again.

A journal may have a million figures. Of each curve at most `MOST_POINTS` points are kept: its steps are divided into
equal ranges, and of each range the lowest and the highest value stay, so that no peak is lost.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.text import public_text
from ortlaunch.run.events import Measured
from ortlaunch.run.journal import read_chunk
from ortlaunch.run.run import Run
from ortlaunch.serve.api.shapes import Curve
from ortlaunch.serve.follow.beneath import identity, open_beneath

MOST_POINTS = 1000
"""Points of a curve."""
_MOST_RANGES = MOST_POINTS // 2 - 1
_MOST_BAD = 50
"""Values of a curve that are no finite numbers and are kept."""
_MOST_CURVES = 500
_MOST_RUNS = 64
"""Runs whose curves are kept: with twenty curves each about 25 MB."""
_CHUNK = 1 << 20
_LONGEST_NAME = 200
_MOST_NAMES = 1000
"""Names that are kept, so that a journal of very many takes no memory for them."""


class MetricNames(dict[str, str]):
    """How metrics are called outside. Each name is looked at once: a journal has thousands of points of a few names."""

    def __missing__(self, name: str) -> str:
        shown = public_text(name[:_LONGEST_NAME])
        if len(self) < _MOST_NAMES:
            self[name] = shown
        return shown


class Thinned:
    """A curve. Of two values of one step the first counts: steps are repeated after a run went back."""

    def __init__(self) -> None:
        self._width = 1
        """Steps of a range."""
        self._range, self._low_at, self._high_at = array("q"), array("q"), array("q")
        self._low, self._high = array("d"), array("d")
        self._bad: list[int] = []
        self._last: tuple[int, float | None] | None = None

    def add(self, step: int, value: float) -> None:
        """Adds the value of a step; one of an earlier step is left out."""
        if self._last is not None and step <= self._last[0]:
            return
        if not math.isfinite(value):
            self._last = step, None
            if len(self._bad) < _MOST_BAD:
                self._bad.append(step)
            return
        self._last = step, value
        self._put(step // self._width, step, value, step, value)
        while len(self._range) > _MOST_RANGES:
            self._widen()

    def curve(self, most: int = MOST_POINTS) -> Curve:
        """Returns the points.

        Args:
            most: how many points it may have.
        """
        points: dict[int, float | None] = dict.fromkeys(self._bad)
        for low_at, low, high_at, high in zip(self._low_at, self._low, self._high_at, self._high, strict=True):
            points[low_at], points[high_at] = low, high
        if self._last is not None:
            points[self._last[0]] = self._last[1]
        steps = sorted(points)
        if len(steps) > most:
            return _thinner(steps, points, most)
        return {"steps": steps, "values": [_short(points[step]) for step in steps]}

    def _put(self, place: int, low_at: int, low: float, high_at: int, high: float) -> None:
        if not self._range or self._range[-1] != place:
            self._range.append(place)
            self._low_at.append(low_at)
            self._low.append(low)
            self._high_at.append(high_at)
            self._high.append(high)
            return
        if low < self._low[-1]:
            self._low_at[-1], self._low[-1] = low_at, low
        if high > self._high[-1]:
            self._high_at[-1], self._high[-1] = high_at, high

    def _widen(self) -> None:
        old = (self._range, self._low_at, self._low, self._high_at, self._high)
        self._range, self._low_at, self._high_at = array("q"), array("q"), array("q")
        self._low, self._high = array("d"), array("d")
        self._width *= 2
        for place, low_at, low, high_at, high in zip(*old, strict=True):
            self._put(place // 2, low_at, low, high_at, high)


def _thinner(steps: list[int], points: dict[int, float | None], most: int) -> Curve:
    """The same points in fewer ranges. A quarter may be values that are no finite numbers."""
    bad = [step for step in steps if points[step] is None][: most // 4]
    thin = Thinned()
    # One range more than the width says, because steps need not begin with a range, and the last point.
    thin._width = (steps[-1] - steps[0]) // max(1, (most - len(bad)) // 2 - 2) + 1
    for step in steps:
        value = points[step]
        if value is not None or step in bad:
            thin.add(step, math.nan if value is None else value)
    return thin.curve(2 * MOST_POINTS)


def _short(value: float | None) -> float | None:
    """A value with six digits, which is more than a picture shows."""
    return None if value is None else float(f"{value:.6g}")


@dataclass
class RunCurves:
    """The curves of one run, up to a byte of its journal."""

    offset: int = 0
    curves: dict[str, Thinned] = field(default_factory=dict)
    began: float = 0.0
    """When the first figures were journalled, in seconds since the epoch."""
    times: Thinned = field(default_factory=Thinned)
    """The seconds since then by step."""
    names: MetricNames = field(default_factory=MetricNames)
    file: tuple[int, ...] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, place: str) -> None:
        """Reads what the journal has got since the last call."""
        name = Run(Path(place)).journal_file.name
        with open_beneath(place, name) as journal:
            size = journal.seek(0, 2)
            if identity(journal) != self.file or size < self.offset:
                self.offset, self.curves, self.file = 0, {}, identity(journal)
                self.began, self.times = 0.0, Thinned()
            path = Path(f"/proc/self/fd/{journal.fileno()}")
            while True:
                chunk = read_chunk(path, self.offset, _CHUNK)
                self._take(event for event in chunk.events if isinstance(event, Measured))
                if chunk.offset == self.offset:
                    return
                self.offset = chunk.offset

    def _take(self, events: Iterable[Measured]) -> None:
        for event in events:
            self.began = self.began or event.t / 1000
            self.times.add(event.step, event.t / 1000 - self.began)
            for journalled, value in event.values.items():
                name = self.names[journalled]
                curve = self.curves.get(name)
                if curve is None:
                    if len(self.curves) >= _MOST_CURVES:
                        continue
                    curve = self.curves[name] = Thinned()
                curve.add(event.step, value)


class Found(NamedTuple):
    """Curves of a run."""

    curves: dict[str, Curve]
    names: list[str]
    """The names of all its metrics."""
    offset: int
    """The byte of the journal up to which they go."""
    began: float
    times: Curve


class CurveCache:
    """The curves of the runs that were looked at last."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, RunCurves] = OrderedDict()
        self._lock = threading.Lock()

    def curves(self, place: str, names: Iterable[str], most: int) -> Found:
        """Returns curves of a run.

        Args:
            place: the run folder.
            names: the metrics; those that the run does not have are left out.
            most: how many points a curve may have.

        Raises:
            OSError: the journal cannot be read.
        """
        with self._lock:
            run = self._runs.pop(place, None) or RunCurves()
            self._runs[place] = run
            while len(self._runs) > _MOST_RUNS:
                self._runs.popitem(last=False)
        with run.lock:
            run.read(place)
            found = {name: run.curves[name].curve(most) for name in names if name in run.curves}
            return Found(found, sorted(run.curves), run.offset, run.began, run.times.curve(most))
