"""Executes a run's operations in MLflow. No other module writes to MLflow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ortlaunch.base.text import library_error
from ortlaunch.base.user import user_name
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.config.tracking_uri import artifact_location, sqlite_path
from ortlaunch.run.names import RUN_ID_TAG, SWEEP_TAG
from ortlaunch.tracking import sqlite_store
from ortlaunch.tracking.store import open_client, patience, quoted
from ortlaunch.tracking.tracker import Context, Identity, RecordLost, RecordRefused, Sink
from ortlaunch.tracking.translate import Artifact, Ended, Input, Operation, Params, Point, Points, Reopened, Tags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun

PARENT_TAG = "mlflow.parentRunId"
"""MLflow's own tag with the id of the parent run."""
_POINTS_PER_CALL = 1000
_VALUES_PER_CALL = 100
_UNKNOWN = "RESOURCE_DOES_NOT_EXIST"
_REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", _UNKNOWN, "BAD_REQUEST")
_ARTIFACT_TRIES = 3
_ARTIFACT_SECONDS = 120
_SETTLE_SECONDS = 1.0

Item = TypeVar("Item")


class MlflowSink(Sink):
    """One run in MLflow. Its mark is MLflow's id of the run.

    If MLflow cannot be reached, methods pass on its exceptions. The caller tries again later, which is harmless. What
    MLflow refuses for good is left out.
    """

    def __init__(self, cfg: MlflowConfig, context: Context) -> None:
        """
        Args:
            cfg: the store.
            context: the run.
        """
        self._cfg = cfg
        self._context = context
        self._run_dir = context.run_dir
        self._log = context.log
        self._opened: MlflowClient | None = None
        self._run_id = ""
        self._create_unanswered = False
        self._artifact_failures: dict[Artifact, int] = {}

    def holds(self, mark: str) -> bool:
        """Whether an embedded store has the run. A server is not asked, because it may not answer."""
        path = sqlite_path(self._cfg.uri)
        return path is None or sqlite_store.has_run(path, mark)

    def open(self, identity: Identity, mark: str | None) -> str:
        """Connects, and finds or creates the run.

        Args:
            identity: the run's names and start time.
            mark: MLflow's id of the run, if the run was created before.

        Returns:
            MLflow's id of the run.
        """
        self._connect()
        self._run_id = mark or self._found_or_created(identity)
        return self._run_id

    def has_lost(self, mark: str) -> bool:
        """Whether a server has no such run, for example because its database was replaced. Of a file, `holds` tells."""
        if sqlite_path(self._cfg.uri) is not None:
            return False
        try:
            self._connect().get_run(mark)
        except Exception as error:
            if getattr(error, "error_code", None) != _UNKNOWN:
                raise
            return True
        return False

    def send(self, operation: Operation) -> None:
        """Executes one operation."""
        if isinstance(operation, Points):
            self._send_points(operation.points)
        elif isinstance(operation, Params):
            self._send_params(operation.values)
        elif isinstance(operation, Tags):
            self._send_tags(operation.values)
        elif isinstance(operation, Artifact):
            self._send_artifact(operation)
        elif isinstance(operation, Input):
            self._send_input(operation)
        elif isinstance(operation, Reopened):
            self._attempt("the new start", lambda: self._client.update_run(self._run_id, status="RUNNING"))
        else:
            self._end(operation)

    def _connect(self) -> MlflowClient:
        if self._opened is None:
            self._opened = open_client(self._cfg.uri, self._cfg.timeout_seconds)
        return self._opened

    @property
    def _client(self) -> MlflowClient:
        if self._opened is None:
            raise RuntimeError("open() comes before send()")
        return self._opened

    def _end(self, operation: Ended) -> None:
        self._attempt(
            f"the end {operation.status}",
            lambda: self._client.set_terminated(self._run_id, operation.status, end_time=operation.t),
        )

    def _found_or_created(self, identity: Identity) -> str:
        experiment = self._cfg.experiment_name or identity.experiment
        experiment_id = self._experiment_id(experiment)
        found = self._find(experiment_id, identity)
        if found is None and self._create_unanswered:
            # The server may still be processing an earlier request that got no answer.
            time.sleep(_SETTLE_SECONDS)
            found = self._find(experiment_id, identity)
        if found is not None:
            self._log.info("going on with the MLflow run %s", found.info.run_id)
            return str(found.info.run_id)
        self._create_unanswered = True
        tags = {RUN_ID_TAG: identity.run_id, "mlflow.user": user_name(), "mlflow.source.name": "ortlaunch"}
        run = self._client.create_run(experiment_id, start_time=identity.t, tags=tags, run_name=identity.name)
        self._log.info("created the MLflow run %s in the experiment %r", run.info.run_id, experiment)
        return str(run.info.run_id)

    def _find(self, experiment_id: str, identity: Identity) -> MlflowRun | None:
        # Two runs may have the same short id in a store that many machines use. Their start times in ms differ.
        same = f"tags.`{RUN_ID_TAG}` = {quoted(identity.run_id)} and attributes.start_time = {identity.t}"
        runs = self._client.search_runs([experiment_id], same, max_results=1)
        return runs[0] if runs else None

    def _experiment_id(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=self._artifact_location(name)))
            except Exception as error:
                # Another run may have created it in between.
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None and getattr(error, "error_code", None) in _REFUSALS:
                    raise RecordRefused(f"MLflow refuses the experiment {name!r}: {library_error(error)}") from error
                if experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            raise RecordRefused(
                f"the experiment {name!r} is deleted in MLflow: restore it, or send the run to another store"
            )
        return str(experiment.experiment_id)

    def _artifact_location(self, experiment: str) -> str | None:
        """The URI of an experiment's artifacts in an embedded store; None for a server, which has its own."""
        return artifact_location(self._cfg.artifacts, experiment) if sqlite_path(self._cfg.uri) else None

    def _send_points(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(point.key, point.value, point.timestamp, point.step) for point in points]
        for part in _parts(metrics, _POINTS_PER_CALL):
            self._send_or_split(
                part,
                lambda some: self._client.log_batch(self._run_id, metrics=some),
                lambda metric: f"the metric {metric.key!r} at step {metric.step}",
            )

    def _send_params(self, values: dict[str, str]) -> None:
        from mlflow.entities import Param

        for part in _parts([Param(key, value) for key, value in values.items()], _VALUES_PER_CALL):
            self._send_or_split(
                part,
                lambda some: self._client.log_batch(self._run_id, params=some),
                lambda param: f"the parameter {param.key!r}",
            )

    def _send_tags(self, values: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        values = values | self._parent(values)
        for part in _parts([RunTag(key, value) for key, value in values.items()], _VALUES_PER_CALL):
            self._send_or_split(
                part,
                lambda some: self._client.log_batch(self._run_id, tags=some),
                lambda tag: f"the tag {tag.key!r}",
            )

    def _parent(self, values: dict[str, str]) -> dict[str, str]:
        """The tag with the parent run's id, if the tags name a sweep."""
        if SWEEP_TAG not in values:
            return {}
        parent = self._context.mark_of(Path(values[SWEEP_TAG]))
        return {} if parent is None else {PARENT_TAG: parent}

    def _send_or_split(
        self, items: Sequence[Item], send: Callable[[Sequence[Item]], object], describe: Callable[[Item], str]
    ) -> None:
        """Sends the items. If MLflow refuses them, it sends each half alone, and leaves out single items it refuses."""
        if len(items) == 1:
            self._attempt(describe(items[0]), lambda: send(items))
            return
        try:
            send(items)
        except Exception as error:
            if not self._is_refusal(error):
                raise
            middle = len(items) // 2
            self._send_or_split(items[:middle], send, describe)
            self._send_or_split(items[middle:], send, describe)

    def _send_artifact(self, artifact: Artifact) -> None:
        path = self._run_dir / artifact.path
        if not path.exists():
            self._refuse(f"the artifact {artifact.path}", "no such file")
            return
        try:
            with patience(_ARTIFACT_SECONDS):
                self._client.log_artifact(self._run_id, str(path), artifact.artifact_path or None)
        except Exception as error:
            # An artifact store can fail while the tracking server works. A file that fails again and again must then
            # not delay the run's end. It stays in the run folder.
            self._check_run()
            failures = self._artifact_failures[artifact] = self._artifact_failures.get(artifact, 0) + 1
            if failures < _ARTIFACT_TRIES and not self._is_refusal(error):
                raise
            self._refuse(f"the artifact {artifact.path}", error)

    def _send_input(self, data: Input) -> None:
        """Sends a dataset of the run. MLflow stores a dataset with the same name and digest only once."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(data.name, data.digest, source_type="ortlaunch", source=data.source)
        used = DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
        self._attempt(f"the dataset {data.name!r}", lambda: self._client.log_inputs(self._run_id, datasets=[used]))

    def _attempt(self, what: str, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:
            if not self._is_refusal(error):
                raise
            self._refuse(what, error)

    def _refuse(self, what: str, why: object) -> None:
        self._context.refuse(what, why)

    def _is_refusal(self, error: Exception) -> bool:
        """Whether MLflow refused this request as wrong, although the run exists and can be read."""
        if getattr(error, "error_code", None) not in _REFUSALS:
            return False
        self._check_run()
        return True

    def _check_run(self) -> None:
        try:
            run = self._client.get_run(self._run_id)
        except Exception as error:
            if getattr(error, "error_code", None) == _UNKNOWN:
                raise RecordLost(f"MLflow has no run {self._run_id} any more") from error
            raise
        if run.info.lifecycle_stage != "active":
            raise RecordRefused(f"the run {self._run_id} is deleted in MLflow: restore it there to send what is left")


def _parts(items: list[Item], size: int) -> list[list[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
