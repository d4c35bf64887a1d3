"""One worker, which torchrun starts as ``python -m ortlaunch.worker RUN_DIR [FOLDER COMMAND ...]``.

A worker reads the resolved configuration from the run folder. It does not use Hydra, and it imports only the packages
that the configuration needs. With a command it becomes a script: it starts that in the folder, in its own place.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from ortlaunch.base.processes import die_with_parent
from ortlaunch.run.run import Run, Stopped


def main() -> None:
    """Runs this worker and ends the process. After a failure, the run folder holds the error and the exit code is 1."""
    # On a cluster torchrun ignores SIGTERM, and its children inherit that. The training installs a handler later.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    run_dir, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    # The failure of this worker's earlier attempt.
    Run(run_dir).failure_file(rank).unlink(missing_ok=True)
    _hold_lock(run_dir)
    if len(sys.argv) > 2:
        _become(Run(run_dir), rank, sys.argv[2], sys.argv[3:])
    _train(run_dir, rank)


def _train(run_dir: Path, rank: int) -> NoReturn:
    """Trains in ortlaunch's own loop."""
    # Imported here, because a script waits for every import of this module.
    import traceback

    from ortlaunch.base import output
    from ortlaunch.base.modules import add_working_folder
    from ortlaunch.base.own_code import report_deaths
    from ortlaunch.base.secrets import without_secrets
    from ortlaunch.base.sockets import use_socket_folder
    from ortlaunch.run import failure

    output.redirect(Run(run_dir).rank_log(rank), to_terminal=rank == 0)
    report_deaths()
    use_socket_folder()
    if os.environ.get("ORTLAUNCH_ATTEMPT", "0") != "0":
        from ortlaunch.run.attempt import header

        print(header(), file=sys.stderr, flush=True)
    # The user's model factory may be a module in the current folder.
    add_working_folder()
    try:
        work(run_dir)
    except BaseException as error:
        print(without_secrets(traceback.format_exc()), end="", file=sys.stderr)
        failure.record(run_dir, rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        # The other workers wait in a collective that this one does not join. A normal shutdown could wait for them.
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit of the interpreter can abort the process (seen in 3 of 100 finished runs): gloo's thread may drop
    # the last reference to a tensor, and Python then ends this thread in the middle of the destructor. Destroying
    # gloo's groups first is no solution either: see ortlaunch.trainer.workers.leave_group.
    os._exit(0)


def _become(run: Run, rank: int, folder: str, command: list[str]) -> NoReturn:
    """Becomes a script, whose output goes to this rank's log; its process keeps the number of this one."""
    from ortlaunch.base import output

    output.append_to(run.rank_log(rank))
    if os.environ.get("ORTLAUNCH_ATTEMPT", "0") != "0":
        from ortlaunch.run.attempt import header

        print(header(), flush=True)
    if (word := run.stop_word()) is not None or run.stopped_file.exists():
        # torchrun starts the workers of a run again that have ended by the signal.
        print("the run was asked to stop before the script began", flush=True)
        if word is not None:
            run.note_stopped(Stopped(0, "", word or "signal"))
        sys.exit(0)
    try:
        run.checkpoints.mkdir(exist_ok=True)
        os.chdir(folder)
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")


def _hold_lock(run_dir: Path) -> None:
    """Holds the workers' lock until this process ends. A launcher that starts the run again waits for this lock."""
    try:
        lock = os.open(Run(run_dir).workers_lock, os.O_RDWR | os.O_CREAT, 0o644)
        # A script that this process becomes holds it, too.
        os.set_inheritable(lock, True)
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        return  # The file system has no locks.


def work(run_dir: Path) -> None:
    """Builds, wraps and trains the model that the run folder's configuration describes."""
    # Heavy imports come after the output is redirected, and are timed.
    from ortlaunch.config.devices import resolve_device
    from ortlaunch.config.hidden import check_whole
    from ortlaunch.config.load import load_config, to_dict
    from ortlaunch.config.trainers import trainer_of

    # If torchrun has restarted this worker, its start-up time counts from now and not from the launch.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    started = time.time() if restarted else float(os.environ["ORTLAUNCH_STARTED"])
    config = load_config(Run(run_dir).config_file)
    check_whole({**to_dict(config), "tracking": {}, "trackers": {}})
    times = _Stopwatch()
    from ortlaunch.trainer.imports import import_stack

    import_stack(trainer_of(config.trainer), config.backend.name)
    times.lap("startup/import_seconds")

    from ortlaunch.trainer.workers import join

    workers = join(config, resolve_device(config.device))
    times.lap("startup/rendezvous_seconds")

    from ortlaunch.trainer.run import train_run

    train_run(config, run_dir, workers, times.laps, started)


class _Stopwatch:
    """Measures the seconds between laps, by metric name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


if __name__ == "__main__":
    main()
