"""Where runs are found: an MLflow store, and the run folders. Nothing is created in either."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import redacted, scrubbed
from ortlaunch.base.text import moment
from ortlaunch.compare.runs import RunRow, of_folder, of_mlflow, points_of
from ortlaunch.config.tracking_uri import check_uri, sqlite_path
from ortlaunch.launch.plan import folder_name
from ortlaunch.run.folders import RunFolder, scan
from ortlaunch.run.names import KIND_TAG, RUN_ID_TAG
from ortlaunch.run.roots import RUN_ROOT, known_roots
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import find_sweep, runs_of
from ortlaunch.tracking import sqlite_store
from ortlaunch.tracking.forward import cause_of
from ortlaunch.tracking.sink import PARENT_TAG
from ortlaunch.tracking.store import open_client, quoted

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.entities import Run as MlflowRun

    from ortlaunch.tracking.translate import Point

_PAGE = 1000
_RUNS_PAGE = 500
"""Runs per request; MLflow builds objects several times larger than what is kept of them."""
_TIMEOUT_SECONDS = 30
_SHOWN = 10
_NO_TRAINING = ("sweep", "comparison")
"""Values of `KIND_TAG` of runs that train nothing. Versions of before 0.1 stored comparisons."""
Tagged = Sequence[tuple[str, str]]


class Store:
    """An MLflow store."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client
        page = client.search_experiments(max_results=_PAGE)
        found = list(page)
        while page.token:
            page = client.search_experiments(max_results=_PAGE, page_token=page.token)
            found += page
        self._ids = {one.name: one.experiment_id for one in found}

    def experiments(self) -> Iterable[str]:
        """Returns the names of the experiments that are not deleted."""
        return self._ids

    def latest(self, experiment: str | None, tags: Tagged, most: int) -> Iterator[RunRow]:
        """Yields the runs with these tags, the newest first."""
        try:
            for run in self._search(experiment, _condition(tags), min(most, _RUNS_PAGE)):
                if run.data.tags.get(KIND_TAG) not in _NO_TRAINING:
                    yield of_mlflow(run)
        except Exception as error:
            if not tags or getattr(error, "error_code", None) != "INVALID_PARAMETER_VALUE":
                raise
            listed = " and ".join(f"{key}={value}" for key, value in tags)
            raise RequestError(f"--tag {listed}: MLflow cannot search for this text") from None

    def named(self, experiment: str | None, asked: str) -> list[RunRow]:
        """Returns the runs that match by the least ambiguous kind of name that matches."""
        literal = _literal(asked)
        conditions = [f"attributes.run_id LIKE '{asked}%'"] if re.fullmatch(r"[0-9a-f]{1,32}", asked) else []
        if literal is not None:
            names = ("attributes.run_id", f"tags.`{RUN_ID_TAG}`", "attributes.run_name")
            conditions = [*(f"{name} = {literal}" for name in names), *conditions]
        found = (list(self._search(experiment, condition, _RUNS_PAGE)) for condition in conditions)
        return [of_mlflow(run) for run in next(filter(None, found), [])]

    def swept(self, experiment: str | None, asked: str) -> list[RunRow]:
        """Returns the runs of a sweep in the order of their numbers; empty if there is no such sweep."""
        parent = only(asked, self.named(experiment, Run(Path(asked)).mlflow_run_id() or asked))
        condition = f"tags.`{PARENT_TAG}` = {quoted(parent.run_id if parent else '')}"
        found = map(of_mlflow, self._search(experiment, condition, _RUNS_PAGE) if parent else ())
        return sorted(found, key=lambda row: (int(row.tags.get("ortlaunch.sweep_task", "0")), row.started))

    def history(self, row: RunRow, metric: str) -> Sequence[Metric]:
        """Returns all points of a metric of a run."""
        found: Sequence[Metric] = self._client.get_metric_history(row.run_id, metric)
        return found

    def _search(self, experiment: str | None, condition: str, page_size: int) -> Iterator[MlflowRun]:
        """Yields all runs under a condition, the newest first; at most one page of them is in memory."""
        ids = [number for name, number in self._ids.items() if experiment in (None, name)]
        by, token = ["attributes.start_time DESC"], None
        while ids:
            page = self._client.search_runs(ids, condition, max_results=page_size, order_by=by, page_token=token)
            yield from page
            token = page.token
            if not token:
                return


