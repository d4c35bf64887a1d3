"""Groups repeats: runs of the same work on the same machine and code, with different seeds."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from ortlaunch.compare.runs import MEMORY, RATES, STEPS_TAKEN, RunRow
from ortlaunch.compare.statistics import Change, Mean, Ratio, difference_interval, mean_of, ratio_interval
from ortlaunch.config.effects import same_work
from ortlaunch.run.state import CODE_TAG

CIRCUMSTANCES = (
    "ortlaunch.world_size",
    "ortlaunch.device",
    "ortlaunch.device_name",
    "ortlaunch.torch",
    "ortlaunch.cuda",
    "ortlaunch.git_commit",
    "ortlaunch.git_dirty",
    "ortlaunch.data_fingerprint",
    CODE_TAG,
)
"""Tags that are no parameters but still make two runs incomparable as repeats."""
_KIND = ("ortlaunch.backend", "ortlaunch.trainer", "ortlaunch.ort_active")


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, and the group that it is compared with."""

    label: str
    rows: list[RunRow]
    base: Group | None = None
    """The baseline; None if this group is it."""

    @property
    def is_baseline(self) -> bool:
        """Whether all ratios refer to this group."""
        return self.base is None

    @property
    def first(self) -> RunRow:
        """Represents all runs of the group in what they have in common."""
        return self.rows[0]

    @property
    def has_figures(self) -> bool:
        """Whether there is anything to compare."""
        return any(row.has_figures for row in self.rows)

    @property
    def is_doubtful(self) -> bool:
        """Whether a run did not finish, or ONNX Runtime may not have run it."""
        return any(row.suspect or row.status != "FINISHED" for row in self.rows)

    @property
    def seeds(self) -> list[str]:
        """The seeds of the group's runs."""
        return sorted({row.params["seed"] for row in self.rows if "seed" in row.params}, key=lambda s: (len(s), s))

    @property
    def status(self) -> str:
        """How the runs ended, such as FINISHED, or 2 FINISHED 1 FAILED."""
        statuses = [row.status for row in self.rows]
        kinds = sorted(set(statuses), key=lambda status: (status != "FINISHED", status))
        return kinds[0] if len(kinds) == 1 else " ".join(f"{statuses.count(kind)} {kind}" for kind in kinds)

    @property
    def loss(self) -> float | None:
        """The mean of the last losses, also where one is no number."""
        losses = [row.last_loss for row in self._counted if row.last_loss is not None]
        return math.fsum(losses) / len(losses) if losses else None

    @property
    def speedup(self) -> Ratio | None:
        """The ratio of the rates."""
        return next((ratio for metric in RATES if (ratio := self._ratio(metric)) is not None), None)

    @property
    def memory(self) -> Ratio | None:
        """The ratio of the memory."""
        return self._ratio(MEMORY)

    def mean(self, metric: str) -> Mean | None:
        """Returns the mean of a metric's finite values."""
        return mean_of([value for row in self._counted if (value := row.figure(metric)) is not None])

    def value(self, metric: str) -> float | None:
        """Returns only the value of the mean."""
        mean = self.mean(metric)
        return None if mean is None else mean.mean

    def change(self, metric: str) -> Change | None:
        """Returns the difference to the baseline; None if either has no value."""
        mean, other = self.mean(metric), (self.base or self).mean(metric)
        if mean is None or other is None:
            return None
        interval = None if self.base is None else difference_interval(mean, other)
        return Change(metric, mean.mean - other.mean, mean.mean, other.mean, interval)

    def _ratio(self, metric: str) -> Ratio | None:
        above, below = self.mean(metric), (self.base or self).mean(metric)
        if above is None or below is None or not below.mean:
            return None
        interval = None if self.base is None else ratio_interval(above, below)
        return Ratio(metric, above.mean / below.mean, above.mean, below.mean, interval)

    @property
    def _counted(self) -> list[RunRow]:
        """The runs that finished, as others ended earlier; all if none finished."""
        return [row for row in self.rows if row.status == "FINISHED"] or self.rows


def circumstance(row: RunRow, tag: str) -> str | None:
    """Returns a tag of `CIRCUMSTANCES`; None for the fingerprint of synthetic data, which changes with the seed."""
    if tag == "ortlaunch.data_fingerprint" and row.params.get("data.name") == "synthetic":
        return None
    return row.tags.get(tag)


def grouped(rows: list[RunRow], baseline_id: str, *, each: bool = False) -> list[Group]:
    """Groups repeats, in the order of their first runs.

    Args:
        rows: the runs.
        baseline_id: the run whose group the others are compared with.
        each: whether each run is a group of its own.
    """
    by_key: dict[object, list[RunRow]] = {}
    for row in rows:
        by_key.setdefault(row.run_id if each else _key(row), []).append(row)
    repeats = list(by_key.values()) if each else _with_crashed(by_key)
    pairs = list(zip(_labels(repeats), repeats, strict=True))
    bases = [Group(label, runs) for label, runs in pairs if any(row.run_id == baseline_id for row in runs)]
    return [bases[0] if runs is bases[0].rows else Group(label, runs, bases[0]) for label, runs in pairs]


def _with_crashed(by_key: dict[object, list[RunRow]]) -> list[list[RunRow]]:
    """Adds runs that broke off to the repeats with the same parameters; their number of steps is not known."""
    ends: dict[object, list[object]] = {}
    for key, rows in by_key.items():
        if STEPS_TAKEN in rows[0].params:
            ends.setdefault(_key(rows[0], without=STEPS_TAKEN), []).append(key)
    joined = {key: list(rows) for key, rows in by_key.items()}
    for key, rows in by_key.items():
        if len(same := ends.get(key, [])) == 1 and all(row.status != "FINISHED" for row in rows):
            joined[same[0]] += joined.pop(key)
    return list(joined.values())


def _key(row: RunRow, without: str = "") -> object:
    params = frozenset((key, value) for key, value in row.params.items() if not same_work(key) and key != without)
    if not params:
        return row.run_id  # The configuration is not known, so the run is no repeat of another.
    return params, tuple(circumstance(row, tag) for tag in CIRCUMSTANCES), tuple(row.tags.get(tag) for tag in _KIND)


def _labels(groups: list[list[RunRow]]) -> list[str]:
    """Names each group without the seed; equal names are extended by a run id."""
    names = [_common_name(rows) for rows in groups]
    count = Counter(names)
    pairs = zip(names, groups, strict=True)
    return [name if count[name] == 1 else f"{name} ({rows[0].short_id})" for name, rows in pairs]


def _common_name(rows: list[RunRow]) -> str:
    if len(rows) == 1:
        return rows[0].name
    # A sweep names its runs by the keys in the order of the command line, so the seed is not always the last.
    return re.sub(r"-seed=[^-=]*(?=-|$)", "", rows[0].name) or rows[0].name
