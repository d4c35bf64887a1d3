"""Runs as rows for `ortlaunch jobs` and `ortlaunch status`, read from as few files as possible."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ortlaunch.base.reading import Damage
from ortlaunch.base.start import split_script
from ortlaunch.follow.index import Index
from ortlaunch.follow.state import ACTIVE, SchedulerView, Standing, State, judge, launcher_may_live, may_be_active
from ortlaunch.launch.jobs import FRESH_SECONDS, Job, Jobs
from ortlaunch.launch.launcher import QueueLauncher
from ortlaunch.launch.table import queue_named
from ortlaunch.launch.work import arguments_of
from ortlaunch.run.folders import RunFolder
from ortlaunch.run.record import Record, read_record, scheduler_of
from ortlaunch.run.run import Run, job_key
from ortlaunch.run.state import number


@dataclass(frozen=True)
class Row:
    """One run. None means that a value is not known or does not apply."""

    run_id: str
    name: str
    experiment: str
    launcher: str
    """The name of the launcher."""
    job_id: str | None
    state: State
    reason: str
    is_over: bool
    """Whether only a new launch can change it."""
    nodes: int
    node_list: str
    step: int | None
    steps: int | None
    tokens_per_second: float | None
    """Rate at the latest log step."""
    samples_per_second: float | None
    tokens_per_second_median: float | None
    """Median over the steady steps, as `compare` shows it; only for a run that is over."""
    samples_per_second_median: float | None
    last_loss: float | None
    elapsed_seconds: float | None
    """Duration of the latest attempt."""
    left_seconds: float | None
    """Time to the last step, at the pace of the latest log step."""
    limit_seconds: float | None
    """Time to the scheduler's time limit."""
    restarts: int
    checkpoint: str
    """Name of the newest complete checkpoint, for a run that has not finished."""
    run_dir: str
    updated: float | None
    """When it last journalled something, in seconds since the epoch."""
    ended: float | None
    """When it journalled its end; None if its folder does not say that it has ended."""
    unsent_bytes: int
    """Bytes of its journal that the tracking server has not got yet."""
    params: dict[str, str]
    """What its command line says, by key."""
    figures: dict[str, float]
    """The last value of each metric that tells how good it is."""

    @property
    def has_median(self) -> bool:
        """Whether its rates are medians."""
        return self.tokens_per_second_median is not None or self.samples_per_second_median is not None

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Tokens and samples per second: the medians where there are some, else those of the latest log step."""
        if self.has_median:
            return self.tokens_per_second_median, self.samples_per_second_median
        return self.tokens_per_second, self.samples_per_second

    def as_dict(self) -> dict[str, Any]:
        """Returns the row for JSON. It has neither NaN nor `State`, so these become text."""
        values = asdict(self) | {"state": self.state.value}
        bad = {key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
        return {key: str(value) if key in bad else value for key, value in values.items()}


def row_from(values: dict[str, Any]) -> Row:
    """Returns the row that `Row.as_dict` described."""
    rates = ("tokens_per_second", "samples_per_second", "tokens_per_second_median", "samples_per_second_median")
    floats = (*rates, "last_loss")
    numbers = {key: float(values[key]) for key in floats if isinstance(values[key], str)}
    return Row(**{**values, **numbers, "state": State(values["state"])})


_OF_THE_PLACE = ("run_root", "name", "experiment", "launcher.run", "launcher.dry_run")
_OF_THE_MACHINE = ("startup/", "goodput/", "throughput/", "summary/", "memory/", "gpu/", "system/", "checkpoint/")
_MOST_KEPT = 30
"""Parameters, and figures, of one run."""
_MOST_DAMAGE = 5
_LONGEST_NAME, _LONGEST_REASON = 300, 4000
"""Characters of texts from a run folder that are shown; ortlaunch writes none that are longer."""
FIELDS = {field.name for field in fields(Row)}


class Survey:
    """Reads the rows of runs. It asks each scheduler once for all runs, and reads a run that is over only once."""

    def __init__(self, folders: list[RunFolder], max_age: float = FRESH_SECONDS) -> None:
        """
        Args:
            folders: all run folders that are known.
            max_age: greatest age of a scheduler's cached answer, in seconds.
        """
        self._folders = folders
        self._max_age = max_age
        self.damage: list[Damage] = []
        """The files of the rows' runs that could not be read."""
        self._answers: dict[str, Jobs] = {}
        self._indexes: dict[Path, Index] = {}

    def ask(self, scheduler: str) -> Jobs:
        """Returns a scheduler's answer. The scheduler is asked when the first of its jobs comes up.

        Args:
            scheduler: the name of its launcher.
        """
        if scheduler not in self._answers:
            self._answers[scheduler] = _asked(scheduler, self._max_age)
        return self._answers[scheduler]

    def problem_of(self, row: Row) -> str:
        """Returns why the scheduler of a run's job could not be asked; empty if it has answered, or there is no job."""
        return self.ask(row.launcher).problem if row.job_id else ""

    def _ask_again_if_submitted_since(self, job: dict[str, Any] | None) -> None:
        """Asks a scheduler again if it was asked before this job was submitted, since its answer then lacks the job.

        Args:
            job: the content of job.json; None for a run without a job.
        """
        scheduler, submitted = scheduler_of(job), (job or {}).get("submitted")
        if not scheduler or not isinstance(submitted, float):
            return
        asked = self.ask(scheduler).asked
        if 0 < asked <= submitted:  # 0 means that the scheduler was never asked, for example because it is not here.
            self._answers[scheduler] = _asked(scheduler, 0.0)

    def newest(self, folders: list[RunFolder], last: int) -> list[Row]:
        """Returns all runs that are not over, and the newest of the others to fill `last` rows."""
        active = {folder.place for folder in folders if self._may_be_active(folder)}
        others = [folder for folder in folders if folder.place not in active]
        chosen = active | {folder.place for folder in others[: max(0, last - len(active))]}
        return self.rows(folder for folder in folders if folder.place in chosen)

    def rows(self, folders: Iterable[RunFolder]) -> list[Row]:
        """Returns one row for each of these run folders, in their order."""
        row_at: dict[str, Row] = {}
        records: list[Record] = []
        folders = list(folders)
        for folder in folders:
            entry = self._index(folder).get(folder)
            # Another version of ortlaunch may have written the index with other fields.
            if entry is not None and entry.row is not None and entry.row.keys() == FIELDS:
                row_at[folder.place] = row_from(entry.row)
            else:
                records.append(read_record(folder))
        for record, row in zip(records, self.rows_of(records), strict=True):
            row_at[record.folder.place] = row
            self.damage += record.damage
            # A damaged run is read again next time, so that its damage is told again.
            if row.is_over and not record.damage:
                self._index(record.folder).put(record.folder, record.job_id, row.as_dict())
        return [row_at[folder.place] for folder in folders]

    def row_of(self, record: Record) -> Row:
        """Returns the row of a run whose folder was already read."""
        return self.rows_of([record])[0]

    def job_ids(self) -> dict[str, str]:
        """Returns the job id of each run folder that has a job, by `RunFolder.place`."""
        found = {}
        for folder in self._folders:
            entry = self._index(folder).get(folder)
            key = entry.job_id if entry is not None else job_key(Run(folder.path).job())
            if key is not None:
                found[folder.place] = key
        return found

    def close(self) -> None:
        """Saves the index for the next command."""
        for root, index in self._indexes.items():
            index.save({folder.place for folder in self._folders if folder.root == root})

    def _index(self, folder: RunFolder) -> Index:
        index = self._indexes.get(folder.root)
        if index is None:
            index = self._indexes[folder.root] = Index(folder.root)
        return index

    def _may_be_active(self, folder: RunFolder) -> bool:
        if self._index(folder).get(folder) is not None:
            return False
        run = Run(folder.path)
        job = run.job()
        self._ask_again_if_submitted_since(job)
        if self._goes_on(run, job):
            return True
        self._index(folder).put(folder, job_key(job), None)
        return False

    def _goes_on(self, run: Run, job: dict[str, Any] | None) -> bool:
        key, scheduler = job_key(job), scheduler_of(job)
        if key is None or scheduler is None:
            return launcher_may_live(run)
        answer = self.ask(scheduler)
        return may_be_active(answer.find(key), answer.problem)

    def rows_of(self, records: list[Record]) -> list[Row]:
        """Returns the rows of runs whose folders were read, by what their schedulers say now."""
        for record in records:
            self._ask_again_if_submitted_since(record.job)
        past = self._past_jobs(records)
        rows = []
        for record in records:
            view = self._view(record, past)
            job = (view.job or view.past) if view is not None else None
            rows.append(_row(record, judge(record, view), job))
        return rows

    def _past_jobs(self, records: list[Record]) -> dict[str, Jobs]:
        """Asks for jobs that their schedulers no longer list, if their runs have journalled no end.

        Returns:
            The answers of the schedulers' accounting, by the names of their launchers.
        """
        forgotten: dict[str, list[str]] = {}
        for record in records:
            key, scheduler = record.job_id, record.scheduler
            if key and scheduler and record.ended is None and self.ask(scheduler).find(key) is None:
                forgotten.setdefault(scheduler, []).append(key)
        return {name: _past(name, keys, self._max_age) for name, keys in forgotten.items()}

    def _view(self, record: Record, past: dict[str, Jobs]) -> SchedulerView | None:
        key, scheduler = record.job_id or "", record.scheduler
        if scheduler is None:
            return None
        answer = self.ask(scheduler) if key else Jobs()
        launcher = queue_named(scheduler)
        log = launcher.log if launcher is not None else QueueLauncher.log
        return SchedulerView(
            title_of(scheduler), log, answer.find(key), past.get(scheduler, Jobs()).find(key), answer.problem
        )


