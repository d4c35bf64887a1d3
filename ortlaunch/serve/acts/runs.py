"""What is done with a run that has begun: how it ended, stop, resume, export, delete. The verbs do the work."""

from __future__ import annotations

import io
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.locks import exclusive
from ortlaunch.base.secrets import carried_values
from ortlaunch.compose.changes import changed
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.hidden import hidden_keys
from ortlaunch.config.load import load_config, load_run_config
from ortlaunch.config.schema import Device
from ortlaunch.follow.cancel import cancel
from ortlaunch.follow.rows import Row
from ortlaunch.follow.state import State
from ortlaunch.follow.status import look
from ortlaunch.launch.work import work_of
from ortlaunch.run.folders import folder_at
from ortlaunch.run.identity import Process, is_own
from ortlaunch.run.key import RunKey
from ortlaunch.run.run import Run
from ortlaunch.run.settings import read_settings
from ortlaunch.run.state import ENDED_TAG
from ortlaunch.serve.acts.composing import own_code_in, require_one_machine, slots_of
from ortlaunch.serve.acts.needs import needs_of
from ortlaunch.serve.acts.starting import BIN, has_made_its_folder, record_of, refusal_in

_CANCEL_SECONDS = 60.0
"""How long one request to stop waits for another one about the same run."""
_UNKNOWN = {"began": True, "is_over": False, "state": State.UNKNOWN.value, "reason": "", "refusal": ""}
"""The answer about a run of which nothing can be said now."""


def outcome(request: dict[str, Any]) -> dict[str, Any]:
    """How runs are, for jobs whose processes have ended, and for those of a scheduler.

    Args:
        request: ``jobs``: of each its ``id``, ``run_dir``, ``token``, ``attempt``, ``resumes`` and ``begun_before``,
            which is how often the run had begun before the job.

    Returns:
        ``jobs`` by id: ``began``, ``is_over``, ``state`` and ``reason`` of the run, and ``refusal``, the message of a
        command that did not begin.
    """
    return {"jobs": {job["id"]: _outcome({"root": request["root"], **job}) for job in request["jobs"]}}


def _outcome(job: dict[str, Any]) -> dict[str, Any]:
    """How one run is. One that cannot be read keeps no other from its answer."""
    try:
        return _read_outcome(job)
    except (OSError, RequestError):
        return _UNKNOWN


def _read_outcome(job: dict[str, Any]) -> dict[str, Any]:
    run = Run(Path(job["run_dir"]))
    if not run.exists:
        return _without_folder(job)
    began = run.state().attempts > job["begun_before"]
    row = look(folder_at(run.path), max_age=5.0).row
    submitted = row.job_id is not None
    return {
        "began": began or submitted,
        "is_over": row.is_over or _is_lost(row),
        "state": State.KILLED.value if _is_lost(row) else row.state.value,
        "reason": row.reason,
        "refusal": "" if began or submitted else refusal_in(job),
    }


def _without_folder(job: dict[str, Any]) -> dict[str, Any]:
    """How a run is that has no folder: it never began, or its folder was taken away. The second must not start again.

    Every job that this is asked for has the record of its start. Where that is missing too, the disk is not mounted.
    """
    if not record_of(job).exists():
        return _UNKNOWN
    if has_made_its_folder(job):
        return {**_UNKNOWN, "is_over": True, "state": State.KILLED.value, "reason": "its run folder is gone"}
    return {"began": False, "is_over": True, "state": "", "reason": "", "refusal": refusal_in(job)}


def _is_lost(row: Row) -> bool:
    """Whether a run without a scheduler's job has gone silent, and nobody can say any more that it has ended.

    Its launcher belonged to an earlier boot or container, or to another machine. A launcher that lives renews its
    claim, so the state is unknown only after a minute of silence.
    """
    return row.state is State.UNKNOWN and row.job_id is None


def check_resume(request: dict[str, Any]) -> dict[str, Any]:
    """Checks whether a run can go on, as the verb `resume` does.

    Args:
        request: ``run_dir``, and ``words`` with keys to change.

    Returns:
        As `ortlaunch.serve.acts.composing.check`, and ``begun_before``, and ``own_code``, the key
        by which the run executes what only an author may choose, or an empty text.
    """
    from ortlaunch.verbs.resume import resume

    run = Run(Path(request["run_dir"]))
    _require_below(run.path, request)
    given, settings = carried_values(os.environ), read_settings(run.config_file)
    # The trackers' passwords are in the service's variables.
    missing = [key for key in hidden_keys({**settings, "tracking": {}, "trackers": {}}) if key not in given]
    if missing:
        raise RequestError(f"{missing[0]} is not set: the run folder does not hold this secret: give it once more")
    words = [str(run.path), *request["words"]]
    said, noted = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(noted):
        resume([*words, "launcher.dry_run=true"])
    config = prepared(changed(load_run_config(run.config_file), request["words"], "resume"))
    require_one_machine(config, "resume it from a command line on each of its machines")
    state = run.state()
    return {
        "words": ["resume", *words],
        "command": f"ortlaunch resume {RunKey.of_folder(run.path.name).run_id}",
        "plan": said.getvalue() + noted.getvalue(),
        "name": state.name or run.path.name,
        "experiment": config.experiment,
        "run_dir": str(run.path),
        "launcher": config.launcher.name,
        "slots": slots_of(config),
        "on_gpu": resolve_device(config.device) is Device.cuda,
        "needs": needs_of(config),
        "steps": work_of(config).steps or None,
        "begun_before": state.attempts,
        "own_code": own_code_in(run, config),
    }


