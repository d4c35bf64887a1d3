"""Finds the MLflow runs that the user selected."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import counted, moment
from ortlaunch.compare.runs import RATES, RunRow, row_of
from ortlaunch.run.names import KIND_TAG, RUN_ID_TAG
from ortlaunch.run.run import Run
from ortlaunch.tracking.sink import PARENT_TAG
from ortlaunch.tracking.store import quoted

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment
    from mlflow.entities import Run as MlflowRun

_PAGE = 1000
_RUNS_PAGE = 500
"""Runs per request; MLflow builds objects several times larger than what is kept of them."""
_SHOWN = 10
_OLDEST_PAGE = 20
LAST = 10
"""Number of an experiment's runs that are compared by default."""
COMPARISON = "comparison"
"""Value of `KIND_TAG` of a run that stores a comparison."""
_NO_TRAINING = ("sweep", COMPARISON)


@dataclass(frozen=True)
class Selection:
    """The runs that the user selected."""

    runs: list[str] = field(default_factory=list)
    """Run folders, ids or names, in the order of the rows."""
    sweep: str | None = None
    tags: list[tuple[str, str]] = field(default_factory=list)
    """Tags that each run must have."""
    experiment: str | None = None
    """The experiment to look in; None looks in all."""
    last: int | None = None
    """How many of the newest selected runs are taken. None takes `LAST`, and the baseline if it is older.

    It applies to runs selected by tags, and to an experiment's runs if nothing else is named.
    """
    baseline: str | None = None


@dataclass(frozen=True)
class Chosen:
    """The selected runs, each once."""

    rows: list[RunRow]
    baseline_id: str
    notes: list[str]
    why: str = ""
    """Why this run is the baseline; empty if the user named it."""


def choose(client: MlflowClient, selection: Selection) -> Chosen:
    """Reads the selected runs.

    Raises:
        RequestError: the experiment or a run does not exist, or no run is selected.
    """
    ids = experiment_ids(client, selection.experiment)
    notes: list[str] = []
    last, more = selection.last or LAST, False
    rows = [row_of(find_run(client, ids, asked)) for asked in selection.runs]
    swept = [] if selection.sweep is None else sweep_runs(client, ids, selection.sweep)
    rows += swept
    if selection.tags or not (selection.runs or selection.sweep is not None):
        try:
            latest, more = latest_runs(client, ids, last, _filter(selection.tags))
        except Exception as error:
            if not selection.tags or getattr(error, "error_code", None) != "INVALID_PARAMETER_VALUE":
                raise
            raise RequestError(f"--tag {_listed(selection.tags)}: MLflow cannot search for this text") from None
        rows += latest
    if not rows:
        raise RequestError(_nothing(selection))
    rows = list({row.run_id: row for row in rows}.values())
    if selection.baseline is None:
        base, why = _default_baseline(client, ids, selection, rows, swept, others=more and selection.last is None)
    else:
        # Runs of an earlier bench often have the same names.
        named = [row for row in rows if row.name == selection.baseline]
        base, why = named[0] if len(named) == 1 else row_of(_baseline(client, ids, selection.baseline)), ""
    is_older = base.run_id not in [row.run_id for row in rows]
    if more:
        notes.append(f"the last {counted(last, 'run')}{' and the baseline' if is_older else ''} only: more by --last N")
    if is_older:
        rows.insert(0, base)
    elif not selection.runs and not swept:
        # Nobody has given these runs an order, and a ratio is read against the row above it.
        rows.sort(key=lambda row: row.run_id != base.run_id)
    return Chosen(rows, base.run_id, notes, why)


def _default_baseline(
    client: MlflowClient,
    ids: list[str],
    selection: Selection,
    rows: list[RunRow],
    swept: list[RunRow],
    *,
    others: bool,
) -> tuple[RunRow, str]:
    """Chooses the baseline if the user names none, and says why; it stays the same while runs are added.

    Args:
        client: the store.
        ids: experiments to look in.
        selection: what the user asked for.
        rows: the selected runs.
        swept: those of them that are of the selected sweep.
        others: whether the baseline may be an older run that was not selected.
    """
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

    def oldest(backend: str | None) -> RunRow | None:
        found = _oldest(client, ids, selection.tags, model, backend) if others else None
        return found or next((row for row in known if backend in (None, row.backend)), None)

    if (eager := oldest("eager")) is not None:
        return eager, f"the oldest eager run{of} that finished"
    return oldest(None) or known[0], f"the oldest run{of} that finished, as none is eager"