def _condition(tags: Tagged) -> str:
    """Builds the condition in MLflow's search language, which has no escapes."""
    parts = []
    for key, value in tags:
        literal = _literal(value)
        if "`" in key or literal is None:
            raise RequestError(f"--tag {key}={value}: MLflow cannot search for a text with such quotes in it")
        parts.append(f"tags.`{key}` = {literal}")
    return " and ".join(parts)


def _literal(text: str) -> str | None:
    """A text in MLflow's search language; None if it cannot be written there."""
    literal = quoted(text)
    return literal if literal.strip(literal[0]) == text and literal.count(literal[0]) == 2 else None


@dataclass(frozen=True)
class Folders:
    """The run folders below this folder and, of runs that are named, in all known run roots."""

    only_unsent: bool
    """Whether runs that were sent to MLflow are left out, as they are found there."""

    def experiments(self) -> Iterable[str]:
        """Returns the names of the experiments as they are in paths."""
        return {one.experiment for one in scan([RUN_ROOT.absolute()])}

    def latest(self, experiment: str | None, tags: Tagged, most: int) -> Iterator[RunRow]:
        """Yields the runs with these tags, the newest first."""
        found = self._below([RUN_ROOT.absolute()], experiment)
        # The newest runs that were never sent are among the newest folders. Those with a tag may be anywhere.
        for folder in found if tags else islice(found, most):
            if not self._is_left_out(folder):
                # What has no readable journal is no run that anybody has named.
                with suppress(RequestError):
                    row = of_folder(folder.path)
                    if all(row.tags.get(key) == value for key, value in tags):
                        yield row

    def named(self, experiment: str | None, asked: str) -> list[RunRow]:
        """Returns the runs that match by id, name or the beginning of an id."""
        found = [one for one in self._below(known_roots(), experiment) if not self._is_left_out(one)]
        exact = [one for one in found if asked in (one.run_id, one.name)]
        exact = exact or [one for one in found if one.name == folder_name(asked) or one.run_id.startswith(asked)]
        return [of_folder(one.path) for one in exact] if asked else []

    def swept(self, experiment: str | None, asked: str) -> list[RunRow]:
        """Returns the runs of a sweep in the order of their numbers; empty if there is no such sweep."""
        folder = find_sweep(asked, known_roots())
        runs = runs_of(folder) or [] if folder is not None else []
        return [of_folder(run) for run in runs if Run(run).journal_file.is_file()]

    def _below(self, roots: list[Path], experiment: str | None) -> Iterator[RunFolder]:
        return (one for one in scan(roots) if experiment is None or one.experiment == folder_name(experiment))

    def _is_left_out(self, folder: RunFolder) -> bool:
        return self.only_unsent and Run(folder.path).mlflow_run_id() is not None


_ALL = Folders(only_unsent=False)


@dataclass(frozen=True)
class Sources:
    """The places in which runs are looked for."""

    uri: str = ""
    """The store, without credentials; empty if it is not read."""
    store: Store | None = None
    folders: Folders | None = _ALL
    """None if the user has named a store: runs without one belong to none."""
    lost: RequestError | None = None
    """Why the store is not read."""

    @property
    def each(self) -> list[Store | Folders]:
        """The places in the order in which they are asked."""
        return [one for one in (self.store, self.folders) if one is not None]

    def find(self, asked: str, experiment: str | None) -> RunRow:
        """Finds the run that the user named.

        Args:
            asked: a run folder, MLflow's run id or its unique beginning, ortlaunch's short run id, or a run's name.
            experiment: the experiment to look in.

        Raises:
            RequestError: no run matches, or several do.
        """
        is_path = Run(Path(asked)).journal_file.is_file()
        found = [of_folder(Path(asked).absolute())] if is_path else []
        found = found or [row for one in self.each for row in one.named(experiment, asked)]
        if (row := only(asked, found)) is not None:
            if row.tags.get(KIND_TAG) == "sweep":
                raise RequestError(f"{asked} is a sweep: compare its runs by --sweep {asked}")
            return row
        where = "in " + " or ".join(filter(None, (self.uri, "the run folders" if self.folders else "")))
        more = f" ({self.lost})" if self.lost is not None else ""
        raise RequestError(f"there is no run {asked!r} {where}: give a run's id, its name or its run folder{more}")

    def swept(self, asked: str, experiment: str | None) -> list[RunRow]:
        """Returns the runs of a sweep; those of a folder are read there.

        Raises:
            RequestError: there is no such sweep, several match, or there is no run of it.
        """
        places = [_ALL, *self.each] if Path(asked).is_dir() else self.each
        if rows := next(filter(None, (one.swept(experiment, asked) for one in places)), None):
            return rows
        raise RequestError(f"there is no sweep {asked!r} with runs: give its folder, its name or its run id")

    def histories(self, row: RunRow, metrics: Sequence[str]) -> Mapping[str, Sequence[Metric | Point]]:
        """Returns all points of some metrics of a run."""
        if row.folder is not None or self.store is None:
            return points_of(row.folder or Path(), metrics)
        return {metric: self.store.history(row, metric) for metric in metrics}


