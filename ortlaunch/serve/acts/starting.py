"""Starts a run exactly once, also if the service is killed at any moment and asks again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import read_json, read_tail
from ortlaunch.base.secrets import whole_words
from ortlaunch.launch.launcher import QueueLauncher
from ortlaunch.launch.queue.submission import Ticket, write_job
from ortlaunch.launch.slurm import programs
from ortlaunch.launch.table import queue_named
from ortlaunch.run.identity import Process
from ortlaunch.run.run import Run, job_key
from ortlaunch.serve.acts.composing import planned
from ortlaunch.serve.runner import take

STARTS = ".starts"
"""The folder in the run root with the record and the first output of each start. It holds nothing else."""
BIN = ".bin"
"""The folder in the run root that takes deleted runs."""
_RECORD_SECONDS = 30.0
_SUBMISSION_SECONDS = 90.0
_KEPT_SECONDS = 7 * 24 * 3600.0
_FOLDER_LINE = "run folder: "
_LONGEST_TAIL = 20_000
"""Bytes of a start's output that are looked at, from its end: that of a run that has begun grows for days."""
_WITHDRAWN: dict[str, Any] = {"withdrawn": True}
_SCOPE = ("systemd-run", "--user", "--scope", "--quiet", "--collect")
_BEYOND = 1.5
"""The kernel ends a run that has so many times its memory. The service, which looks now and then, stops it before."""


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Starts a run, or tells which process has become it before.

    Args:
        request: ``token`` and ``attempt``, which name the start; ``words``; ``launcher``; ``run_dir``; ``run_key``;
            ``resumes``; ``gpus``, the numbers of the GPUs that the run may use, or None for no choice; ``memory``,
            the bytes that it may take, or None; ``stopped`` if it must not start any more.

    Returns:
        ``process`` (host, pid, start_ticks, machine), and ``lives``; of a scheduler's job also ``scheduler_job``; or
        ``withdrawn``: it has not started and never will.
    """
    folder = Path(request["root"]) / STARTS
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _prune(folder)
    record = record_of(request)
    launcher = queue_named(request["launcher"])
    if launcher is not None:
        return _submit(record, {**request, "words": whole_words(request["words"], os.environ)}, launcher)
    # Whoever takes the record is the only one who may become the run, so nobody does after this.
    if request.get("stopped") and take(record):
        return _WITHDRAWN
    if not record.exists():
        _put_aside(Run(Path(request["run_dir"])), request)
        _spawn(record, request)
    process = _recorded(record, _RECORD_SECONDS)
    # The record is taken with the refusal: a child that is only slow would become a run that holds no slot.
    if process is None and not take(record):
        process = _recorded(record, 1.0)
    if process is None:
        raise RequestError(f"the run could not be started: {_last_line(log_of(request)) or 'its process has ended'}")
    return {"process": vars(process), "lives": process.lives}


def record_of(request: dict[str, Any]) -> Path:
    """Returns the file that names the process of one attempt to start a job."""
    return Path(request["root"]) / STARTS / f"{request['token']}.{request['attempt']}.json"


def log_of(request: dict[str, Any]) -> Path:
    """Returns the file with what that process has printed."""
    return record_of(request).with_suffix(".log")


def refusal_in(request: dict[str, Any]) -> str:
    """Returns the message of a command that has refused to begin; empty if it has printed none."""
    lines = _lines(log_of(request))
    found = [line.partition(": ")[2] for line in lines if line.startswith("ortlaunch: ")]
    return found[-1] if found else ""


def has_made_its_folder(request: dict[str, Any]) -> bool:
    """Returns whether the command has printed where its run folder is. It does so when its workers start."""
    try:
        with log_of(request).open(encoding="utf-8", errors="replace") as lines:
            return any(line.startswith(_FOLDER_LINE) for line in lines)
    except OSError:
        return False


def _put_aside(run: Run, request: dict[str, Any]) -> None:
    """Moves the folder of a run whose process was killed before it had journalled anything out of the way."""
    is_first = request["attempt"] == 1 or request["resumes"]
    if is_first or not run.path.is_dir() or run.state().attempts > 0:
        return
    place = Path(request["root"]) / BIN / f"{run.path.name}.{request['attempt'] - 1}"
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    run.path.rename(place)


def _spawn(record: Path, request: dict[str, Any]) -> None:
    """Starts a process that becomes the run unless another one has."""
    environment = dict(os.environ)
    if request.get("gpus") is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, request["gpus"]))
        # CUDA would number the fastest GPU first, and not as nvidia-smi does.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    words = [sys.executable, "-P", "-m", "ortlaunch.serve.runner", str(record), *request["words"]]
    # A service of systemd would take the runs along when it ends, unless they have a scope of their own.
    memory = request.get("memory")
    bounds = ["-p", f"MemoryMax={int(_BEYOND * memory)}", "-p", "MemorySwapMax=0"] if memory else []
    for scope in ([*_SCOPE, *bounds, "--"], []) if _has_scopes() else ([],):
        with log_of(request).open("ab") as log:
            child = subprocess.Popen(
                [*scope, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + _RECORD_SECONDS
        while not record.exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if record.exists():
            return


def _has_scopes() -> bool:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return bool(runtime) and (Path(runtime) / "systemd").is_dir() and shutil.which("systemd-run") is not None


def _recorded(record: Path, seconds: float) -> Process | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (process := Process.stored(read_json(record))) is not None:
            return process
        time.sleep(0.02)
    return None


def _submit(record: Path, request: dict[str, Any], launcher: QueueLauncher) -> dict[str, Any]:
    """Submits a run to a scheduler as this user."""
    run = Run(Path(request["run_dir"]))
    if take(record):
        return _submit_now(run, request)
    before = _recorded(record, 1.0)
    # Another child may be submitting it at this moment.
    deadline = time.monotonic() + _SUBMISSION_SECONDS
    while before is not None and before.lives and time.monotonic() < deadline:
        time.sleep(0.2)
    if before is not None and before.lives:
        raise RequestError("its submission has not ended yet")
    # The folder of a run that goes on is about the attempt before until the submission has journalled the new one,
    # and has moved the old job.json aside.
    has_begun = run.exists and run.state().attempts > request["begun_before"]
    if has_begun and job_key(run.job()) is not None:
        return _submitted(run)
    if request["resumes"] and not has_begun:
        return _submit_now(run, request)
    return _submit_again(run, request, launcher)


def _submit_again(run: Run, request: dict[str, Any], launcher: QueueLauncher) -> dict[str, Any]:
    """Goes on with a submission that was killed: the scheduler may have the script or not."""
    if run.exists and run.state().ended is not None:
        return {"process": None, "lives": False, "scheduler_job": None}
    script = run.script_file(launcher.name)
    if script.exists():
        ticket = _ticket_of(script, launcher)
        if ticket is not None:
            write_job(run.path, launcher.name, ticket)
            return _submitted(run)
    return _submit_now(run, request)


def _ticket_of(script: Path, launcher: QueueLauncher) -> Ticket | None:
    """Returns the job of a script that the scheduler has; None if it has none."""
    if launcher.name != "slurm":
        raise RequestError(
            f"its submission was interrupted, and {launcher.title} cannot be asked for a script: look for a job of "
            f"{script} there, and submit the run again if there is none"
        )
    answer = programs.call("squeue", "--me", "--noheader", "--format=%i|%o")
    if not answer.is_good:
        raise RequestError(f"squeue: {answer.problem or answer.said.strip()}")
    for line in answer.text.splitlines():
        job_id, _, command = line.partition("|")
        if command.strip() == str(script) and programs.is_job_id(job_id):
            return Ticket(job_id)
    return None


def _submit_now(run: Run, request: dict[str, Any]) -> dict[str, Any]:
    """Submits a run of which the scheduler has no job, unless it must not start any more."""
    if request.get("stopped"):
        return _WITHDRAWN
    _call(request)
    return _submitted(run)


def _call(request: dict[str, Any]) -> None:
    if request["resumes"]:
        from ortlaunch.verbs.resume import resume

        resume(request["words"][1:])
        return
    from ortlaunch.launch.table import launcher_of

    plan = planned(request["words"], request["run_key"])
    launcher_of(plan.config).submit(plan)


def _submitted(run: Run) -> dict[str, Any]:
    return {"process": None, "lives": True, "scheduler_job": job_key(run.job())}


def _prune(folder: Path) -> None:
    """Removes the files of starts that were long ago."""
    oldest = time.time() - _KEPT_SECONDS
    for path in folder.iterdir():
        with suppress(OSError):
            if path.stat().st_mtime >= oldest:
                continue
            process = Process.stored(read_json(path.with_suffix(".json")))
            if process is None or not process.lives:
                path.unlink()


def _last_line(path: Path) -> str:
    lines = _lines(path)
    return lines[-1] if lines else ""


def _lines(path: Path) -> list[str]:
    try:
        return read_tail(path, _LONGEST_TAIL).splitlines()
    except OSError:
        return []
