"""An export of a run's weights becomes an artifact of the run."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.run.run import Run
from ortlaunch.tracking.destination import tracking_of
from ortlaunch.tracking.relay import sync


def log_to_run(run_dir: Path, path: Path, artifact_path: str) -> str:
    """Journals a file or folder as the run's and sends it to where the run is recorded.

    Args:
        run_dir: the run folder.
        path: what to keep with the run.
        artifact_path: the folder that it goes to there.

    Returns:
        What became of it, in a line.
    """
    if not Run(run_dir).journal_file.is_file():
        return f"{run_dir} is gone: nothing is logged to the run"
    try:
        journal = Run(run_dir).journal()
        try:
            journal.artifact(path, artifact_path)
        finally:
            journal.close()
        tracking = tracking_of(run_dir)
    except RequestError:
        return f"journalled in {run_dir}, which was started without MLflow"
    except OSError as error:
        return f"not logged to the run: {error}"
    result = sync(run_dir, tracking)
    if not result.sent:
        return result.message
    return f"artifact {artifact_path}/{path.name} of MLflow run {result.mlflow_run_id}"
