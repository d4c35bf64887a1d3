"""`--log`: stores a comparison as a run in MLflow with its page, its picture and its figures."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import library_error
from ortlaunch.base.user import user_name
from ortlaunch.compare.choose import COMPARISON
from ortlaunch.compare.comparison import Comparison, server_url
from ortlaunch.run.names import KIND_TAG
from ortlaunch.tracking.store import patience
from ortlaunch.tracking.translate import TAG_LIMIT, fitted

if TYPE_CHECKING:
    from mlflow import MlflowClient

FOLDER = "comparison"
_UPLOAD_SECONDS = 120


def log(client: MlflowClient, comparison: Comparison, files: dict[str, bytes]) -> str:
    """Creates the run in the experiment of the baseline.

    Args:
        client: the store.
        comparison: the comparison to store.
        files: content of each file by its name.

    Returns:
        The place of the run, for a message.

    Raises:
        RequestError: the artifacts could not be stored; the run then has the status FAILED.
    """
    base = next(row for row in comparison.rows if row.run_id == comparison.baseline_id)
    tags = {
        KIND_TAG: COMPARISON,
        "ortlaunch.compared": fitted(",".join(row.run_id for row in comparison.rows), TAG_LIMIT),
        "ortlaunch.baseline": base.run_id,
        "mlflow.user": user_name(),
        "mlflow.source.name": "ortlaunch compare",
    }
    name = f"compare-{len(comparison.rows)}-runs"
    run_id = client.create_run(base.experiment_id, tags=tags, run_name=name).info.run_id
    try:
        with tempfile.TemporaryDirectory() as folder, patience(_UPLOAD_SECONDS):
            for file, content in files.items():
                (Path(folder) / file).write_bytes(content)
            client.log_artifacts(run_id, folder, FOLDER)
    except Exception as error:
        client.set_terminated(run_id, "FAILED")
        raise RequestError(
            f"--log: the artifacts of the run {run_id} could not be stored: {library_error(error)}"
        ) from None
    client.set_terminated(run_id, "FINISHED")
    if comparison.uri.startswith(("http://", "https://")):
        return f"{server_url(comparison.uri)}/#/experiments/{base.experiment_id}/runs/{run_id}/artifacts"
    return f"run {run_id}, artifacts below {FOLDER}/"
