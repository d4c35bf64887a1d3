"""A run and its folder. Only this module names the files of a run folder.

The launcher creates the folder and describes the run in it, and workers append to the journal. Everything else only
reads. A path is an attribute; what reads a file is a method. This module imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.ownership import require_own
from ortlaunch.base.reading import notice, read_json, read_text
from ortlaunch.run import manifest
from ortlaunch.run.checkpoints import newest_name, remove_converted
from ortlaunch.run.events import Ended, Status, is_count
from ortlaunch.run.identity import Process
from ortlaunch.run.journal import Journal, iterate
from ortlaunch.run.settings import read_settings, read_words
from ortlaunch.run.state import RunState, fold

_LONGEST_REQUEST = 4096
"""The largest size of a request to stop, in bytes."""
_LONGEST_JOB_ID = 256
_JOB_ID = re.compile(r"[0-9A-Za-z][\w.\[\]+-]*", re.ASCII)

ARTIFACT_FOLDER = "ortlaunch"
"""The folder among a run's artifacts in a tracking server that holds the files of `Run.records`."""

KEPT_END = "end"
"""The key under which a claim keeps the end of a run whose journal could not take it."""


@dataclass(frozen=True)
class Stopped:
    """Where a run stopped on request, and why."""

    step: int
    """The step that the run goes on from; 0 if it had made none."""
    checkpoint: str
    """The checkpoint of that step; empty if there is none."""
    reason: str
    """The first word of the request; ``signal`` if the request was a signal."""