def damage_lines(damage: list[Damage]) -> list[str]:
    """Returns a line for each damaged file, of many files only the first ones and how many there are."""
    lines = [str(one) for one in damage[:_MOST_DAMAGE]]
    more = len(damage) - len(lines)
    return [*lines, f"and {more} more files that cannot be read"] if more else lines


def title_of(scheduler: str) -> str:
    """Returns the name in messages of a launcher's scheduler."""
    launcher = queue_named(scheduler)
    return launcher.title if launcher is not None else scheduler


def _asked(scheduler: str, max_age: float) -> Jobs:
    launcher = queue_named(scheduler)
    if launcher is None:
        return Jobs(problem=f"launcher={scheduler} is not installed here")
    return launcher.states(max_age)


def _past(scheduler: str, job_ids: list[str], max_age: float) -> Jobs:
    launcher = queue_named(scheduler)
    return Jobs() if launcher is None else launcher.past_states(job_ids, max_age)


def _row(record: Record, standing: Standing, job: Job | None) -> Row:
    is_active = standing.state in ACTIVE
    runs = standing.state in (State.RUNNING, State.STOPPING)
    host = record.launcher.host if record.launcher is not None else ""
    (tokens, samples), (median_tokens, median_samples) = record.state.rates, record.state.median_rates
    return Row(
        run_id=record.run_id[:_LONGEST_NAME],
        name=record.name[:_LONGEST_NAME],
        experiment=record.experiment[:_LONGEST_NAME],
        launcher=record.scheduler or "local",
        job_id=record.job_id,
        state=standing.state,
        reason=standing.reason[:_LONGEST_REASON],
        is_over=standing.is_over,
        nodes=job.nodes if job is not None and job.nodes else record.state.nodes,
        node_list=job.node_list if job is not None else host,
        step=record.step,
        steps=record.steps,
        tokens_per_second=tokens,
        samples_per_second=samples,
        tokens_per_second_median=median_tokens if standing.is_over else None,
        samples_per_second_median=median_samples if standing.is_over else None,
        last_loss=record.state.loss,
        elapsed_seconds=_elapsed(record, job, runs=runs, is_active=is_active),
        left_seconds=_left(record) if runs else None,
        limit_seconds=job.left if runs and job is not None else None,
        restarts=job.restarts if job is not None else number(record.tags.get(f"{record.scheduler}.restart_count")) or 0,
        checkpoint=record.checkpoint,
        run_dir=str(record.folder.path),
        updated=record.state.last / 1000 if record.state.last is not None else None,
        ended=(record.state.ended_at or 0) / 1000 if record.ended is not None else None,
        unsent_bytes=record.run.unsent_bytes(),
        params=_params(record.run),
        figures=_figures(record.state.figures),
    )


