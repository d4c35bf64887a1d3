"""Chooses the runs that the user named, and the baseline."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import counted
from ortlaunch.compare.runs import RATES, RunRow
from ortlaunch.compare.sources import Sources
from ortlaunch.launch.plan import folder_name

LAST = 10
"""Number of an experiment's runs that are compared by default."""


@dataclass(frozen=True)
class Selection:
    """The runs that the user selected."""

    runs: Sequence[str] = ()
    """Run folders, ids or names, in the order of the rows."""
    sweep: str | None = None
    tags: Sequence[tuple[str, str]] = ()
    """Tags that each run must have."""
    experiment: str | None = None
    """The experiment to look in; None looks in all."""
    last: int = LAST
    """How many of the newest runs are taken, of those with the tags, or of an experiment if nothing else is named."""
    baseline: str | None = None


@dataclass(frozen=True)
class Chosen:
    """The selected runs, each once."""

    rows: list[RunRow]
    baseline_id: str
    notes: list[str] = field(default_factory=list)
    why: str = ""
    """Why this run is the baseline; empty if the user named it."""


def choose(sources: Sources, selection: Selection) -> Chosen:
    """Reads the selected runs.

    Raises:
        RequestError: the experiment or a run does not exist, or no run is selected.
    """
    notes: list[str] = []
    rows = [sources.find(asked, selection.experiment) for asked in selection.runs]
    swept = [] if selection.sweep is None else sources.swept(selection.sweep, selection.experiment)
    rows += swept
    if selection.tags or not (selection.runs or selection.sweep is not None):
        _check_experiment(sources, selection.experiment)
        most, where = selection.last + 1, (selection.experiment, selection.tags)
        newest = heapq.merge(*(one.latest(*where, most) for one in sources.each), key=lambda row: -row.started)
        latest = list(islice(newest, most))
        if len(latest) == most:
            notes.append(f"the last {counted(selection.last, 'run')} only: more by --last N")
        rows += latest[: selection.last][::-1]
    if not rows:
        raise sources.lost or RequestError(_nothing(selection))
    if sources.lost is not None and any(row.folder is not None for row in rows):
        notes.append(f"read from the run folders alone: {sources.lost}")
    rows = list({row.run_id: row for row in rows}.values())
    base, why = _baseline(sources, selection, rows, swept)
    if base.run_id not in [row.run_id for row in rows]:
        rows.insert(0, base)
    elif not selection.runs and not swept:
        # Nobody has given these runs an order, and a ratio is read against the row above it.
        rows.sort(key=lambda row: row.run_id != base.run_id)
    return Chosen(rows, base.run_id, notes, why)


def _check_experiment(sources: Sources, name: str | None) -> None:
    known = {known for one in sources.each for known in one.experiments()}
    if name is not None and not known & {name, folder_name(name)}:
        if sources.lost is not None:
            raise sources.lost
        listed = ", ".join(sorted(known)) or "none"
        raise RequestError(f"there is no experiment {name!r}: choose one by --experiment (known: {listed})")


def _nothing(selection: Selection) -> str:
    where = f" in the experiment {selection.experiment!r}" if selection.experiment else ""
    tags = " and ".join(f"{key}={value}" for key, value in selection.tags)
    return f"there are no runs{where}" + (f" with the tags {tags}" if tags else "")


def _baseline(sources: Sources, selection: Selection, rows: list[RunRow], swept: list[RunRow]) -> tuple[RunRow, str]:
    """Chooses the baseline, and says why if the user named none."""
    if selection.baseline is not None:
        # Runs of an earlier bench often have the same names.
        named = [row for row in rows if row.name == selection.baseline]
        return named[0] if len(named) == 1 else _outside(sources, selection.baseline, selection.experiment), ""
    if selection.runs:
        return rows[0], "the first run that was named"
    # Runs that a tag adds to a sweep do not take the baseline from it.
    if of_sweep := _fit(swept):
        return of_sweep[0], "the first run of the sweep that finished"
    fit = _fit(rows)
    if swept and not fit:
        return swept[0], "the first run of the sweep"
    if not fit:
        return rows[0], "the oldest of these runs, of which none has finished"
    model = fit[-1].model
    of = f" of {model}" if model is not None else ""
    if any(row.model != model for row in rows):
        of += " (the newest run's model)"
    known = [row for row in fit if row.model == model]
    if eager := [row for row in known if row.backend == "eager"]:
        return eager[0], f"the oldest eager run{of} that finished"
    return known[0], f"the oldest run{of} that finished, as none is eager"


def _outside(sources: Sources, asked: str, experiment: str | None) -> RunRow:
    """Finds a baseline, which may belong to another experiment than the runs."""
    try:
        return sources.find(asked, experiment)
    except RequestError:
        if experiment is None:
            raise
    return sources.find(asked, None)


def _fit(rows: list[RunRow]) -> list[RunRow]:
    """The runs that finished; those with a throughput alone where any has one."""
    finished = [row for row in rows if row.status == "FINISHED"]
    return [row for row in finished if any(row.figure(metric) for metric in RATES)] or finished