def _fit(rows: list[RunRow]) -> list[RunRow]:
    """The runs that finished; those with a throughput alone where any has one."""
    finished = [row for row in rows if row.status == "FINISHED"]
    return [row for row in finished if _has_rate(row)] or finished


def _has_rate(row: RunRow) -> bool:
    return any(row.figure(metric) for metric in RATES)


def _oldest(
    client: MlflowClient, ids: list[str], tags: list[tuple[str, str]], model: str | None, backend: str | None
) -> RunRow | None:
    """Returns the oldest finished run of this model and backend that has a throughput."""
    if model is None or "'" in model:
        return None
    conditions = ["attributes.status = 'FINISHED'", f"params.`model.name` = {quoted(model)}"]
    conditions += [f"tags.`ortlaunch.backend` = {quoted(backend)}"] if backend else []
    conditions += [_filter(tags)] if tags else []
    found = _search(client, ids, " and ".join(conditions), _OLDEST_PAGE, "ASC")
    return next((row for run in found if _has_rate(row := row_of(run))), None)


def _baseline(client: MlflowClient, ids: list[str], asked: str) -> MlflowRun:
    """Finds the baseline, which may belong to another experiment than the runs."""
    try:
        return find_run(client, ids, asked)
    except RequestError as error:
        everywhere = experiment_ids(client, None)
        if len(everywhere) == len(ids):
            raise
        try:
            return find_run(client, everywhere, asked)
        except RequestError:
            raise error from None


def _filter(tags: list[tuple[str, str]]) -> str:
    """Builds the condition in MLflow's search language, which has no escapes."""
    parts = []
    for key, value in tags:
        literal = quoted(value)
        if "`" in key or literal.count(literal[0]) != 2:
            raise RequestError(f"--tag {key}={value}: MLflow cannot search for a text with such quotes in it")
        parts.append(f"tags.`{key}` = {literal}")
    return " and ".join(parts)


def _nothing(selection: Selection) -> str:
    tags = _listed(selection.tags)
    where = f" in the experiment {selection.experiment!r}" if selection.experiment else ""
    return f"there are no runs{where}" + (f" with the tags {tags}" if tags else "")


def _listed(tags: list[tuple[str, str]]) -> str:
    return " and ".join(f"{key}={value}" for key, value in tags)