class _File:
    """The path of a file or folder of a run, by its name in the run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: Run, owner: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class Run:
    """A run, given by its folder, which need not exist yet. A sweep's folder has a journal and a configuration too."""

    path: Path

    # What the run is.

    config_file = _File("config.yaml")
    """The resolved configuration."""
    overrides_file = _File("overrides.yaml")
    """The command line."""
    environment_file = _File("env.json")
    """The machine, repository, command and environment variables at the launch."""
    packages_file = _File("packages.txt")
    """The installed packages."""
    patch_file = _File("git.patch")
    """The changes since the repository's commit; absent where there are none."""
    code_file = _File("code.json")
    """Digests of the user's own modules, by the workers."""
    sources = _File("sources")
    """The folder of the user's own files that ran; absent for a training in ortlaunch's own loop."""

    @property
    def records(self) -> tuple[Path, ...]:
        """The files that record what ran."""
        return (self.config_file, self.overrides_file, self.environment_file, self.packages_file, self.patch_file)

    def earlier_attempt(self, number: int) -> Path:
        """The folder that keeps the records of an attempt, counted from 1, after a later one has begun."""
        return self.path / "attempts" / str(number)

    # Who runs it.

    launcher_file = _File("launcher.json")
    """The launcher's process; see `ortlaunch.run.identity`."""
    job_file = _File("job.json")
    """The scheduler's job."""

    def script_file(self, scheduler: str) -> Path:
        """The script that the scheduler of this name was given."""
        return self.path / ("sbatch.sh" if scheduler == "slurm" else "job.sh")

    history_file = _File("history.json")
    """The list of a job's attempts."""
    claims = _File("claims")
    """The folder of the claims to write the run; see `ortlaunch.run.claim`."""
    workers_lock = _File(".workers.lock")
    """The lock file on which every worker holds a shared lock while it lives."""
    preflight = _File("preflight")
    """The folder of the results of the nodes' checks before an attempt."""
    preflight_token = _File("preflight.token")
    """A token of the attempt. A node reads it to check that it sees the folder's present content."""

    def scheduler_variables(self, attempt: int, scheduler: str) -> Path:
        """The environment variables that the scheduler of this name set in an attempt, counted from 0."""
        return self.path / f"{scheduler}-{attempt}.json"

    # What happens in it.

    journal_file = _File("journal.jsonl")
    """The journal."""
    logs = _File("logs")
    """The folder of the processes' output."""

    def rank_log(self, rank: int) -> Path:
        """The output of a worker in all attempts."""
        return self.logs / f"rank-{rank}.log"

    def torchrun_log(self, node: int | str | None = None) -> Path:
        """The output of torchrun on a machine. A run on one machine has no number in the name."""
        return self.logs / ("torchrun.log" if node is None else f"torchrun-{node}.log")

    def torchrun_logs(self) -> list[Path]:
        """The outputs of torchrun on all machines."""
        return sorted(self.logs.glob("torchrun*.log"))

    launcher_error = _File("logs/launcher-error.log")
    """The traceback of an error that ended the launcher."""

    def scheduler_log(self, scheduler: str) -> Path:
        """The output of the first process of a job of this scheduler."""
        return self.logs / ("slurm.log" if scheduler == "slurm" else "job.log")

    relay_log = _File("logs/relay.log")
    """The log of what could not be sent to a tracking server, and why."""
    relay_file = _File("relay.json")
    """How much of the journal has been sent to MLflow."""
    relay_lock = _File(".relay.lock")
    """The lock file of the process that sends the journal."""

    def tracker_file(self, tracker: str) -> Path:
        """How much of the journal has been sent to a tracker."""
        return self.relay_file if tracker == "mlflow" else self.path / f"relay-{tracker}.json"

    def tracker_lock(self, tracker: str) -> Path:
        """The lock file of the process that sends the journal to a tracker."""
        return self.relay_lock if tracker == "mlflow" else self.path / f".relay-{tracker}.lock"

    def tracker_locks(self) -> list[Path]:
        """The lock files of all trackers that something was sent to. MLflow's is always in it and comes first."""
        return [self.relay_lock, *sorted(self.path.glob(".relay-*.lock"))]

    def tracker_folder(self, tracker: str) -> Path:
        """The folder for the files that a tracker keeps with the run."""
        return self.path / tracker

    health = _File("health")
    """The folder of the workers' signs of life."""

    def beat_file(self, rank: int) -> Path:
        """A worker's latest sign of life."""
        return self.health / f"rank-{rank}.json"

    def beating_ranks(self) -> list[int]:
        """The workers that have left a sign of life."""
        with suppress(OSError):
            names = (path.stem.rpartition("-")[2] for path in self.health.glob("rank-*.json"))
            return [int(name) for name in names if name.isdecimal()]
        return []

    def node_done_file(self, node: int) -> Path:
        """Present when a script has ended in order on this node of several."""
        return self.health / f"node-{node}.done"

    logged = _File("logged")
    """The folder of the texts and pictures that hooks log."""
    stacks = _File("stacks")
    """The folder of the stack traces that workers write when they make no progress."""

    def stack_file(self, rank: int) -> Path:
        """A worker's stack traces."""
        return self.stacks / f"rank-{rank}.txt"

    failures = _File("failures")
    """The folder of the workers' failures."""

    def failure_file(self, rank: int) -> Path:
        """A worker's failure; see `ortlaunch.run.failure`."""
        return self.failures / f"rank-{rank}.json"

    # What is asked of it, and what it leaves.

    backend_file = _File("backend.json")
    """The backend that a run with backend=auto of an earlier version of ortlaunch has chosen."""
    stop_file = _File("STOP")
    """The request to stop. When this file exists, workers finish their step, write a checkpoint and end."""
    cancel_lock = _File(".cancel.lock")
    """The lock file of the request of the service that asks the run to stop."""
    stopped_file = _File("stopped.json")
    """Where the run stopped on request."""
    done_file = _File("done.json")
    """Present when all steps are done."""
    checkpoints = _File("checkpoints")
    """Folder of the checkpoints; see `ortlaunch.run.checkpoints`."""
    artifacts = _File("artifacts")
    """Folder of the files that a script has logged by MLflow."""

    def spool_file(self, node: int) -> Path:
        """What a script has logged on a further node of the run, as a journal that the first node takes over."""
        return self.logs / f"spool-{node}.jsonl"

    def spool_files(self) -> list[Path]:
        """The spools of all further nodes."""
        return sorted(self.logs.glob("spool-*.jsonl"))

    weights = _File("weights")
    """Folder of the trained weights."""

    def weights_of(self, checkpoint: str) -> Path:
        """Folder of the weights that were exported from a checkpoint."""
        return self.path / f"weights-{checkpoint}"

    onnx = _File("onnx")
    """Folder of the exported graphs."""
    profile = _File("profile")
    """The folder of a profiler's output."""

    def memory_file(self, rank: int) -> Path:
        """A snapshot of a worker's GPU memory."""
        return self.path / "memory" / f"rank-{rank}.pickle"

    scratch = _File(".universal")
    """The folder for temporary files while a checkpoint is loaded; see `clear_scratch`."""

    # What reads and writes these files.

    def require(self, file: Path) -> None:
        """Refuses a folder that lacks one of the files that make it a run folder.

        Raises:
            RequestError: the message names the folder and the file.
        """
        if not file.is_file():
            raise RequestError(f"{self.path} is no run folder: it has no {file.name}")

    def require_own(self, use: str) -> None:
        """Refuses a run that another user may have written.

        Args:
            use: what would be done with the run, for the message.

        Raises:
            RequestError: the message names the file or folder, who may write it, and what to do.
        """
        kept = (self.config_file, self.journal_file, self.job_file, self.launcher_file, self.relay_file)
        require_own(self.path, *kept, self.checkpoints, use=use)

    @property
    def exists(self) -> bool:
        """Whether the folder has a configuration and a journal."""
        return self.config_file.is_file() and self.journal_file.is_file()

    @property
    def is_gone(self) -> bool:
        """Whether a folder that had a journal is there no more: it was deleted or moved, or its disk was unmounted.

        A file system that does not answer at the moment is no proof of this.
        """
        try:
            self.journal_file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return False

    def journal(self, *, is_patient: bool = False) -> Journal:
        """The journal, open for appending; see `Journal` for a patient one."""
        return Journal(self.journal_file, is_patient=is_patient)

    def state(self) -> RunState:
        """The state after all events of the journal, and after an end that it could not take."""
        state = fold(iterate(self.journal_file)) if self.journal_file.is_file() else RunState()
        self.take_kept_end(state)
        return state

    def take_kept_end(self, state: RunState) -> None:
        """Adds to a journal's state the end that the journal could not take."""
        if state.ended is None and (end := self._kept_end()) is not None:
            state.take(end)

    def journal_kept_end(self) -> bool:
        """Journals an end that the journal could not take, because its disk was full; returns whether there was one.

        Raises:
            OSError: the journal still cannot be written.
        """
        if not self.journal_file.is_file() or fold(iterate(self.journal_file)).ended is not None:
            return False
        end = self._kept_end()
        if end is None:
            return False
        with self.journal() as journal:
            journal.end(end.status, at=end.t)
        return True

    def _kept_end(self) -> Ended | None:
        """The end that the newest claim keeps for the journal; see `ortlaunch.run.claim`."""
        with suppress(OSError):
            numbers = [int(path.name) for path in self.claims.iterdir() if path.name.isdecimal()]
            kept = (read_json(self.claims / str(max(numbers))) or {}).get(KEPT_END) if numbers else None
            if isinstance(kept, dict) and kept.get("status") in get_args(Status) and is_count(kept.get("t")):
                return Ended(kept["t"], kept["status"])
        return None

    def settings(self) -> dict[str, Any]:
        """The configuration as plain values; empty without one.

        Raises:
            RequestError: the configuration cannot be read.
        """
        return read_settings(self.config_file)

    def words(self) -> list[str]:
        """The words of the command line, without secrets; empty where they cannot be read."""
        try:
            return read_words(self.overrides_file)
        except RequestError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                notice(self.overrides_file, error.__cause__)
            return []

    def setting(self, key: str) -> Any:
        """One value of the configuration by its dotted key; None where the key is missing or cannot be read."""
        try:
            value: Any = self.settings()
        except RequestError as error:
            notice(self.config_file, str(error).partition(": ")[2])
            return None
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def job(self) -> dict[str, Any] | None:
        """The scheduler's job; None for a run without a job."""
        job = read_json(self.job_file)
        if job is not None and job.get("job_id") is not None and job_key(job) is None:
            notice(self.job_file, "its job id has not the form of one")
        return job

    def launcher(self) -> Process | None:
        """The launcher's process; None for a run that no local launcher started."""
        content = read_json(self.launcher_file)
        process = Process.stored(content)
        if content is not None and process is None:
            notice(self.launcher_file, "it names no process")
        return process

    def note_launcher(self) -> None:
        """Records this process as the run's launcher."""
        # The write is atomic because others read the file at any moment. A new file also changes the folder's
        # modification time, which tells `ortlaunch jobs` that its cached record of the run is out of date.
        replace_text(self.launcher_file, json.dumps(asdict(Process.this())) + "\n")

    def beat(self, rank: int = 0) -> dict[str, Any]:
        """A worker's latest sign of life; empty where there is none."""
        return read_json(self.beat_file(rank)) or {}

    def ask_to_stop(self, word: str = "") -> None:
        """Asks the workers to stop with a checkpoint.

        Args:
            word: where the request comes from; empty for a signal.
        """
        if word:
            replace_text(self.stop_file, f"{word}\n")
        else:
            self.stop_file.touch()

    def stop_word(self) -> str | None:
        """The first word of the request to stop, empty if it has no word.

        Returns:
            The word; None where there is no request, or it cannot be read, which is noticed.
        """
        try:
            # Others see the word; a link of another user could lead to a file that only the reader may read.
            return next(iter(read_text(self.stop_file, _LONGEST_REQUEST, follow=False).split()), "")
        except FileNotFoundError:
            return None
        except OSError as error:
            notice(self.stop_file, error)
            return None

    def note_stopped(self, stopped: Stopped) -> None:
        """Records where the run stopped on request, and removes the request."""
        content = {"step": stopped.step, "checkpoint": stopped.checkpoint, "reason": stopped.reason}
        replace_text(self.stopped_file, json.dumps(content) + "\n")
        self.stop_file.unlink(missing_ok=True)

    def stopped(self) -> Stopped | None:
        """Where the run stopped on request; None where it did not."""
        found = read_json(self.stopped_file)
        if found is None:
            return None
        if not is_count(found.get("step")):
            notice(self.stopped_file, "its step is no step")
            return None
        return Stopped(found["step"], str(found.get("checkpoint", "")), str(found.get("reason", "")))

    def note_done(self, steps: int) -> None:
        """Records that all steps are done, so that a later launch finds nothing to do."""
        replace_text(self.done_file, json.dumps({"step": steps}) + "\n")

    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.done_file.exists()

    def lost_end(self) -> Status:
        """How a run has ended that could not journal its end, because its launcher or its job was killed."""
        return "FINISHED" if self.is_done() else "KILLED"

    def newest_checkpoint(self) -> str:
        """The name of the newest complete checkpoint; empty where there is none."""
        return newest_name(self.checkpoints)

    def mlflow_run_id(self) -> str | None:
        """The run's id in MLflow; None for a run that has not been sent."""
        run_id = (read_json(self.relay_file) or {}).get("mlflow_run_id")
        return run_id if isinstance(run_id, str) else None

    def clear_scratch(self) -> None:
        """Removes what loading a checkpoint has left, if workers were ended meanwhile."""
        remove_converted(self.scratch)

    def unsent_bytes(self) -> int:
        """Bytes of the journal that MLflow has not got; 0 for a run of which nothing was sent."""
        offset = (read_json(self.relay_file) or {}).get("offset")
        if not is_count(offset):
            return 0
        try:
            return max(0, self.journal_file.stat().st_size - offset)
        except OSError:
            return 0


