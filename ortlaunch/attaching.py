"""`ortlaunch.attach`: from a script to its run, wherever it was started.

Under ortlaunch the run folder is there. Alone, and under plain torchrun, the first worker makes one in the run root, or
goes on in the one that ``ORTLAUNCH_RUN_DIR`` names. All that reads runs finds it; nothing is sent to a tracker until
``ortlaunch sync``.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.compose.attached import TRAIN, attached
from ortlaunch.compose.rules import check_attached
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.load import load_run_config, to_dict
from ortlaunch.config.schema import Config, LocalConfig, RunConfig, ScriptConfig, ScriptRun
from ortlaunch.config.trainers import trainer_of
from ortlaunch.launch.folder import journal_start, write_run_folder, written
from ortlaunch.launch.local.display import describe_step
from ortlaunch.launch.plan import Start
from ortlaunch.launch.planning import default_name, make_plan, plan_in
from ortlaunch.run import claim, failure
from ortlaunch.run.ending import end_run
from ortlaunch.run.key import RunKey
from ortlaunch.run.making import make_run_folder
from ortlaunch.run.run import Run
from ortlaunch.tracking import trackers
from ortlaunch.trainer.attached import Attached
from ortlaunch.trainer.imports import import_stack
from ortlaunch.trainer.session import Session
from ortlaunch.trainer.workers import Workers, join_or_alone, kept_store, separate_group, values_of_all

_FOLDER, _STARTED = "ORTLAUNCH_RUN_DIR", "ORTLAUNCH_STARTED"
"""Variables of a worker that ortlaunch has started: its run folder, and when that was."""


def attached_run(given: Sequence[str]) -> Attached:
    """Joins the other workers and opens the run; all workers call it.

    Args:
        given: the script's own defaults.

    Raises:
        RequestError: a key is none, or the run cannot be gone on with.
    """
    begun = time.perf_counter()
    folder, is_launched = os.environ.get(_FOLDER), _STARTED in os.environ
    _tell_refusals(Path(folder) if folder and is_launched else None)
    stored = load_run_config(Run(Path(folder)).config_file) if folder and is_launched else None
    attach = stored.script.attach if isinstance(stored, ScriptRun) else {}
    config = attached(given, attach, stored, int(os.environ.get("WORLD_SIZE", "1")))
    check_attached(config)
    import_stack(trainer_of(config.trainer), config.backend.name)
    startup = {"startup/import_seconds": time.perf_counter() - begun}
    workers = join_or_alone(config, resolve_device(config.device))
    if stored is None:
        run = _own_run(config, workers, folder)
    else:
        assert folder is not None
        run = Run(Path(folder))
    started = float(os.environ[_STARTED]) if is_launched else time.time()
    session = Session(config, run.path, workers, started)
    if isinstance(stored, ScriptRun):
        session.stop_signals = (signal.Signals[stored.script.signal.value],)
    session.find_checkpoint()
    if session.journal is not None:
        settings = to_dict(config)
        train = {key: value for key, value in settings["train"].items() if key in TRAIN}
        journalled = {name: settings[name] for name in ("backend", "trainer", "seed")}
        session.journal.params({**journalled, "train": train})
        session.journal.tags({"ortlaunch.backend": config.backend.name, "ortlaunch.trainer": config.trainer.name})
    # Where ortlaunch has started the script, it shows the journal's steps.
    return Attached(session, startup, described=None if is_launched or not workers.is_first else describe_step)


def _tell_refusals(launched: Path | None) -> None:
    """Ends a script that is refused with the sentence and exit code 2, as a command, and not with a traceback.

    Args:
        launched: the folder of the run that ortlaunch has started; None for a script that has begun by itself.
    """
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, RequestError):
            before(kind, error, trace)
            return
        # An error within a library's call may leave that library's stream in the place of the process's own.
        print(f"ortlaunch: {error}", file=sys.__stderr__, flush=True)
        if launched is not None:
            failure.record(launched, int(os.environ["RANK"]), error)
        raise SystemExit(exit_codes.REQUEST)

    sys.excepthook = tell


def _own_run(config: Config, workers: Workers, folder: str | None) -> Run:
    """The run of a script that ortlaunch has not started; its first worker makes the folder."""
    made = ""
    if workers.is_first:
        store = kept_store()
        if store is not None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and store.check([_FOLDER]):
            # torchrun has started the workers again.
            folder = store.get(_FOLDER).decode()
        made = str(_begin(config, workers, None if folder is None else Path(folder).absolute()))
        if store is not None:
            store.set(_FOLDER, made)
    return Run(Path(values_of_all(made, separate_group(config))[0]))


def _begin(config: Config, workers: Workers, folder: Path | None) -> Path:
    """Writes the record of a run, or of its next attempt, as `ortlaunch` would; at the script's end it is closed."""
    node = int(os.environ.get("LOCAL_WORLD_SIZE", workers.world_size))
    launcher = LocalConfig(nodes=workers.world_size // node, workers_per_node=node)
    fields = {one.name: getattr(config, one.name) for one in dataclasses.fields(RunConfig)}
    command = _command()
    arguments = ("--", *command)
    script = ScriptConfig(command=command, folder=str(Path.cwd()))
    asked = trackers.resolved(ScriptRun(**{**fields, "launcher": launcher}, script=script), Path.cwd())
    if folder is None:
        plan = make_plan(asked, arguments=arguments)
        make_run_folder(plan.run_dir)
    else:
        run = Run(folder)
        run.require(run.config_file)
        name, attempts = asked.name or default_name(asked), run.state().attempts
        plan = plan_in(asked, folder, RunKey.of_folder(folder.name).run_id, name, attempts)
        plan = dataclasses.replace(plan, arguments=arguments)
    with written(plan):
        own_claim = claim.take(plan.files)
        write_run_folder(plan, Start(sys.orig_argv))
        journal = plan.files.journal(is_patient=True)
        plan.files.note_launcher()
    journal_start(journal, plan)
    print(f"run folder: {plan.run_dir}", flush=True)
    failed: list[str] = []
    before, leave = sys.excepthook, sys.exit

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.append(f"{kind.__name__}: {error}")
        before(kind, error, trace)

    def note_code(status: object = None, /) -> NoReturn:
        # The interpreter tells nobody with which code it ends.
        failed[:] = [f"the script ended with exit code {status}"] if status not in (None, 0) else []
        leave(status)  # type: ignore[arg-type]

    def close() -> None:
        for text in failed[:1]:
            journal.failure(workers.rank, socket.gethostname(), text)
        is_stopped = plan.files.stopped_file.exists()
        end_run(plan.files, journal, "FAILED" if failed else "KILLED" if is_stopped else "FINISHED", own_claim.release)

    sys.excepthook, sys.exit = note, note_code
    atexit.register(close)
    return plan.run_dir


def _command() -> list[str]:
    """The script and its arguments, as they stand after ``--``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    first = [sys.argv[0] or "script.py"] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return [*first, *sys.argv[1:]]