def experiments(client: MlflowClient) -> list[Experiment]:
    """All experiments of the store that are not deleted."""
    found: list[Experiment] = []
    token = None
    while True:
        page = client.search_experiments(max_results=_PAGE, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def experiment_ids(client: MlflowClient, name: str | None) -> list[str]:
    """Returns the id of the named experiment, or the ids of all.

    Raises:
        RequestError: there is no such experiment; the message lists the existing ones.
    """
    known = experiments(client)
    ids = [experiment.experiment_id for experiment in known if name in (None, experiment.name)]
    if not ids:
        names = ", ".join(sorted(experiment.name for experiment in known)) or "none"
        raise RequestError(f"there is no experiment {name!r}: choose one by --experiment (known: {names})")
    return ids


def latest_runs(client: MlflowClient, ids: list[str], last: int, condition: str = "") -> tuple[list[RunRow], bool]:
    """Returns the `last` newest runs, the oldest of them first, and whether there are more.

    Runs that stand for a sweep or store a comparison are left out, because they train nothing.
    """
    rows: list[RunRow] = []
    for run in _search(client, ids, condition, min(last + 1, _RUNS_PAGE)):
        if run.data.tags.get(KIND_TAG) in _NO_TRAINING:
            continue
        if len(rows) == last:
            return rows[::-1], True
        rows.append(row_of(run))
    return rows[::-1], False


def _search(
    client: MlflowClient, ids: list[str], condition: str, page_size: int, order: str = "DESC"
) -> Iterator[MlflowRun]:
    """Yields all runs under a condition, by default the newest first; at most one page of them is in memory."""
    token = None
    while True:
        by = [f"attributes.start_time {order}"]
        page = client.search_runs(ids, condition, max_results=page_size, order_by=by, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def sweep_runs(client: MlflowClient, ids: list[str], asked: str) -> list[RunRow]:
    """Returns the runs of a sweep in the order of their numbers.

    Args:
        client: the store.
        ids: experiments to look in.
        asked: the sweep's folder, name or run id, as for `find_run`.

    Raises:
        RequestError: there is no such sweep, or MLflow has no run of it.
    """
    parent = find_run(client, ids, asked).info.run_id
    condition = f"tags.`{PARENT_TAG}` = {quoted(parent)}"
    rows = [row_of(run) for run in _search(client, ids, condition, _RUNS_PAGE)]
    if not rows:
        raise RequestError(f"MLflow has no run of a sweep {asked}")
    return sorted(rows, key=lambda row: (int(row.tags.get("ortlaunch.sweep_task", "0")), row.started))


def find_run(client: MlflowClient, ids: list[str], asked: str) -> MlflowRun:
    """Finds the run that the user named.

    Args:
        client: the store.
        ids: experiments to look in.
        asked: a run folder, MLflow's run id or its unique beginning, ortlaunch's short run id, or a run's name.

    Raises:
        RequestError: no run matches, or several do.
    """
    if any(file.is_file() for file in (Run(Path(asked)).journal_file, Run(Path(asked)).relay_file)):
        return _run_of_folder(client, Path(asked))
    for matches in _candidates(client, ids, asked):
        if len(matches) == 1:
            return matches[0]
        if matches:
            listed = "; ".join(_described(run) for run in matches[:_SHOWN])
            raise RequestError(f"{asked!r} means {len(matches)} runs: name one by its id ({listed})")
    _refuse_deleted(client, ids, asked)
    raise RequestError(f"there is no run {asked!r} in this store: give a run's id, its name or its run folder")


def _refuse_deleted(client: MlflowClient, ids: list[str], asked: str) -> None:
    from mlflow.entities import ViewType

    literal = quoted(asked)
    if literal.strip(literal[0]) != asked or literal.count(literal[0]) != 2:
        return
    for attribute in ("run_id", "run_name"):
        found = client.search_runs(ids, f"attributes.{attribute} = {literal}", ViewType.DELETED_ONLY, max_results=1)
        if found:
            raise RequestError(f"the run {asked!r} is deleted in MLflow: restore it there, or name another one")


def _candidates(client: MlflowClient, ids: list[str], asked: str) -> Iterator[list[MlflowRun]]:
    """Yields the runs that match each kind of name, the least ambiguous kind first."""
    literal = quoted(asked)
    if literal.strip(literal[0]) == asked and literal.count(literal[0]) == 2:
        yield list(client.search_runs(ids, f"attributes.run_id = {literal}"))
        yield list(client.search_runs(ids, f"tags.`{RUN_ID_TAG}` = {literal}"))
        yield list(client.search_runs(ids, f"attributes.run_name = {literal}"))
    if re.fullmatch(r"[0-9a-f]{1,32}", asked):
        yield list(client.search_runs(ids, f"attributes.run_id LIKE '{asked}%'"))


def _run_of_folder(client: MlflowClient, folder: Path) -> MlflowRun:
    run_id = Run(folder).mlflow_run_id()
    if run_id is None:
        raise RequestError(
            f"{folder} has not been sent to MLflow: send it with: {shlex.join(['ortlaunch', 'sync', str(folder)])}"
        )
    try:
        run = client.get_run(run_id)
    except Exception as error:
        if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
            raise
        advice = f"name it with --uri (see {Run(folder).relay_file})"
        raise RequestError(f"{folder} was sent to another store: {advice}") from None
    if run.info.lifecycle_stage != "active":
        raise RequestError(f"the run of {folder} is deleted in MLflow: restore it there, or name another one")
    return run


def _described(run: MlflowRun) -> str:
    started = moment((run.info.start_time or 0) / 1000)
    return f"{run.info.run_id} {run.info.run_name} of {started}"