def is_here(asked: str) -> bool:
    """Whether a text is the path of a run, or of a sweep of which a run is there, so that no store is needed."""
    runs = runs_of(Path(asked))
    return any(Run(run).journal_file.is_file() for run in ([Path(asked)] if runs is None else runs))


def only(asked: str, rows: list[RunRow]) -> RunRow | None:
    """Returns the one run that a text means; None if there is none.

    Raises:
        RequestError: there are several.
    """
    if len(rows) > 1:
        some = [f"{row.run_id} {row.name} of {moment(row.started / 1000)}" for row in rows[:_SHOWN]]
        raise RequestError(f"{asked!r} means {len(rows)} runs: name one by its id ({'; '.join(some)})")
    return rows[0] if rows else None


@contextmanager
def reading(uri: str, *, is_named: bool, paths: Sequence[str] = ()) -> Iterator[Sources]:
    """Yields a store and the run folders; the folders alone if the store is not needed or cannot be read.

    Args:
        uri: the store's absolute tracking URI.
        is_named: whether the user has named the store: it is then read alone, and must be readable.
        paths: the runs and sweeps that the user named, if these are all.

    Raises:
        RequestError: a store that the user has named cannot be read, or a store cannot be read any more.
    """
    if paths and all(map(is_here, paths)):
        yield Sources()
        return
    with ExitStack() as stack:
        try:
            client = stack.enter_context(opened(uri))
        except RequestError as error:
            if is_named:
                raise
            sources = Sources(lost=error)
        else:
            sources = Sources(redacted(uri), Store(client), None if is_named else Folders(only_unsent=True))
        yield sources


@contextmanager
def opened(uri: str) -> Iterator[MlflowClient]:
    """Yields a client of the store at an absolute tracking URI.

    Raises:
        RequestError: the store does not exist or cannot be read; the message has no credentials.
    """
    check_uri(uri)
    _check_database(uri)
    try:
        yield open_client(uri, _TIMEOUT_SECONDS)
    except RequestError as error:
        raise RequestError(scrubbed(str(error), uri)) from None
    except Exception as error:
        text = cause_of(error, lambda said: scrubbed(said, uri))
        raise RequestError(
            f"cannot read the MLflow store {redacted(uri)}: {text} (another store: --uri, or MLFLOW_TRACKING_URI)"
        ) from None


def _check_database(uri: str) -> None:
    """Refuses a missing, half-made or foreign database: MLflow would create the first and change the others."""
    path = sqlite_path(uri)
    if path is None:
        return
    if not path.is_file():
        raise RequestError(f"there is no MLflow store at {path}: start a run first, or name another store by --uri")
    try:
        sqlite_store.check(path)
        is_store = sqlite_store.look(path).state not in (sqlite_store.State.ABSENT, sqlite_store.State.FOREIGN)
    except sqlite3.Error as error:
        raise RequestError(f"{path} is no MLflow store ({error}): name another one by --uri") from None
    if not is_store:
        raise RequestError(f"{path} is no MLflow store: name another one by --uri")
