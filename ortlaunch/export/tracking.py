"""Logs an export of a run's weights as an artifact of the run."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.run.run import Run
from ortlaunch.tracking.destination import destinations_of
from ortlaunch.tracking.relay import sync
from ortlaunch.tracking.state import destination


def log_to_run(run_dir: Path, path: Path, artifact_path: str) -> str:
    """Writes a file or folder to the run's journal and sends it to the tracking server.

    Args:
        run_dir: the run folder.
        path: the file or folder to log.
        artifact_path: the folder of the artifact in MLflow.

    Returns:
        One line about the outcome.
    """
    if not Run(run_dir).journal_file.is_file():
        return f"{run_dir} is gone: nothing is logged to the run"
    try:
        Run(run_dir).require_own("export")
    except RequestError as error:
        return f"not logged to the run: {error}"
    try:
        journal = Run(run_dir).journal()
        try:
            journal.artifact(path, artifact_path)
        finally:
            journal.close()
        cfgs = destinations_of(run_dir)
        earlier = {cfg.name: destination(run_dir, cfg).load().refused for cfg in cfgs}
    except RequestError as error:
        return f"journalled in {run_dir} and not sent: {error}"
    except OSError as error:
        return f"not logged to the run: {error}"
    result = sync(run_dir, *cfgs)
    if not result.sent:
        return result.message
    what = f"artifact {artifact_path}/{path.name}"
    keeping = [one for one in result.sinks if one.to.tracker.keeps_artifacts]
    if not keeping:
        return f"{what} is in the run's journal alone: no tracker of the run keeps files"
    # An artifact store may fail while its server takes the rest of the journal.
    if refusing := [one for one in keeping if one.to.load().refused > earlier[one.name]]:
        return f"{what} may be missing: {'; '.join(f'{one.where}: {one.message}' for one in refusing)}"
    return f"{what} of {', '.join(one.where for one in keeping)}"
