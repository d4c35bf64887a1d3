"""`ortlaunch compare`: what runs achieved, side by side, read back from MLflow."""

from __future__ import annotations

import argparse
import math
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ortlaunch.config.schema import MlflowConfig
from ortlaunch.errors import RequestError
from ortlaunch.tracking.choose import experiment_ids, find_run, latest_runs, sweep_runs
from ortlaunch.tracking.store import open_client
from ortlaunch.tracking.uri import check_uri, redacted, resolve_tracking, scrubbed, sqlite_path

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

FORMATS = ("table", "json", "csv", "markdown")
RATES = ("tokens_per_second_median", "samples_per_second_median")
_TIMEOUT_SECONDS = 30
_INFINITE = 1.797e308
"""MLflow's databases hold the largest double where a run logged infinity."""


@dataclass(frozen=True)
class Speedup:
    """How many times faster than the baseline a run was, and the two medians that say so."""

    ratio: float
    metric: str
    value: float
    baseline_value: float


@dataclass(frozen=True)
class Row:
    """One run. None stands for what MLflow does not know of it."""

    name: str
    run_id: str
    status: str
    model: str | None = None
    backend: str | None = None
    ort_active: bool | None = None
    trainer: str | None = None
    world_size: str | None = None
    tokens_per_second_median: float | None = None
    samples_per_second_median: float | None = None
    step_seconds_p50: float | None = None
    step_seconds_p95: float | None = None
    peak_memory_gib: float | None = None
    last_loss: float | None = None
    speedup: Speedup | None = None

    @property
    def suspect(self) -> bool:
        """The run asked for ONNX Runtime and nothing says that it got it."""
        return self.backend == "ort" and self.ort_active is not True


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    uri: str
    """The store, without credentials."""
    baseline_id: str
    rows: list[Row]
    warnings: list[str] = field(default_factory=list)


def collect(
    uri: str, experiment: str | None, runs: list[str], last: int, baseline: str | None, sweep: str | None = None
) -> Comparison:
    """Reads runs from MLflow and compares them.

    Args:
        uri: Absolute tracking URI.
        experiment: Name of the experiment; None looks in all.
        runs: The runs in the order of the rows; empty for the `last` ones of the experiment.
        last: How many runs, where `runs` names none.
        baseline: The run that the speed-up refers to; None for the first one.
        sweep: A sweep whose runs are compared, beside `runs`.

    Raises:
        RequestError: If the store, the experiment or a run does not exist, or the store cannot be read.
    """
    check_uri(uri)
    _check_database(uri)
    try:
        client = open_client(uri, _TIMEOUT_SECONDS)
        return _collected(client, redacted(uri), experiment, runs, last, baseline, sweep)
    except RequestError as error:
        raise RequestError(f"{redacted(uri)}: {error}") from None
    except Exception as error:
        text = scrubbed(f"{type(error).__name__}: {error}", uri)
        raise RequestError(f"cannot read the MLflow store {redacted(uri)}: {text}") from None


def _collected(
    client: MlflowClient,
    uri: str,
    experiment: str | None,
    runs: list[str],
    last: int,
    baseline: str | None,
    sweep: str | None,
) -> Comparison:
    ids = experiment_ids(client, experiment)
    chosen = [find_run(client, ids, asked) for asked in runs]
    if sweep is not None:
        chosen += sweep_runs(client, ids, sweep)
    elif not runs:
        chosen = latest_runs(client, ids, last)
    if not chosen:
        raise RequestError(f"there are no runs in the experiment {experiment!r}" if experiment else "there are no runs")
    reference = find_run(client, ids, baseline) if baseline else chosen[0]
    if reference.info.run_id not in [run.info.run_id for run in chosen]:
        chosen.insert(0, reference)
    return compared([row_of(run) for run in chosen], reference.info.run_id, uri)


def compared(rows: list[Row], baseline_id: str, uri: str) -> Comparison:
    """Adds to each row its speed-up over the baseline, and says what to beware of."""
    base = next(row for row in rows if row.run_id == baseline_id)
    rows = [replace(row, speedup=_speedup(row, base)) for row in rows]
    return Comparison(uri, baseline_id, rows, _warnings(rows, base))


def _speedup(row: Row, base: Row) -> Speedup | None:
    for metric in RATES:
        value, reference = getattr(row, metric), getattr(base, metric)
        if value is not None and reference:
            return Speedup(value / reference, metric, value, reference)
    return None