def runs_below(folder: Path) -> Iterator[Run]:
    """The runs and sweeps in a folder and in all folders below it."""
    # Folders that a training removes at this moment, such as an old checkpoint's, are passed over.
    return (Run(Path(place)) for place, _, names in os.walk(folder) if Run(folder).journal_file.name in names)


def job_key(job: dict[str, Any] | None) -> str | None:
    """The job id in the content of job.json: ``120``, or ``120_3`` for a task of an array; None where it has none.

    What has not the form of an id counts as none, because it would reach a scheduler's programs as an argument.
    """
    if job is None:
        return None
    array, task = job.get("array_job_id"), job.get("array_task_id")
    found = f"{array}_{task}" if array is not None and task is not None else job.get("job_id")
    return str(found) if is_job_id(found) else None


def is_job_id(value: Any) -> bool:
    """Whether a value has the form of a scheduler's job id, such as ``120``, ``120_3`` or ``120[3].server``."""
    return type(value) in (int, str) and _JOB_ID.fullmatch(str(value)[:_LONGEST_JOB_ID]) is not None


def named_checkpoint(path: Path) -> Path | None:
    """The checkpoint that a path names, or the newest of the run or folder that it names; None if there is none.

    Of the newest one the files are not read.
    """
    if (path / manifest.NAME).exists():
        return path
    own = Run(path).checkpoints
    folder = own if own.is_dir() else path
    name = newest_name(folder)
    return folder / name if name else None
