"""Warns of what makes a comparison unfair: one line for each reason, whatever the number of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from ortlaunch.compare.groups import Group, circumstance
from ortlaunch.compare.runs import RATES, RunRow
from ortlaunch.run.events import LOSS
from ortlaunch.run.state import APART_TAG, CODE_TAG, SCRIPT_TAG

OTHER_CPU_PERCENT = 10.0
"""Share of the machine's cores that other processes may use in the steady part without a warning."""
STEADY_WINDOWS = 5
"""With fewer windows the median is unreliable."""
_NAMED = 4
_LENGTH = 12

_SAME_PARAMS = (
    ("train.batch_size", "batch size"),
    ("train.grad_accumulation", "gradient accumulation"),
    ("data.seq_len", "sequence length"),
)
_SAME_TAGS = (
    ("ortlaunch.world_size", "number of workers"),
    ("ortlaunch.data_fingerprint", "data"),
    ("ortlaunch.device", "device"),
    ("ortlaunch.device_name", "device model"),
    ("ortlaunch.torch", "torch"),
    ("ortlaunch.git_commit", "commit of the code"),
    (CODE_TAG, "code of your own"),
)


def warnings(groups: list[Group], metrics: Sequence[str] = ()) -> list[str]:
    """Returns the warnings, the most serious first.

    Args:
        groups: the groups that are compared.
        metrics: the metrics of which every value must be finite, beside the loss.
    """
    rows = [row for group in groups for row in group.rows]
    base = next(group for group in groups if group.is_baseline)
    return [
        *_of_ort(rows),
        *_of_baseline(base),
        *_of_work(groups, base),
        *_of_arithmetic([group for group in groups if group.has_figures], base),
        *_of_circumstances([group for group in groups if group.has_figures], base),
        *_of_runs(rows, (LOSS, *metrics)),
    ]


def _of_ort(rows: list[RunRow]) -> Iterable[str]:
    said = {False: "ortlaunch.ort_active=false", None: "no ortlaunch.ort_active tag"}
    for active, text in said.items():
        if suspects := [row for row in rows if row.suspect and row.ort_active is active]:
            yield (
                f"{_named(map(_name, suspects))}: backend=ort, but nothing shows that ONNX Runtime ran it ({text}); "
                "its figures may be PyTorch's own"
            )


def _of_baseline(base: Group) -> Iterable[str]:
    if SCRIPT_TAG not in base.first.tags and all(base.mean(metric) is None for metric in RATES):
        yield f"{_name(base.first)}, the baseline, has no throughput summary: choose another by --baseline"


def _of_work(groups: list[Group], base: Group) -> Iterable[str]:
    model = base.first.model
    if models := sorted(
        {group.first.model for group in groups if group.speedup and group.first.model and model} - {model}
    ):
        yield f"the speed-up compares different work: {', '.join(map(str, models))} against {model}"
    same = [group for group in groups if group.speedup and group.first.model == model]
    differing = {group.label: _built_otherwise(group.first, base.first) for group in same}
    if keys := sorted(set[str]().union(*differing.values())):
        labels = [label for label, found in differing.items() if found]
        yield f"the speed-up compares different work: another {_named(keys)} than the baseline's in {_named(labels)}"


def _built_otherwise(row: RunRow, base: RunRow) -> set[str]:
    """Returns the keys in which two models of one name differ: the class of a factory, and the builder's arguments."""
    # An argument that a run has not recorded has the builder's default.
    keys = {key for one in (row, base) for key in one.params if key.startswith("model.params.")}
    found = {key for key in keys if row.params.get(key) != base.params.get(key)}
    targets = {one.params.get("model.target") for one in (row, base)} - {None}
    return found | ({"model.target"} if len(targets) > 1 else set())


def _of_arithmetic(groups: list[Group], base: Group) -> Iterable[str]:
    said = {True: "in TF32 where the GPU has it (ONNX Runtime, or train.tf32=true)", False: "in full fp32"}
    reference = _multiplies_in_tf32(base.first)
    others = [group.label for group in groups if _multiplies_in_tf32(group.first) not in (None, reference)]
    if reference is not None and others:
        yield f"fp32 matrices are multiplied {said[not reference]}, the baseline's {said[reference]}: {_named(others)}"


