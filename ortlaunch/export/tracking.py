"""An export of a run's weights becomes an artifact of the run."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.run.journal import Journal
from ortlaunch.tracking.destination import destinations_of
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
    if not (run_dir / "journal.jsonl").is_file():
        return f"{run_dir} is gone: nothing is logged to the run"
    try:
        journal = Journal(run_dir / "journal.jsonl")
        try:
            journal.artifact(path, artifact_path)
        finally:
            journal.close()
        cfgs = destinations_of(run_dir)
    except RequestError:
        return f"journalled in {run_dir}, which was started without MLflow"
    except OSError as error:
        return f"not logged to the run: {error}"
    result = sync(run_dir, *cfgs)
    if not result.sent:
        return result.message
    return f"artifact {artifact_path}/{path.name} of {', '.join(one.where for one in result.sinks)}"
