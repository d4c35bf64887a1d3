"""What torchrun starts: one worker. ``python -m ortlaunch.worker RUN_DIR`` with torchrun's environment.

Reads the resolved configuration from the run folder; knows nothing of Hydra, and imports only what it asks for.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from ortlaunch.base import output
from ortlaunch.base.processes import die_with_parent
from ortlaunch.base.programs import add_to_path
from ortlaunch.run import failure
from ortlaunch.run.run import Run


def main() -> None:
    """Runs this worker to its end; a failure is left in the run folder before the exit code 1. Does not return."""
    # On a cluster torchrun ignores it and its children inherit that; the training takes it over later.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    run_dir, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    failure.forget(run_dir, rank)
    _hold_lock(run_dir)
    output.redirect(Run(run_dir).rank_log(rank), to_terminal=rank == 0)
    if os.environ.get("ORTLAUNCH_ATTEMPT", "0") != "0":
        from ortlaunch.run.attempt import header

        print(header(), file=sys.stderr, flush=True)
    # A user's model factory lies where the user is; `python -m` would have put it there before torchrun.
    sys.path.insert(0, os.getcwd())
    try:
        work(run_dir)
    except BaseException as error:
        traceback.print_exc()
        failure.record(run_dir, rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        # Peers wait in a collective that will not come; ordinary shutdown could wait with them.
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end: gloo's thread may just then drop the last reference to a tensor of ours, and
    # a thread that Python ends in the middle of a destructor aborts the process (seen in 3 of 100 finished runs).
    # Nor by taking gloo's groups down before: see ortlaunch.trainer.workers.leave_group.
    os._exit(0)


def _hold_lock(run_dir: Path) -> None:
    """Shows that this worker lives, for as long as it does: whoever launches the run again waits for it."""
    try:
        fcntl.flock(os.open(Run(run_dir).workers_lock, os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_SH)
    except OSError:
        return  # A file system without locks.


def work(run_dir: Path) -> None:
    """Builds, wraps and trains what the run folder's configuration says."""
    # Heavy imports come after the output is redirected, and are timed.
    from ortlaunch.config.devices import resolve_device
    from ortlaunch.config.load import load_config
    from ortlaunch.config.trainers import trainer_of

    # Workers that torchrun starts again begin now and not when the run was launched.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    started = time.time() if restarted else float(os.environ["ORTLAUNCH_STARTED"])
    config = load_config(Run(run_dir).config_file)
    times = _Stopwatch()
    _import_stack(trainer_of(config.trainer).packages, config.backend.name)
    times.lap("startup/import_seconds")

    from ortlaunch.trainer.workers import join

    workers = join(config, resolve_device(config.device))
    times.lap("startup/rendezvous_seconds")
    if config.launcher.tries_connections:
        from ortlaunch.trainer.preflight import meet, note

        note(meet(workers), workers, run_dir)
        times.lap("startup/preflight_seconds")

    from ortlaunch.trainer.run import train_run

    train_run(config, run_dir, workers, times.laps, started)


class _Stopwatch:
    """Seconds between laps, by metric name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def _import_stack(packages: tuple[str, ...], backend: str) -> None:
    import torch  # noqa: F401

    if packages:
        add_to_path()  # DeepSpeed's own optimizers are compiled when they are first used.
    for package in packages:
        importlib.import_module(package)
    if backend == "ort":
        from ortlaunch.ort import session

        session.import_ortmodule()
    output.quiet_library_logs()


if __name__ == "__main__":
    main()
