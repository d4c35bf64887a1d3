"""What one worker of a run has before anything is built: its place, its groups, its journal and its watch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ortlaunch.config.schema import Config
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.trainer.system_info import SystemInfo
from ortlaunch.trainer.watch import Watch
from ortlaunch.trainer.workers import Workers, separate_group


@dataclass(frozen=True)
class RunContext:
    """One worker's view of a run; the first argument of every phase."""

    config: Config
    run: Run
    workers: Workers
    launched: float
    """When the launcher started the run, in seconds since the epoch."""
    entered: float
    """When this worker began to set up its training, on the clock of `time.perf_counter`."""
    attempt: int
    """How often torchrun and the scheduler have restarted the workers, in all jobs of the run."""
    watch: Watch
    journal: Journal | None
    """The run's journal on the first worker, None on the others."""
    writers: dist.ProcessGroup
    """All workers, on the CPU, for the threads that write checkpoints."""
    control: dist.ProcessGroup
    """All workers, on the CPU, for start-up and for requests to stop."""
    system: SystemInfo
    restarts: int = 0
    """How often the workers were restarted since this launch of the run: `ortlaunch resume` is a new one."""


def open_context(config: Config, run_dir: Path, workers: Workers, launched: float) -> RunContext:
    """Starts the watch, opens the journal and exchanges facts about the machines; all workers call it.

    Args:
        config: the run's configuration.
        run_dir: the run folder.
        workers: this worker's place.
        launched: when the launcher started the run, in seconds since the epoch.
    """
    entered, run = time.perf_counter(), Run(run_dir)
    watch = Watch(
        run_dir,
        workers.rank,
        workers.world_size,
        first_seconds=config.trainer.timeout_seconds,
        seconds=config.launcher.timeout_seconds,
    )
    watch.start()
    journal = run.journal(is_patient=True) if workers.is_first else None
    # Two groups: a thread that writes a checkpoint uses one of them while the main thread uses the other.
    writers, control = separate_group(config), separate_group(config)
    return RunContext(
        config=config,
        run=run,
        workers=workers,
        launched=launched,
        entered=entered,
        attempt=_counted("TORCHELASTIC_RESTART_COUNT", "ORTLAUNCH_ATTEMPT"),
        watch=watch,
        journal=journal,
        writers=writers,
        control=control,
        system=SystemInfo(workers, control, run_dir),
        restarts=_counted("TORCHELASTIC_RESTART_COUNT", "ORTLAUNCH_RESTARTS"),
    )


def _counted(*names: str) -> int:
    """The sum of counts that torchrun and the scheduler's launcher have left in the environment."""
    return sum(int(os.environ.get(name, "0")) for name in names)
