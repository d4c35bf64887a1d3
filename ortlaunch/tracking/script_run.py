"""A script's own run, as MLflow's interface sees it; see `ortlaunch.tracking.script_store`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from mlflow.entities import (
    DatasetInput,
    Experiment,
    LifecycleStage,
    Metric,
    Param,
    RunData,
    RunInfo,
    RunStatus,
    RunTag,
)
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException
from mlflow.store.entities.paged_list import PagedList
from mlflow.store.tracking.abstract_store import AbstractStore

from ortlaunch.run import events
from ortlaunch.run.journal import Journal, iterate
from ortlaunch.run.key import RunKey
from ortlaunch.run.run import Run
from ortlaunch.run.state import RunState

_OURS = ("ortlaunch.", "mlflow.")
"""Beginnings of tags that a script's MLflow sets by itself, or that are the run's own."""
_NOTE = "mlflow.note.content"
_EXPERIMENT_ID = "0"


class ScriptStore(AbstractStore):
    """One experiment with one run. Whatever run or experiment a script starts, it gets these."""

    def __init__(self, run_dir: Path) -> None:
        """
        Args:
            run_dir: the run folder.
        """
        super().__init__()
        # MLflow logs from threads of its own, too.
        self._lock = Lock()
        self._run = Run(run_dir)
        node = int(os.environ.get("GROUP_RANK", "0"))
        # Only one machine may append to a file of a network file system.
        self._journal = Journal(self._run.spool_file(node) if node else self._run.journal_file, is_patient=True)

    # Experiments

    def get_experiment(self, experiment_id: str) -> Experiment:
        """Returns the run's experiment."""
        return self._experiment(RunState() if not self._run.journal_file.is_file() else self._run.state())

    def get_experiment_by_name(self, experiment_name: str) -> Experiment:
        """Returns the run's experiment, whatever name the script has for its own."""
        return self.get_experiment(_EXPERIMENT_ID)

    def create_experiment(self, name: str, artifact_location: str | None, tags: Any) -> str:
        """Returns the id of the run's experiment."""
        return _EXPERIMENT_ID

    def search_experiments(self, *_: Any, **__: Any) -> PagedList[Experiment]:
        """Returns the run's experiment."""
        return PagedList([self.get_experiment(_EXPERIMENT_ID)], None)

    def set_experiment_tag(self, experiment_id: str, tag: Any) -> None:
        """Passes over a tag of the experiment, which other runs share."""

    # The run

    def create_run(self, experiment_id: str, user_id: str, start_time: int, tags: Any, run_name: str) -> MlflowRun:
        """Returns the run, with tags added."""
        self.log_batch("", [], [], tags or [])
        return self.get_run("")

    def get_run(self, run_id: str) -> MlflowRun:
        """Returns the run as its journal has it."""
        state, params = RunState(), dict[str, str]()
        for event in iterate(self._run.journal_file):
            state.take(event)
            if isinstance(event, events.ParamsSet):
                params |= event.values
        metrics = [Metric(name, value, state.last or 0, 0) for name, value in state.figures.items()]
        data = RunData(
            metrics, [Param(*item) for item in params.items()], [RunTag(*item) for item in state.tags.items()]
        )
        return MlflowRun(self._info(state), data)

    def update_run_info(self, run_id: str, run_status: Any, end_time: int | None, run_name: str | None) -> RunInfo:
        """Returns the run's info. ortlaunch says when the run has ended, because it may be started again."""
        return self._info(self._run.state())

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric], params: Sequence[Param], tags: Sequence[RunTag]
    ) -> None:
        """Journals what the script logs."""
        by_step: dict[int, dict[str, float]] = {}
        for metric in metrics:
            by_step.setdefault(int(metric.step or 0), {})[metric.key] = metric.value
        own = {tag.key: tag.value for tag in tags if tag.key == _NOTE or not tag.key.startswith(_OURS)}
        with self._lock:
            for step, values in by_step.items():
                self._journal.metrics(step, values)
            if params:
                self._journal.params({param.key: param.value for param in params})
            if own:
                self._journal.tags(own)

    def log_inputs(self, run_id: str, datasets: list[DatasetInput] | None = None, models: Any = None) -> None:
        """Journals the data sets."""
        for used in datasets or []:
            self._journal.dataset(used.dataset.name, used.dataset.digest, used.dataset.source)

    def get_metric_history(
        self, run_id: str, metric_key: str, max_results: int | None = None, page_token: str | None = None
    ) -> PagedList[Metric]:
        """Returns a metric's values."""
        found = [
            Metric(metric_key, event.values[metric_key], event.t, event.step)
            for event in iterate(self._run.journal_file)
            if isinstance(event, events.Measured) and metric_key in event.values
        ]
        return PagedList(found, None)

    def _search_runs(self, *_: Any, **__: Any) -> tuple[list[MlflowRun], None]:
        return [self.get_run("")], None

    # What a script's run has not

    def create_logged_model(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses MLflow's models, which only a server has."""
        _refuse("MLflow's models", "save the model into the folder ORTLAUNCH_CHECKPOINTS, or use mlflow.log_artifact")

    def delete_run(self, run_id: str) -> NoReturn:
        """Refuses to delete the run."""
        _refuse("deleting a run", "do it in MLflow after the end of the run")

    def delete_experiment(self, experiment_id: str) -> NoReturn:
        """Refuses to delete the experiment."""
        _refuse("deleting an experiment", "do it in MLflow after the end of the run")

    def rename_experiment(self, experiment_id: str, new_name: str) -> NoReturn:
        """Refuses to rename the experiment."""
        _refuse("renaming an experiment", "give experiment=NAME to ortlaunch")

    def restore_run(self, run_id: str) -> None:
        """Does nothing: the run is there."""

    def restore_experiment(self, experiment_id: str) -> None:
        """Does nothing: the experiment is there."""

    def link_traces_to_run(self, trace_ids: list[str], run_id: str) -> None:
        """Passes over traces, of which none are kept."""

    def _experiment(self, state: RunState) -> Experiment:
        name = state.experiment or "default"
        return Experiment(_EXPERIMENT_ID, name, str(self._run.artifacts), LifecycleStage.ACTIVE)

    def _info(self, state: RunState) -> RunInfo:
        key = str(RunKey.of_folder(self._run.path.name))
        return RunInfo(
            run_id=key,
            experiment_id=_EXPERIMENT_ID,
            user_id="",
            status=RunStatus.to_string(RunStatus.RUNNING),
            start_time=state.began or 0,
            end_time=None,
            lifecycle_stage=LifecycleStage.ACTIVE,
            # MLflow's client writes files there itself; they are kept at the end of the run.
            artifact_uri=self._run.artifacts.as_uri(),
            run_name=state.name,
        )


def _refuse(what: str, remedy: str) -> NoReturn:
    raise MlflowException(f"{what}: the run of a script under ortlaunch does not have that: {remedy}")
