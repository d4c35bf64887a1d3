"""`ortlaunch resume RUN_DIR [KEY=VALUE...]`: launches a run again, in its folder and as the same run."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from ortlaunch.base.errors import RequestError
from ortlaunch.base.exit_codes import DONE
from ortlaunch.base.ownership import require_own
from ortlaunch.base.text import say
from ortlaunch.compose.changes import changed
from ortlaunch.compose.prepare import prepared
from ortlaunch.compose.rules import runs_ort_here
from ortlaunch.config.backends import require_ort
from ortlaunch.config.load import first_line, load_run_config
from ortlaunch.config.schema import GROUPS, Config, RunConfig
from ortlaunch.follow.find import find_run
from ortlaunch.follow.state import State
from ortlaunch.follow.status import look
from ortlaunch.launch.auto import chosen, recorded
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.planning import plan_in
from ortlaunch.launch.table import launcher_of
from ortlaunch.launch.work import work_of
from ortlaunch.run import claim, manifest
from ortlaunch.run.checkpoints import check_steps, step_of
from ortlaunch.run.claim import Claim
from ortlaunch.run.folders import folder_at
from ortlaunch.run.identity import Process
from ortlaunch.run.key import RunKey
from ortlaunch.run.liveness import Alive, has_workers, liveness
from ortlaunch.run.run import Run, job_key
from ortlaunch.tracking import trackers

_REWRITTEN_SECONDS = 2.0
"""Within this time, a launcher has written the configuration that it has moved aside."""
_HELP = """\
usage: ortlaunch resume RUN [KEY=VALUE ...]

Continue a run that was stopped, was killed or has failed: in its folder, as the same MLflow run, from its newest
complete checkpoint. RUN is its run folder, its short id, its name, or its job id (ortlaunch jobs lists them).

  KEY=VALUE    a key to change, such as train.steps=2000 or launcher.time=4:00:00; what the run is made of (model,
               data, backend, trainer, optimizer, scheduler) stays

