"""One worker of a pool that trains one run after the other: ``python -m tests.support.pool_worker FOLDER``.

In the environment that torchrun gives. Does what `ortlaunch.worker` does, again and again, so that importing the
libraries and meeting the other workers is done once. Requests are files ``FOLDER/N.request`` (a run folder and a
working folder, as JSON); each worker answers with ``FOLDER/N.RANK.answer``. An empty request ends the pool.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.base import output
from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.modules import add_working_folder
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import Config, Device
from ortlaunch.run import failure
from ortlaunch.trainer import session
from ortlaunch.trainer.run import train_run
from ortlaunch.trainer.workers import Workers, join
from tests.support.recording import recorded

_POLL_SECONDS = 0.02


class _Groups:
    """The process groups that a run makes for itself, kept for the runs after it.

    A group is never destroyed, and its threads wake a hundred times a second. With two further groups for each run, a
    pool that waits would take a third of a core after fifty runs.
    """

    def __init__(self) -> None:
        self._kept: list[dist.ProcessGroup] = []
        self._taken = 0
        self._make = session.separate_group

    def begin(self, *, after_failure: bool) -> None:
        """Another run begins. One that failed may have left its groups in the midst of a collective."""
        self._taken = 0
        if after_failure:
            self._kept.clear()

    def take(self, config: Config) -> dist.ProcessGroup:
        """In the place of `separate_group`."""
        if self._taken == len(self._kept):
            self._kept.append(self._make(config))
        self._taken += 1
        return self._kept[self._taken - 1]


def main() -> None:
    folder = Path(sys.argv[1])
    workers: Workers | None = None
    groups = _Groups()
    session.separate_group = groups.take
    for number in itertools.count(1):
        request = _wait_for(folder / f"{number}.request")
        if request is None:
            break
        # With the first run's time-outs.
        workers = workers or join(load_config(Path(request["run_dir"]) / "config.yaml"), Device.cpu)
        groups.begin(after_failure=request["after_failure"])
        record = Path(request["record"]) if request["record"] else None
        answer = _train(Path(request["run_dir"]), Path(request["cwd"]), workers, record)
        replace_text(folder / f"{number}.{workers.rank}.answer", json.dumps(answer))
    # As a worker ends: see ortlaunch.worker.
    os._exit(0)


def _wait_for(path: Path) -> dict[str, Any] | None:
    parent = os.getppid()
    while not path.exists():
        # The tests have gone.
        if os.getppid() != parent:
            os._exit(1)
        time.sleep(_POLL_SECONDS)
    return json.loads(path.read_text() or "null")


def _train(run_dir: Path, cwd: Path, workers: Workers, record: Path | None) -> dict[str, object]:
    with _as_in_a_process_of_its_own(run_dir / "logs" / f"rank-{workers.rank}.log", cwd):
        try:
            with recorded(record, workers):
                train_run(load_config(run_dir / "config.yaml"), run_dir, workers, {}, time.time())
        except BaseException as error:
            traceback.print_exc()
            failure.record(run_dir, workers.rank, error)
            return {"error": str(error), "is_request": isinstance(error, RequestError)}
    return {}


@contextmanager
def _as_in_a_process_of_its_own(log: Path, cwd: Path) -> Iterator[None]:
    """Output into the run's log, the user's modules from the working folder, and torch's switches as they were."""
    streams = [os.dup(1), os.dup(2)]
    before = set(sys.modules)
    output.redirect(log, to_terminal=False)
    os.chdir(cwd)
    add_working_folder()
    try:
        yield
    finally:
        sys.path.remove(str(cwd))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(cwd)):
                del sys.modules[name]
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        sys.stdout.flush()
        sys.stderr.flush()
        for number, stream in enumerate(streams, start=1):
            os.dup2(stream, number)
            os.close(stream)
        with suppress(ValueError):
            gc.collect()


if __name__ == "__main__":
    main()