def _params(run: Run) -> dict[str, str]:
    words, script = split_script(run.words())
    given = {key.lstrip("+"): value for key, is_key, value in (word.partition("=") for word in words) if is_key}
    given |= {f"args.{key}": value for key, value in arguments_of(script or []).items()}
    chosen = [key for key in given if key not in _OF_THE_PLACE][:_MOST_KEPT]
    return {key[:_LONGEST_NAME]: given[key].strip("'\"")[:_LONGEST_NAME] for key in chosen}


def _figures(values: dict[str, float]) -> dict[str, float]:
    names = sorted(name for name, value in values.items() if math.isfinite(value))
    chosen = [name for name in names if not name.startswith(_OF_THE_MACHINE)][:_MOST_KEPT]
    return {name: values[name] for name in chosen}


def _elapsed(record: Record, job: Job | None, *, runs: bool, is_active: bool) -> float | None:
    if is_active and not runs:
        return None
    if runs and job is not None:
        return job.elapsed
    began = record.began or record.state.last_began
    if began is None or record.state.last is None:
        return None
    end = time.time() * 1000 if runs else record.state.ended_at or record.state.last
    return max(0.0, (end - began) / 1000)


def _left(record: Record) -> float | None:
    if record.steps is None or record.step is None or record.state.step_seconds is None:
        return None
    return max(0, record.steps - record.step) * record.state.step_seconds
