"""The store of the tracking tests, and runs made by hand in it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.compare.choose import Selection
from ortlaunch.compare.command import collect
from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.sources import reading
from ortlaunch.config.schema import MlflowConfig
from tests.tracking.conftest import store as store


def collected(store: MlflowConfig, **selection: Any) -> Comparison:
    """The comparison of runs of a store."""
    with reading(store.uri, is_named=True) as sources:
        return collect(sources, Selection(**selection))


@pytest.fixture
def experiment() -> str:
    """An experiment's name that no other test has."""
    return f"experiment-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def make(store: MlflowConfig, experiment: str) -> Callable[..., str]:
    """Makes a run in MLflow as the relay leaves one; returns its id."""
    from mlflow.entities import Metric, Param, RunTag

    from ortlaunch.tracking.store import open_client

    client = open_client(store.uri, 30)
    found = client.create_experiment(experiment, artifact_location=(Path(store.artifacts) / experiment).as_uri())
    made = iter(range(1000))

    def make_run(
        name: str,
        tokens: float | None = None,
        params: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        status: str | None = "FINISHED",
        curves: dict[str, list[float]] | None = None,
        **summary: float,
    ) -> str:
        start = 1_700_000_000_000 + 1000 * next(made)
        run = client.create_run(found, start_time=start, run_name=name)
        if tokens is not None:
            summary["tokens_per_second_median"] = tokens
        metrics = [Metric(f"summary/{key}", value, start, 100) for key, value in summary.items()]
        for key, values in (curves or {}).items():
            metrics += [Metric(key, value, start + 500 * step, step) for step, value in enumerate(values, 1)]
        client.log_batch(
            run.info.run_id,
            metrics=metrics,
            params=[Param(key, value) for key, value in ({"model.name": "gpt2"} | (params or {})).items()],
            tags=[RunTag(f"ortlaunch.{key}", value) for key, value in (tags or {}).items()],
        )
        if status is not None:
            client.set_terminated(run.info.run_id, status, end_time=start + 60_000)
        return str(run.info.run_id)

    return make_run


@pytest.fixture
def client(store: MlflowConfig) -> Any:
    """A client of the store."""
    from ortlaunch.tracking.store import open_client

    return open_client(store.uri, 30)
