"""Writes a run's folder and the first events of its journal, before the run starts."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from omegaconf import OmegaConf

from ortlaunch.base import last_resort
from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace, replace_text, size_of
from ortlaunch.base.ownership import closed_to_others
from ortlaunch.base.secrets import hidden, without_secrets_in_words, without_tokens
from ortlaunch.base.text import say
from ortlaunch.config.devices import resolve_device
from ortlaunch.launch import environment
from ortlaunch.launch.other_code import other_code
from ortlaunch.launch.plan import LaunchPlan, Start
from ortlaunch.launch.repository import Repository, repository
from ortlaunch.run import sweep
from ortlaunch.run.journal import Journal
from ortlaunch.run.making import make_folder
from ortlaunch.run.roots import note_root
from ortlaunch.run.run import ARTIFACT_FOLDER, Run
from ortlaunch.run.state import ENDED_TAG, STOPPED_TAG
from ortlaunch.tracking import trackers

_REPOSITORY_SECONDS = 30
"""How long the state of the repository is reused, so that git is asked once for all runs of a sweep."""


@contextmanager
def written(plan: LaunchPlan) -> Iterator[None]:
    """Turns the error of a disk that takes no run folder into one line, and leaves nothing of a new run's folder.

    Raises:
        RequestError: the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if plan.attempt == 0 and not size_of(plan.journal):
            shutil.rmtree(plan.run_dir, ignore_errors=True)
        raise RequestError(f"{plan.run_dir} cannot be written: {error.strerror or error}") from error


def write_run_folder(plan: LaunchPlan, start: Start) -> None:
    """Writes the files that describe a run, before it starts. Files of an earlier attempt are moved aside first.

    Args:
        plan: the run; its folder was made by `make_run_folder`, because the run was claimed in it.
        start: the command and the variables that start it, for the record.

    Raises:
        OSError: the folder cannot be written, for example because the disk is full.
    """
    with closed_to_others():
        _write(plan, start)


def _write(plan: LaunchPlan, start: Start) -> None:
    make_folder(plan.files.logs)
    last_resort.keep_traceback_in(plan.files.launcher_error)
    kept = _keep_attempt(plan) if plan.attempt else {}
    try:
        _write_records(plan, start)
    except OSError:
        # The run stays as it was, so that it can go on when there is room on the disk.
        for path, aside in kept.items():
            with suppress(OSError):
                aside.replace(path)
                aside.unlink(missing_ok=True)  # Two links to one file are left as they are by the line above.
        raise
    if plan.attempt:
        plan.files.stop_file.unlink(missing_ok=True)
    note_root(plan.run_dir.parents[1])


def _write_records(plan: LaunchPlan, start: Start) -> None:
    """Writes the files; see `write_run_folder`."""
    files, arguments = plan.files, list(plan.arguments)
    replace_text(files.config_file, OmegaConf.to_yaml(OmegaConf.create(trackers.public_settings(plan.config))))
    replace_text(files.overrides_file, OmegaConf.to_yaml(OmegaConf.create(without_secrets_in_words(arguments))))
    found = _repository_of(plan)
    record = environment.describe(arguments, found) | {
        "torchrun": shlex.join(without_secrets_in_words(start.command)),
        "set": hidden("", start.environment),
    }
    replace_text(files.environment_file, json.dumps(record, indent=2) + "\n")
    replace_text(files.packages_file, _packages())
    if found is not None and (found.dirty or found.untracked):
        patch = found.patch().decode(errors="surrogateescape")
        shown = without_tokens(patch)
        note = (
            "" if shown == patch else "# secrets are replaced by ***: lines with them cannot be applied as they are\n"
        )
        replace_text(files.patch_file, note + shown, errors="surrogateescape")
    for file in plan.work.files():
        make_folder(files.sources)
        replace(files.sources / file.name, without_tokens(file.read_text(errors="replace")).encode())
    if plan.sweep is not None:
        sweep.join(plan.run_dir, plan.sweep)


