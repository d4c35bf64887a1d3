"""A run folder and all that is known of its run: the one place that names its files.

The launcher makes the folder and writes what the run is; workers append to its journal; all others read. Paths are
properties, what is read is a method. Needs nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.run.checkpoints import newest_name
from ortlaunch.run.identity import Process
from ortlaunch.run.journal import Journal, iterate
from ortlaunch.run.settings import read_settings
from ortlaunch.run.state import RunState, fold

ARTIFACT_FOLDER = "ortlaunch"
"""Folder of a run's artifacts in a tracking server that takes what says what ran."""


@dataclass(frozen=True)
class Stopped:
    """Where a run stopped on request, and why."""

    step: int
    checkpoint: str
    reason: str
    """The first word of the request; ``signal`` where it came as a signal."""


@dataclass(frozen=True)
class Run:
    """A run by its folder, which need not be there yet. A sweep's folder has a journal and a configuration too."""

    path: Path

    # What the run is.

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def overrides_file(self) -> Path:
        """The command line."""
        return self.path / "overrides.yaml"

    @property
    def environment_file(self) -> Path:
        """Machine, repository, command and variables at the launch."""
        return self.path / "env.json"

    @property
    def packages_file(self) -> Path:
        """The installed packages."""
        return self.path / "packages.txt"

    @property
    def patch_file(self) -> Path:
        """What differs from the repository's commit; absent where nothing does."""
        return self.path / "git.patch"

    @property
    def records(self) -> tuple[Path, ...]:
        """The files that say what ran."""
        return (self.config_file, self.overrides_file, self.environment_file, self.packages_file, self.patch_file)

    def earlier_attempt(self, number: int) -> Path:
        """Folder of what an attempt, counted from 1, has left about itself, once another one has begun."""
        return self.path / "attempts" / str(number)

    # Who runs it.

    @property
    def launcher_file(self) -> Path:
        """The launcher's process; see `ortlaunch.run.identity`."""
        return self.path / "launcher.json"

    @property
    def job_file(self) -> Path:
        """The scheduler's job."""
        return self.path / "job.json"

    def script_file(self, scheduler: str) -> Path:
        """What the scheduler of this name was given to run."""
        return self.path / ("sbatch.sh" if scheduler == "slurm" else "job.sh")

    @property
    def history_file(self) -> Path:
        """The attempts of a job."""
        return self.path / "history.json"

    @property
    def claims(self) -> Path:
        """Who may write the run; see `ortlaunch.run.claim`."""
        return self.path / "claims"

    @property
    def workers_lock(self) -> Path:
        """Every worker holds a shared lock on it while it lives."""
        return self.path / ".workers.lock"

    @property
    def preflight(self) -> Path:
        """What a cluster's nodes found out about themselves."""
        return self.path / "preflight"

    @property
    def preflight_token(self) -> Path:
        """What tells one attempt's nodes that they see this folder as it is now."""
        return self.path / "preflight.token"

    def scheduler_variables(self, attempt: int, scheduler: str) -> Path:
        """The variables of the scheduler of this name in an attempt, counted from 0."""
        return self.path / f"{scheduler}-{attempt}.json"

    # What happens in it.

    @property
    def journal_file(self) -> Path:
        """The journal."""
        return self.path / "journal.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of what processes print."""
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        """What a worker prints, over all attempts."""
        return self.logs / f"rank-{rank}.log"

    def torchrun_log(self, node: int | str | None = None) -> Path:
        """What torchrun prints on a machine; of a run on one machine without its number."""
        return self.logs / ("torchrun.log" if node is None else f"torchrun-{node}.log")

    def torchrun_logs(self) -> list[Path]:
        """What torchrun has printed on all machines."""
        return sorted(self.logs.glob("torchrun*.log"))

    def scheduler_log(self, scheduler: str) -> Path:
        """What the first process of a job of this scheduler prints."""
        return self.logs / ("slurm.log" if scheduler == "slurm" else "job.log")

    @property
    def relay_log(self) -> Path:
        """What was left out on the way to a tracking server, and why."""
        return self.logs / "relay.log"

    @property
    def relay_file(self) -> Path:
        """How far the journal has got on its way to MLflow."""
        return self.path / "relay.json"

    @property
    def relay_lock(self) -> Path:
        """Held by the process that sends the journal."""
        return self.path / ".relay.lock"

    def tracker_file(self, tracker: str) -> Path:
        """How far the journal has got on its way to a tracker."""
        return self.relay_file if tracker == "mlflow" else self.path / f"relay-{tracker}.json"

    def tracker_lock(self, tracker: str) -> Path:
        """Held by the process that sends the journal to a tracker."""
        return self.relay_lock if tracker == "mlflow" else self.path / f".relay-{tracker}.lock"

    def tracker_locks(self) -> list[Path]:
        """Those of all trackers that something was sent to; MLflow's, which stands for the run, comes first."""
        return [self.relay_lock, *sorted(self.path.glob(".relay-*.lock"))]

    def tracker_folder(self, tracker: str) -> Path:
        """Folder of the files that a tracker keeps with the run."""
        return self.path / tracker

    @property
    def health(self) -> Path:
        """Folder where each worker shows that it makes progress."""
        return self.path / "health"

    def beat_file(self, rank: int) -> Path:
        """A worker's latest sign of life."""
        return self.health / f"rank-{rank}.json"

    @property
    def stacks(self) -> Path:
        """Folder of the workers' stacks when they stood still."""
        return self.path / "stacks"

    def stack_file(self, rank: int) -> Path:
        """A worker's stacks."""
        return self.stacks / f"rank-{rank}.txt"

    @property
    def failures(self) -> Path:
        """Folder of what the workers failed with."""
        return self.path / "failures"

    def failure_file(self, rank: int) -> Path:
        """What a worker failed with."""
        return self.failures / f"rank-{rank}.json"

    # What is asked of it, and what it leaves.

    @property
    def stop_file(self) -> Path:
        """The request to stop: workers finish their step, write a checkpoint and end when it is there."""
        return self.path / "STOP"

    @property
    def stopped_file(self) -> Path:
        """Where the run stopped on request."""
        return self.path / "stopped.json"

    @property
    def done_file(self) -> Path:
        """Present when all steps are done."""
        return self.path / "done.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints; see `ortlaunch.run.checkpoints`."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Folder of the trained weights."""
        return self.path / "weights"

    @property
    def onnx(self) -> Path:
        """Folder of the exported graphs."""
        return self.path / "onnx"

    @property
    def profile(self) -> Path:
        """Folder of what a profiler saw."""
        return self.path / "profile"

    def memory_file(self, rank: int) -> Path:
        """What filled a worker's memory."""
        return self.path / "memory" / f"rank-{rank}.pickle"

    @property
    def scratch(self) -> Path:
        """Folder that may be filled while a checkpoint is loaded."""
        return self.path / ".universal"

    # Reading and writing.

    def check(self) -> None:
        """Refuses a folder that holds no run.

        Raises:
            RequestError: with the folder.
        """
        if not (self.config_file.is_file() or self.journal_file.is_file()):
            raise RequestError(f"{self.path} is no run folder: it has no {self.config_file.name}")

    @property
    def exists(self) -> bool:
        """Whether a run has begun to be written here."""
        return self.config_file.is_file() and self.journal_file.is_file()

    def journal(self) -> Journal:
        """The journal, open for appending."""
        return Journal(self.journal_file)

    def state(self) -> RunState:
        """What all events of the journal amount to."""
        return fold(iterate(self.journal_file)) if self.journal_file.is_file() else RunState()

    def settings(self) -> dict[str, Any]:
        """The configuration as plain values; empty without one.

        Raises:
            RequestError: it cannot be read.
        """
        return read_settings(self.config_file)

    def setting(self, key: str) -> Any:
        """One value of the configuration by its dotted key; None where there is none, or it cannot be read."""
        try:
            value: Any = self.settings()
        except RequestError:
            return None
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def job(self) -> dict[str, Any] | None:
        """The scheduler's job; None for a run that has none."""
        return read_json(self.job_file)

    def launcher(self) -> Process | None:
        """The launcher's process; None for a run that was not launched by one."""
        return Process.stored(read_json(self.launcher_file))

    def note_launcher(self) -> None:
        """Says that this process launches the run."""
        # In one step: it is read at any moment. A new file also changes the folder's modification time, by which
        # `ortlaunch jobs` sees that what it knows of an earlier attempt no longer holds.
        replace_text(self.launcher_file, json.dumps(asdict(Process.this())) + "\n")

    def beat(self, rank: int = 0) -> dict[str, Any]:
        """A worker's latest sign of life; empty where there is none."""
        return read_json(self.beat_file(rank)) or {}

    def ask_to_stop(self, word: str = "") -> None:
        """Asks the workers to stop with a checkpoint.

        Args:
            word: whose will it is; empty for a signal's.
        """
        if word:
            replace_text(self.stop_file, f"{word}\n")
        else:
            self.stop_file.touch()

    def stop_word(self) -> str | None:
        """First word of the request to stop, empty if it holds none; None where there is no request."""
        try:
            return next(iter(self.stop_file.read_text(encoding="utf-8", errors="replace").split()), "")
        except OSError:
            return None

    def note_stopped(self, stopped: Stopped) -> None:
        """Says where the run stopped on request, and takes the request as fulfilled."""
        content = {"step": stopped.step, "checkpoint": stopped.checkpoint, "reason": stopped.reason}
        replace_text(self.stopped_file, json.dumps(content) + "\n")
        self.stop_file.unlink(missing_ok=True)

    def stopped(self) -> Stopped | None:
        """Where the run stopped on request; None where it did not."""
        found = read_json(self.stopped_file)
        if found is None or not isinstance(found.get("step"), int):
            return None
        return Stopped(found["step"], str(found.get("checkpoint", "")), str(found.get("reason", "")))

    def note_done(self, steps: int) -> None:
        """Says that all steps are done: a launch that comes later finds nothing to do."""
        replace_text(self.done_file, json.dumps({"step": steps}) + "\n")

    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.done_file.exists()

    def newest_checkpoint(self) -> str:
        """Name of the newest complete checkpoint; empty where there is none."""
        return newest_name(self.checkpoints)

    def mlflow_run_id(self) -> str | None:
        """The id that MLflow gave to the run; None where it has not been sent."""
        run_id = (read_json(self.relay_file) or {}).get("mlflow_run_id")
        return run_id if isinstance(run_id, str) else None


def runs_below(folder: Path) -> Iterator[Run]:
    """The runs, and the sweeps, in a folder and all below it."""
    return (Run(journal.parent) for journal in folder.rglob(Run(folder).journal_file.name))


def read_json(path: Path | str) -> dict[str, Any] | None:
    """A JSON object from a file; None where there is none."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def job_key(job: dict[str, Any] | None) -> str | None:
    """The id of the job that a job.json names: ``120``, or ``120_3`` for an array's task; None where it names none."""
    if job is None:
        return None
    array, task = job.get("array_job_id"), job.get("array_task_id")
    if array is not None and task is not None:
        return f"{array}_{task}"
    return None if job.get("job_id") is None else str(job["job_id"])