def cancel_run(request: dict[str, Any]) -> dict[str, Any]:
    """Asks a run to stop with a checkpoint, and does not wait for its end.

    Args:
        request: ``run_dir``; ``process`` of its launcher and ``begun_before``, for a run that has not begun yet;
            ``now`` to end it without a checkpoint; ``reason``, why it is not its owner who stops it.

    Returns:
        ``said``, the text of the verb.
    """
    run, process = Run(Path(request["run_dir"])), Process.stored(request.get("process"))
    if not _has_begun(run, process, request):
        return {"said": _interrupt(process)}
    now = ["--now"] if request.get("now") else []
    _require_below(run.path, request)
    # A second request would end the run at once, without a checkpoint.
    with exclusive(run.cancel_lock, _CANCEL_SECONDS) as is_ours:
        if not is_ours or (not now and run.stop_word() is not None):
            return {"said": "it was asked to stop already"}
        if request.get("reason"):
            with run.journal() as journal:
                journal.tags({ENDED_TAG: request["reason"]})
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            cancel([str(run.path), "--wait", "0", *now])
    return {"said": said.getvalue().strip()}


def _has_begun(run: Run, process: Process | None, request: dict[str, Any]) -> bool:
    """Whether the folder is about this start of the run; that of a run that goes on is there before it does."""
    if not run.exists:
        return False
    return process is None or run.state().attempts > request.get("begun_before", 0)


def _interrupt(process: Process | None) -> str:
    """Ends a run's command that has not written its folder yet."""
    if process is None or not process.lives:
        return "it has not begun"
    if not is_own(process.pid):
        raise RequestError(f"process {process.pid} belongs to another user")
    os.kill(process.pid, signal.SIGINT)
    return "it was asked to end before it had begun"


def delete(request: dict[str, Any]) -> dict[str, Any]:
    """Moves a run that is over into the bin of its run root.

    Args:
        request: ``run_dir``.

    Returns:
        ``place``, where it is now.
    """
    run = Run(Path(request["run_dir"]))
    _require_below(run.path, request)
    run.require_own("delete")
    row = look(folder_at(run.path)).row
    if not (row.is_over or _is_lost(row)):
        raise RequestError(f"{row.name} is {row.state.value}: stop it first")
    place = Path(request["root"]) / BIN / run.path.parent.name / run.path.name
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        run.path.rename(place)
    except OSError as error:
        raise RequestError(f"{run.path} cannot be moved to {place}: {error.strerror}") from error
    return {"place": str(place)}


def export_weights(request: dict[str, Any]) -> dict[str, Any]:
    """Writes the weights of a run's newest checkpoint into its folder.

    Args:
        request: ``run_dir``, and ``is_author``, whether the model may be code of the user's own.

    Returns:
        ``folder``, its name in the run folder, and the names of its ``files``.
    """
    from ortlaunch.export.run_weights import export_weights as export

    run = Run(Path(request["run_dir"]))
    _require_below(run.path, request)
    run.require(run.config_file)
    newest = run.newest_checkpoint()
    if not newest:
        raise RequestError("the run has no complete checkpoint: train.checkpoint_every=N writes them")
    folder = run.weights_of(newest)
    if not folder.is_dir() or not any(folder.iterdir()):
        # The model is built, and with it what it imports.
        own = "" if request["is_author"] else own_code_in(run, load_config(run.config_file))
        if own.startswith("model."):
            raise RequestError(f"{own} of this run is code of an author's: an author has to export its weights")
        with redirect_stdout(io.StringIO()):
            export([str(run.path), "--out", str(folder)])
    return {"folder": folder.name, "files": sorted(path.name for path in folder.iterdir())}


def _require_below(run_dir: Path, request: dict[str, Any]) -> None:
    """Refuses a folder that is not a run folder of this run root, also by links."""
    root = Path(request["root"]).resolve()
    if run_dir.is_symlink() or run_dir.resolve().parent.parent != root:
        raise RequestError(f"{run_dir} is no run folder of {root}")
