"""What compare reads of one run in MLflow."""

from __future__ import annotations

from mlflow.entities import Metric, Param, Run, RunData, RunInfo, RunTag

from ortlaunch.compare.comparison import compared
from ortlaunch.compare.runs import RunRow, of_mlflow

PARAMS = {"model.name": "gpt2", "train.steps": "50"}


def read(number: int, params: dict[str, str], tags: dict[str, str], last_step: float = 100.0) -> RunRow:
    info = RunInfo(f"{number:032x}", "7", "me", "FINISHED", number, number + 1, "active", run_name=f"run-{number}")
    metrics = [Metric("summary/last_step", last_step, 1, 0), Metric("summary/tokens_per_second_median", 9.0, 1, 0)]
    data = RunData(metrics, [Param(*pair) for pair in params.items()], [RunTag(*pair) for pair in tags.items()])
    return of_mlflow(Run(info, data))


def test_a_parameter_that_a_resume_changed_shows_both_values() -> None:
    """MLflow has the first value for ever; a run whose schedule had another length at first is no repeat."""
    resumed = read(1, PARAMS, {"ortlaunch.changed.train.steps": "100", "ortlaunch.changed.absent": "1"})
    throughout = read(2, PARAMS | {"train.steps": "100"}, {})
    assert resumed.params["train.steps"] == "50, then 100" and "absent" not in resumed.params
    comparison = compared([resumed, throughout], resumed.run_id, "sqlite:////x.db")
    assert len(comparison.groups) == 2
    assert [(found.key, found.values) for found in comparison.differences] == [("train.steps", ["50, then 100", "100"])]


def test_runs_of_a_million_steps_and_of_one_more_are_no_repeats() -> None:
    rows = [read(number, PARAMS, {}, last_step) for number, last_step in enumerate((1_000_000.0, 1_000_001.0))]
    comparison = compared(rows, rows[0].run_id, "sqlite:////x.db")
    assert [(found.key, found.values) for found in comparison.differences] == [("steps taken", ["1000000", "1000001"])]