Exit codes are those of a run: 0 done, 1 the training failed, 2 the request is wrong, 130 interrupted"""


def resume(arguments: list[str]) -> int:
    """Runs `ortlaunch resume`.

    Args:
        arguments: the command line after the verb: a run, then keys to change.

    Returns:
        The exit code of the run.

    Raises:
        RequestError: there is no such run or several, it is still going on, a key is wrong, or a tracker's password is
            missing.
    """
    if {"-h", "--help"} & set(arguments):
        print(_HELP)
        return 0
    run = _named(arguments)
    checkpoint = _own_checkpoint(run)
    # All that is read from here on must still hold when the run is claimed.
    known = claim.number(run)
    stored, config = _configurations(run, arguments[1:])
    state, before, work = run.state(), work_of(stored), work_of(config)
    keeps_record = launcher_of(config).keeps_record(config)
    if keeps_record:
        _check_ended(run.path, config.launcher.grace_seconds)
    launches = keeps_record and not config.launcher.dry_run
    nothing_left = before.nothing_left(work)
    if state.ended == "FINISHED" and nothing_left:
        # It would make its last steps again.
        raise RequestError(f"{run.path} {nothing_left}")
    if launches and nothing_left and state.ended is None and run.is_done() and _would_begin_before(run, before.steps):
        return _close(run)
    if checkpoint is not None and isinstance(config, Config) and work.steps and config.train.resume == "auto":
        check_steps(checkpoint, config.train.steps)
    # An earlier version chose in the workers. It may have been killed before, and a job before its workers started.
    config, why = chosen(config)
    # A run that was killed early has journalled neither id nor name.
    run_id, name = state.run_id or RunKey.of_folder(run.path.name).run_id, state.name or run.path.name
    plan = plan_in(config, run.path, run_id, name, attempt=max(1, state.attempts))
    plan = dataclasses.replace(plan, backend_reason=why or None, arguments=("resume", *arguments))
    if not launches:
        return launcher_of(config).submit(plan)
    return _launched(plan, known)


def _named(arguments: list[str]) -> Run:
    """Returns the run that the first argument names.

    Raises:
        RequestError: no run is named, or there is no such run or several.
    """
    if not arguments or ("=" in arguments[0] and not Path(arguments[0]).is_dir()):
        raise RequestError(
            "resume: name the run by its RUN_DIR, short id, name or job id: ortlaunch resume RUN [KEY=VALUE ...]"
        )
    run = Run(find_run(arguments[0]).path)
    if run.journal_file.exists() and not run.journal_file.is_file():
        raise RequestError(f"resume: {run.journal_file} is no plain file: move it away")
    return run


def _own_checkpoint(run: Run) -> Path | None:
    """Returns the run's newest checkpoint; None if there is none.

    Raises:
        RequestError: another user may have written the run, whose configuration names the model's code, its trackers
            and its data, or the checkpoint.
    """
    run.require_own("resume")
    newest = run.newest_checkpoint()
    if not newest:
        return None
    checkpoint = run.checkpoints / newest
    require_own(checkpoint, checkpoint / manifest.NAME, use="resume")
    return checkpoint


def _configurations(run: Run, words: list[str]) -> tuple[RunConfig, RunConfig]:
    """Returns the run's stored configuration, and the one with which it is launched again.

    Raises:
        RequestError: a key is wrong, what the run needs is not there, or a tracker's password is missing.
    """
    # The variables come first, so that a key on the command line overrides them.
    stored = recorded(trackers.with_credentials(_stored_config(run.path), os.environ), run)
    new = _changed(stored, words, has_checkpoint=bool(run.newest_checkpoint()))
    trackers.check_credentials(new)
    if isinstance(new, Config) and runs_ort_here(new):
        require_ort("resume: backend=ort, which the run keeps,", otherwise="")
    return stored, prepared(launcher_of(new).resumed(new, run.path))


def _launched(plan: LaunchPlan, known: int) -> int:
    """Launches the run while it is claimed, and returns its exit code.

    Args:
        plan: the plan of its next attempt.
        known: the number of the claim when the run was read.

    Raises:
        RequestError: as for `_claimed`, or the launcher refuses the run.
    """
    own_claim = _claimed(plan.files, known)
    try:
        return launcher_of(plan.config).submit(plan)
    finally:
        own_claim.release()


def _claimed(run: Run, known: int) -> Claim:
    """Claims the run.

    Raises:
        RequestError: it was launched since the claim `known`, or its folder cannot be written.
    """
    try:
        return claim.take(run, job_is_over=lambda job: _is_over(job, run), after=known)
    except OSError as error:
        raise RequestError(f"{run.path} cannot be written: {error.strerror or error}") from error


def _would_begin_before(run: Run, step: int) -> bool:
    """Returns whether the run has no checkpoint of its last step, so that it would make steps again."""
    return step_of(run.checkpoints / run.newest_checkpoint()) != step


def _close(run: Run) -> int:
    """Journals the end of a run whose launcher was killed after the last step, and returns the exit code.

    Raises:
        RequestError: the end cannot be journalled now.
    """
    from ortlaunch.follow.sync import end_if_dead

    said = end_if_dead(run.path)
    if run.state().ended != "FINISHED":
        raise RequestError(f"{run.path} has finished, but its end is not journalled: {said}")
    text = f"{run.path} had finished when its launcher was killed: its end is journalled now"
    say(f"ortlaunch: {text}. Send it: ortlaunch sync {shlex.quote(str(run.path))}")
    return DONE


def _is_over(job: str, run: Run) -> bool:
    """Returns whether a job that has claimed the run is over. `_check_ended` has asked for that of job.json already."""
    return job == job_key(run.job()) or not has_workers(run)


def _stored_config(run_dir: Path) -> RunConfig:
    run = Run(run_dir)
    path = run.config_file
    # Without hard links, another launcher moves the files of the attempt before aside, and writes its own at once.
    until = time.monotonic() + _REWRITTEN_SECONDS
    while run.journal_file.is_file() and not path.is_file() and time.monotonic() < until:
        time.sleep(0.02)
    run.require(path)
    try:
        return load_run_config(path)
    except (OmegaConfBaseException, KeyError, OSError) as error:
        raise RequestError(f"{path} cannot be read: {first_line(error)}") from error


def _changed(config: RunConfig, words: list[str], *, has_checkpoint: bool) -> RunConfig:
    """Returns the configuration with keys changed. By default it resumes from the newest checkpoint.

    Raises:
        RequestError: a word is wrong, or would change what the run is made of.
    """
    for word in words:
        if word.partition("=")[0].lstrip("+") in ("model", *GROUPS):
            raise RequestError(
                f"resume: {word}: a run keeps what it is made of; only single keys can change, such as train.steps"
            )
    if has_checkpoint and isinstance(config, Config) and config.train.resume != "auto":
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, resume="auto"))
    new = changed(config, words, "resume")
    places = ((key, getattr(config, key), getattr(new, key)) for key in ("experiment", "run_root"))
    for key, then, now in (*places, *work_of(config).identity(work_of(new), has_checkpoint=has_checkpoint)):
        if then != now:
            raise RequestError(
                f"resume: {key}: a run keeps what it is made of ({then}): start a new run, from its weights by "
                "ortlaunch export weights and model.weights"
            )
    return new


def _check_ended(run_dir: Path, seconds: float) -> None:
    """Waits for workers that are still writing their last checkpoint; refuses a run whose launcher or job lives."""
    run = Run(run_dir)
    if run.job() is not None:
        row = look(folder_at(run_dir)).row
        # If the scheduler cannot tell, the workers' lock decides below.
        if not row.is_over and row.state is not State.UNKNOWN:
            raise RequestError(f"{run_dir} is {row.state.value} as job {row.job_id}: ortlaunch cancel {row.run_id}")
    found = liveness(run)
    if found.alive is Alive.LAUNCHER and found.launcher is not None:
        raise RequestError(f"{run_dir} is still running{_where(found.launcher)}: stop it first")
    # The claim is older than the launcher's file, and than the workers.
    claim.check_free(run, job_is_over=lambda job: _is_over(job, run))
    if has_workers(run):
        text = f"workers of {run_dir} have not ended yet: waiting for them, at most {seconds:g} s"
        say(f"ortlaunch: {text} ...", file=sys.stderr)
        if has_workers(run, seconds):
            raise RequestError(f"workers of {run_dir} are still running after {seconds:g} s: stop them first")


def _where(process: Process) -> str:
    return f" ({f'on {process.host}, ' if not process.is_here else ''}process {process.pid})"
