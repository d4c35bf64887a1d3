"""Groups repeats: runs of the same work on the same machine and code, with different seeds."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from ortlaunch.compare.runs import MEMORY, RATES, STEPS_TAKEN, RunRow
from ortlaunch.compare.statistics import Mean, Ratio, mean_of, ratio_interval
from ortlaunch.config.effects import same_work

CIRCUMSTANCES = (
    "ortlaunch.world_size",
    "ortlaunch.device",
    "ortlaunch.device_name",
    "ortlaunch.torch",
    "ortlaunch.cuda",
    "ortlaunch.git_commit",
    "ortlaunch.git_dirty",
    "ortlaunch.data_fingerprint",
)
"""Tags that are no parameters but still make two runs incomparable as repeats."""
_KIND = ("ortlaunch.backend", "ortlaunch.trainer", "ortlaunch.ort_active")


@dataclass(frozen=True)
class Group:
    """Runs of one configuration."""

    label: str
    rows: list[RunRow]
    tokens: Mean | None
    """Mean of the runs' median tokens per second."""
    samples: Mean | None
    peak: Mean | None
    """Mean of the runs' peak memory in GiB."""
    is_baseline: bool = False
    speedup: Ratio | None = None
    memory: Ratio | None = None

    @property
    def first(self) -> RunRow:
        """Represents all runs of the group in what they have in common."""
        return self.rows[0]

    @property
    def has_figures(self) -> bool:
        """Whether there is anything to compare."""
        return any(row.has_figures for row in self.rows)

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

    def mean(self, metric: str) -> Mean | None:
        """Returns the mean of a figure by its name."""
        return {RATES[0]: self.tokens, RATES[1]: self.samples, MEMORY: self.peak}[metric]

    def value(self, metric: str) -> float | None:
        """Returns only the value of the mean."""
        mean = self.mean(metric)
        return None if mean is None else mean.mean


def circumstance(row: RunRow, tag: str) -> str | None:
    """Returns a tag of `CIRCUMSTANCES`; None for the fingerprint of synthetic data, which changes with the seed."""
    if tag == "ortlaunch.data_fingerprint" and row.params.get("data.name") == "synthetic":
        return None
    return row.tags.get(tag)


def grouped(rows: list[RunRow], baseline_id: str) -> list[Group]:
    """Groups repeats, in the order of their first runs, with ratios to the baseline's group."""
    by_key: dict[object, list[RunRow]] = {}
    for row in rows:
        by_key.setdefault(_key(row), []).append(row)
    repeats = _with_crashed(by_key)
    labels = _labels(repeats)
    groups = [_group(label, runs, baseline_id) for label, runs in zip(labels, repeats, strict=True)]
    base = next(group for group in groups if group.is_baseline)
    return [_over(group, base) for group in groups]


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


def _group(label: str, rows: list[RunRow], baseline_id: str) -> Group:
    def mean(metric: str) -> Mean | None:
        return mean_of([value for row in rows if (value := row.figure(metric)) is not None])

    is_baseline = any(row.run_id == baseline_id for row in rows)
    return Group(label, rows, mean(RATES[0]), mean(RATES[1]), mean(MEMORY), is_baseline)


def _over(group: Group, base: Group) -> Group:
    speedups = (_ratio(group, base, metric) for metric in RATES)
    speedup = next((ratio for ratio in speedups if ratio is not None), None)
    return replace(group, speedup=speedup, memory=_ratio(group, base, MEMORY))


def _ratio(group: Group, base: Group, metric: str) -> Ratio | None:
    above, below = group.mean(metric), base.mean(metric)
    if above is None or below is None or not below.mean:
        return None
    interval = None if group.is_baseline else ratio_interval(above, below)
    return Ratio(metric, above.mean / below.mean, above.mean, below.mean, interval)


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