def journal_start(journal: Journal, plan: LaunchPlan) -> None:
    """Journals the run's parameters, tags and files. The run folder must have been written before."""
    config, work = plan.config, plan.work
    journal.start(config.experiment, plan.name, plan.run_id)
    params = work.params(trackers.public_settings(config))
    journal.params({key: value for key, value in params.items() if key != "trackers" or value})
    record = json.loads(plan.files.environment_file.read_text())
    tags = {
        **work.tags(),
        "ortlaunch.world_size": str(plan.world_size),
        "ortlaunch.device": resolve_device(config.device).value,
        "ortlaunch.run_dir": str(plan.run_dir),
        # The command is quoted, so that a user can paste it into a shell.
        "ortlaunch.command": shlex.join(record["command"]),
    }
    if plan.backend_reason is not None:
        tags["ortlaunch.backend_reason"] = plan.backend_reason
    if plan.attempt:
        # Those of the attempt before: this one has not been stopped.
        tags |= {STOPPED_TAG: "", ENDED_TAG: ""}
    if changed := other_code(plan.files, plan.attempt):
        tags["ortlaunch.changed_code"] = changed
    if (git := record["git"]) is not None:
        tags |= {"ortlaunch.git_commit": git["commit"], "ortlaunch.git_dirty": str(git["dirty"]).lower()}
        if git["branch"] is not None:
            tags["ortlaunch.git_branch"] = git["branch"]
    journal.tags(tags | sweep.tags_of(plan.run_dir))
    for path in plan.files.records:
        if path.exists():
            journal.artifact(path, ARTIFACT_FOLDER)
    if plan.files.sources.exists():
        journal.artifact(plan.files.sources, f"{ARTIFACT_FOLDER}/{plan.files.sources.name}")


def say_notes(plan: LaunchPlan) -> None:
    """Says what the user may not mean, after all that could still refuse the run.

    That is why the backend is not ORT, if nobody chose it; that the warm-up does not end; that a resumed run goes on
    with other code, so that its numbers are of both.
    """
    notes = [] if plan.backend_reason is None else [plan.backend_reason]
    notes += plan.work.notes()
    if changed := other_code(plan.files, plan.attempt):
        notes.append(f"the run goes on with other code than before: {changed}")
    for note in notes:
        # Not `ortlaunch: `, with which refusals begin.
        say(f"note: {note}", file=sys.stderr)


def restore_configuration(run: Run, attempt: int) -> None:
    """Puts back the configuration of the attempt before, if the workers have refused that of this one before a step.

    What only they can judge, such as whether the data is the checkpoint's, would otherwise be kept, and every later
    ``ortlaunch resume`` would be refused too.

    Args:
        run: the run.
        attempt: how often it was launched before; without one there is nothing to put back.

    Raises:
        OSError: it cannot be written.
    """
    earlier = run.earlier_attempt(attempt) / run.config_file.name
    # After a step, the checkpoints may be of the new configuration.
    if attempt and earlier.is_file() and not run.state().trains:
        replace(run.config_file, earlier.read_bytes())


def _keep_attempt(plan: LaunchPlan) -> dict[Path, Path]:
    """Moves the files of the earlier attempt aside, so that they are not taken for those of this one.

    Those that this attempt writes anew stay in their places until they are replaced, because others read them at any
    moment, and a folder without a configuration is no run to them.

    Returns:
        The place of each file, and where it is now.
    """
    kept = plan.files.earlier_attempt(plan.attempt)
    kept.mkdir(parents=True, exist_ok=True)
    files = plan.files
    scripts = {files.script_file((files.job() or {}).get("scheduler", "slurm"))}
    of_attempt = (
        *scripts,
        files.job_file,
        files.failures,
        files.stacks,
        files.sources,
        files.stopped_file,
        files.done_file,
    )
    moved = {path: kept / path.name for path in (*files.records, *of_attempt, *files.torchrun_logs()) if path.exists()}
    for path, aside in moved.items():
        if path not in files.records or path == files.patch_file or not _link(path, aside):
            path.replace(aside)
    return moved


def _link(path: Path, second: Path) -> bool:
    """Gives a file a second name; returns False where its file system has no hard links."""
    try:
        second.unlink(missing_ok=True)
        second.hardlink_to(path)
    except OSError:
        return False
    return True


def _repository_of(plan: LaunchPlan) -> Repository | None:
    """Returns the repository that ortlaunch was started in. Files that ortlaunch writes do not count as changes."""
    ours = [plan.run_dir.parents[1], *trackers.files(plan.config)]
    return _repository_at(Path.cwd(), tuple(ours), int(time.monotonic() / _REPOSITORY_SECONDS))


@functools.lru_cache(maxsize=1)
def _repository_at(folder: Path, ours: tuple[Path, ...], _moment: int) -> Repository | None:
    return repository(folder, ours)


@functools.cache
def _packages() -> str:
    return environment.packages()