def _multiplies_in_tf32(row: RunRow) -> bool | None:
    """Whether fp32 products are TF32 on a GPU that has it; None on another device, and with another precision."""
    if row.tags.get("ortlaunch.device") != "cuda" or row.params.get("train.precision") != "fp32":
        return None
    # ONNX Runtime's CUDA build uses TF32 unless it is told otherwise, and ORTModule does not tell it.
    return row.ort_active is True or row.params.get("train.tf32") == "true"


def _of_circumstances(groups: list[Group], base: Group) -> Iterable[str]:
    def of_param(key: str) -> Callable[[RunRow], str | None]:
        return lambda row: row.params.get(key)

    def of_tag(key: str) -> Callable[[RunRow], str | None]:
        return lambda row: circumstance(row, key)

    for key, words in _SAME_PARAMS:
        yield from _others(groups, base, f"{words} ({key})", of_param(key))
    for key, words in _SAME_TAGS:
        yield from _others(groups, base, words, of_tag(key))
    if dirty := [group.label for group in groups if group.first.tags.get("ortlaunch.git_dirty") == "true"]:
        yield f"code with changes that are in no commit: {_named(dirty)}"


def _others(groups: list[Group], base: Group, words: str, of: Callable[[RunRow], str | None]) -> Iterable[str]:
    """Lists the groups whose value differs from the baseline's; missing values are ignored."""
    reference = of(base.first)
    others = [(group.label, value) for group in groups if (value := of(group.first)) not in (None, reference)]
    if reference is not None and others:
        named = _named(f"{label} ({_short(str(value))})" for label, value in others)
        yield f"other {words} than the baseline's {_short(reference)}: {named}"


def _of_runs(rows: list[RunRow], metrics: Sequence[str]) -> Iterable[str]:
    if apart := [row for row in rows if APART_TAG in row.tags]:
        named = _named(f"{_name(row)}: {row.tags[APART_TAG]}" for row in apart)
        yield f"the workers exchanged nothing, and each trained a copy of its own: {named}"
    if unfinished := [row for row in rows if row.status != "FINISHED"]:
        yield f"not finished: {_named(f'{_name(row)} {_how_far(row)}' for row in unfinished)}"
    if throttled := [row for row in rows if row.tags.get("ortlaunch.throttled") == "true"]:
        yield f"the GPU throttled its clocks: {_named(map(_name, throttled))}"
    if busy := _having(rows, "summary/other_cpu_percent", lambda percent: percent > OTHER_CPU_PERCENT):
        named = _named(f"{_name(row)} {percent:.0f} %" for row, percent in busy)
        yield f"other processes used more than {OTHER_CPU_PERCENT:.0f} % of the machine's cores: {named}"
    if short := _having(rows, "summary/steady_windows", lambda windows: windows < STEADY_WINDOWS):
        named = _named(f"{_name(row)} {windows:.0f}" for row, windows in short)
        yield f"fewer than {STEADY_WINDOWS} steady windows, a poor median (raise train.steps): {named}"
    for metric in metrics:
        if lost := _having(rows, metric, lambda value: not math.isfinite(value)):
            words = "the last loss" if metric == LOSS else metric
            yield f"{words} is not finite: {_named(_name(row) for row, _ in lost)}"


def _having(rows: list[RunRow], metric: str, holds: Callable[[float], bool]) -> list[tuple[RunRow, float]]:
    return [(row, row.metrics[metric]) for row in rows if metric in row.metrics and holds(row.metrics[metric])]


def _name(row: RunRow) -> str:
    return f"{row.name} ({row.short_id})"


def _how_far(row: RunRow) -> str:
    if row.step is None:
        # Nobody knows the steps of a script.
        return row.status if SCRIPT_TAG in row.tags else f"{row.status}, no step logged"
    steps = row.params.get("train.steps", "")
    # A run that was resumed for more steps may be beyond the number that MLflow has as its parameter.
    of = f" of {steps}" if steps.isdecimal() and int(steps) >= row.step else ""
    return f"{row.status} at step {row.step}{of}"


def _short(value: str) -> str:
    """Shortens commits and fingerprints, which their first characters identify."""
    is_hash = len(value) > _LENGTH and all(char in "0123456789abcdef" for char in value)
    return value[:_LENGTH] if is_hash else value


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _NAMED
    return ", ".join(listed[:_NAMED]) + (f" and {more} more" if more > 0 else "")