def _warnings(rows: list[Row], base: Row) -> list[str]:
    warnings = []
    for row in rows:
        if row.suspect:
            said = "no ortlaunch.ort_active tag" if row.ort_active is None else "ortlaunch.ort_active=false"
            warnings.append(
                f"{row.name} ({row.run_id[:8]}): backend=ort, but nothing shows that ONNX Runtime ran it ({said}); "
                "its figures may be PyTorch's own"
            )
    if all(getattr(base, metric) is None for metric in RATES):
        warnings.append(
            f"{base.name} ({base.run_id[:8]}), the baseline, has no throughput summary: choose another by --baseline"
        )
    if models := sorted({row.model for row in rows if row.speedup and row.model and base.model} - {base.model}):
        warnings.append(f"the speed-up compares different work: {', '.join(models)} against {base.model}")
    return warnings


def row_of(run: Run) -> Row:
    """What a run says about itself in MLflow."""
    tags, params, metrics = run.data.tags, run.data.params, run.data.metrics
    stage = params.get("trainer.zero_stage")
    trainer = tags.get("ortlaunch.trainer")
    return Row(
        name=run.info.run_name or run.info.run_id[:8],
        run_id=run.info.run_id,
        status=run.info.status,
        model=params.get("model.name"),
        backend=tags.get("ortlaunch.backend"),
        ort_active={"true": True, "false": False}.get(tags.get("ortlaunch.ort_active", "")),
        trainer=f"{trainer} z{stage}" if trainer and stage is not None else trainer,
        world_size=tags.get("ortlaunch.world_size"),
        last_loss=_number(metrics.get("train/loss")),
        tokens_per_second_median=_number(metrics.get("summary/tokens_per_second_median")),
        samples_per_second_median=_number(metrics.get("summary/samples_per_second_median")),
        step_seconds_p50=_number(metrics.get("summary/step_seconds_p50")),
        step_seconds_p95=_number(metrics.get("summary/step_seconds_p95")),
        peak_memory_gib=_number(metrics.get("summary/peak_memory_gib")),
    )


def _number(value: float | None) -> float | None:
    return math.copysign(math.inf, value) if value is not None and abs(value) >= _INFINITE else value


def _check_database(uri: str) -> None:
    """MLflow would make a database that is not there, or fill one that is not its own."""
    path = sqlite_path(uri)
    if path is None:
        return
    if not path.is_file():
        raise RequestError(f"there is no MLflow store at {path}: start a run first, or name another store by --uri")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
            database.execute("SELECT 1 FROM experiments LIMIT 1")
    except sqlite3.DatabaseError as error:
        raise RequestError(f"{path} is no MLflow store ({error}): name another one by --uri") from None


def main(args: list[str], default_uri: str, default_experiment: str) -> int:
    """Runs `ortlaunch compare`.

    Args:
        args: The command line after the verb.
        default_uri: The store to read without `--uri`; relative sqlite paths are taken from the current folder.
        default_experiment: The experiment to read if neither runs nor `--experiment` are given.

    Raises:
        RequestError: As `collect` does.
    """
    from rich.console import Console

    from ortlaunch.tracking.report import render

    options = _parser(default_experiment).parse_args(args)
    check_uri(options.uri or default_uri, "--uri" if options.uri else "tracking.uri")
    uri = resolve_tracking(MlflowConfig(uri=options.uri or default_uri), Path.cwd()).uri
    experiment = options.experiment or (None if options.run or options.sweep else default_experiment)
    comparison = collect(uri, experiment, options.run, options.last, options.baseline, options.sweep)
    render(comparison, options.format, Console())
    return 0


def _parser(default_experiment: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ortlaunch compare", description="Compare throughput, memory and loss of runs in MLflow."
    )
    parser.add_argument("run", nargs="*", metavar="RUN", help="run folder, run id or its beginning, or run name")
    parser.add_argument("--sweep", metavar="SWEEP", help="all runs of a sweep: its folder, its name or its run id")
    parser.add_argument("--experiment", metavar="NAME", help=f"default without RUN: {default_experiment}")
    parser.add_argument("--uri", help="tracking URI to read from")
    parser.add_argument("--last", type=_positive, default=10, metavar="N", help="without RUN: the last N runs")
    parser.add_argument("--baseline", metavar="RUN", help="the run that the speed-up refers to (default: the first)")
    parser.add_argument("--format", choices=FORMATS, default="table")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value
