"""Which MLflow runs a user means."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.errors import RequestError
from ortlaunch.tracking.sink import KIND_TAG, RUN_ID_TAG
from ortlaunch.tracking.store import quoted

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

_PAGE = 1000
_SHOWN = 10


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
    """The id of the named experiment, or the ids of all.

    Raises:
        RequestError: If there is no such experiment; the message lists those there are.
    """
    known = experiments(client)
    ids = [experiment.experiment_id for experiment in known if name in (None, experiment.name)]
    if not ids:
        names = ", ".join(sorted(experiment.name for experiment in known)) or "none"
        raise RequestError(f"there is no experiment {name!r}: choose one by --experiment (known: {names})")
    return ids


def latest_runs(client: MlflowClient, ids: list[str], last: int) -> list[Run]:
    """The `last` runs that started last, the oldest of them first; runs that only stand for a sweep are left out."""
    runs: list[Run] = []
    token = None
    while len(runs) < last:
        page = client.search_runs(ids, max_results=last, order_by=["attributes.start_time DESC"], page_token=token)
        runs += [run for run in page if run.data.tags.get(KIND_TAG) != "sweep"]
        token = page.token
        if not token:
            break
    return runs[:last][::-1]


def sweep_runs(client: MlflowClient, ids: list[str], asked: str) -> list[Run]:
    """The runs of a sweep in the order of their numbers.

    Args:
        client: The store.
        ids: Experiments to look in.
        asked: The sweep, as `find_run` takes runs: its folder, its name, or its run id.

    Raises:
        RequestError: If there is no such sweep, or MLflow knows no run of it.
    """
    parent = find_run(client, ids, asked).info.run_id
    runs: list[Run] = []
    token = None
    while True:
        literal = f"tags.`mlflow.parentRunId` = {quoted(parent)}"
        page = client.search_runs(ids, literal, max_results=_PAGE, page_token=token)
        runs += page
        token = page.token
        if not token:
            break
    if not runs:
        raise RequestError(f"{asked} is no sweep that MLflow knows a run of")
    return sorted(runs, key=lambda run: (int(run.data.tags.get("ortlaunch.sweep_task", "0")), run.info.start_time or 0))


def find_run(client: MlflowClient, ids: list[str], asked: str) -> Run:
    """The run that a user names.

    Args:
        client: The store.
        ids: Experiments to look in.
        asked: A run folder, MLflow's run id or its unique beginning, ortlaunch's short run id, or a run's name.

    Raises:
        RequestError: If no run or more than one is meant.
    """
    if any((Path(asked) / file).is_file() for file in ("journal.jsonl", "relay.json")):
        return _run_of_folder(client, Path(asked))
    for matches in _candidates(client, ids, asked):
        if len(matches) == 1:
            return matches[0]
        if matches:
            listed = "; ".join(_described(run) for run in matches[:_SHOWN])
            raise RequestError(f"{asked!r} means {len(matches)} runs: name one by its id ({listed})")
    raise RequestError(f"there is no run {asked!r} in this store: give a run's id, its name or its run folder")


def _candidates(client: MlflowClient, ids: list[str], asked: str) -> Iterator[list[Run]]:
    """Runs that may be meant, the surest reading first."""
    literal = quoted(asked)
    if literal.strip(literal[0]) == asked and literal.count(literal[0]) == 2:
        yield list(client.search_runs(ids, f"attributes.run_id = {literal}"))
        yield list(client.search_runs(ids, f"tags.`{RUN_ID_TAG}` = {literal}"))
        yield list(client.search_runs(ids, f"attributes.run_name = {literal}"))
    if re.fullmatch(r"[0-9a-f]{1,32}", asked):
        yield list(client.search_runs(ids, f"attributes.run_id LIKE '{asked}%'"))


def _run_of_folder(client: MlflowClient, folder: Path) -> Run:
    try:
        run_id = json.loads((folder / "relay.json").read_text())["mlflow_run_id"]
        if not isinstance(run_id, str):
            raise ValueError("no run id")
    except (OSError, ValueError, KeyError, TypeError):
        raise RequestError(f"{folder} has not been sent to MLflow: send it with: ortlaunch sync {folder}") from None
    try:
        return client.get_run(run_id)
    except Exception as error:
        if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
            raise
        advice = f"name it with --uri (see {folder / 'relay.json'})"
        raise RequestError(f"{folder} was sent to another store: {advice}") from None


def _described(run: Run) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((run.info.start_time or 0) / 1000))
    return f"{run.info.run_id} {run.info.run_name} of {started}"
