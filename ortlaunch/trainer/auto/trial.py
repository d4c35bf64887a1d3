"""A trial of a backend: ``python -m ortlaunch.trainer.auto.trial RUN_DIR BACKEND``, once for each worker of the run.

It builds what a run with this backend builds, with its start check, and trains some steps from the beginning. Nothing
of it is kept but the times, the model's export and the compiled kernels in the user's caches.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.modules import add_working_folder
from ortlaunch.base.processes import be_first_to_die, die_with_parent
from ortlaunch.base.secrets import without_secrets
from ortlaunch.run.run import Run
from ortlaunch.trainer.garbage import left_out

with left_out():
    # They import torch.
    from ortlaunch.trainer.auto.selection import in_one_line
    from ortlaunch.trainer.auto.trials import STARTED, result_file

if TYPE_CHECKING:
    from ortlaunch.trainer.build import Parts
    from ortlaunch.trainer.feed import Feed

WARM_UP = 2
"""Steps that do not count."""
FIRST = 3
"""Steps that are measured at least."""
LEAST_SECONDS = 1.0
"""Seconds that are measured at least, with at most `MOST` steps."""
MOST = 100


def steps_to_measure(step_seconds: float) -> int:
    """How many steps to measure after the `FIRST` ones, which took `step_seconds` each."""
    return max(0, min(MOST, int(LEAST_SECONDS / max(step_seconds, 1e-6))) - FIRST)


def measure(run_dir: Path, backend: str) -> dict[str, float]:
    """Trains some steps of this worker's part, and returns their times.

    Raises:
        RequestError: the backend refuses the model.
    """
    from ortlaunch.config.devices import resolve_device
    from ortlaunch.config.load import load_config
    from ortlaunch.config.trainers import trainer_of
    from ortlaunch.trainer.imports import import_stack

    config = load_config(Run(run_dir).config_file)
    import_stack(trainer_of(config.trainer), backend)

    from ortlaunch.config.candidates import plain_backend
    from ortlaunch.trainer.build import build
    from ortlaunch.trainer.context import RunContext
    from ortlaunch.trainer.feed import Feed
    from ortlaunch.trainer.garbage import collected_every
    from ortlaunch.trainer.system_info import SystemInfo
    from ortlaunch.trainer.watch import Watch
    from ortlaunch.trainer.workers import join, leave_limits_to_watch, separate_group

    train = dataclasses.replace(config.train, resume="never")
    config = dataclasses.replace(config, backend=plain_backend(backend), train=train)
    workers = join(config, resolve_device(config.device))
    folder, group = Run(run_dir).trials, separate_group(config)
    context = RunContext(
        config=config,
        # A folder without checkpoints, so that nothing is resumed or set aside.
        run=Run(folder),
        workers=workers,
        launched=float(os.environ[STARTED]),
        entered=time.perf_counter(),
        attempt=0,
        watch=Watch(folder, workers.rank, workers.world_size, first_seconds=1e9, seconds=1e9),
        journal=None,
        writers=group,
        control=group,
        system=SystemInfo(workers, group, run_dir),
    )
    leave_limits_to_watch()
    parts = build(context, {})
    feed = Feed(parts.batches, workers.device)

    step = partial(_step, parts, feed, train.grad_accumulation, workers.device)
    with collected_every(train.gc_every) as collect:
        step()
        start = time.time() - context.launched
        collect(1)
        for _ in range(WARM_UP - 1):
            step()
        seconds = [step() for _ in range(FIRST)]
        # The slowest worker decides how many more, so that all take as many.
        slowest = float(workers.gather([statistics.median(seconds)]).max())
        seconds += [step() for _ in range(steps_to_measure(slowest))]
    found = workers.gather([statistics.median(seconds), start]).amax(dim=0)
    return {"step_seconds": float(found[0]), "start_seconds": float(found[1])}


def _step(parts: Parts, feed: Feed, count: int, device: object) -> float:
    """Takes a step of `count` micro-batches, and returns its seconds."""
    since = time.perf_counter()
    for index in range(count):
        batch = feed.take()
        parts.engine.micro_step(batch, last=index == count - 1)
        # As in the training loop: what a few batches show to be frozen is refused here, and not in the run.
        parts.backend.check_decisions(batch)
        feed.prefetch()
    parts.engine.step()
    _wait_for(device)
    return time.perf_counter() - since


def _wait_for(device: object) -> None:
    import torch

    if getattr(device, "type", "") == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measures, writes the result and ends the process."""
    die_with_parent(signal.SIGKILL)
    # A trial that needs more than there is must not end the run that waits for it.
    be_first_to_die()
    run_dir, backend = Path(sys.argv[1]), sys.argv[2]
    add_working_folder()
    result, code = result_file(Run(run_dir), backend, int(os.environ["RANK"])), 0
    try:
        replace_text(result, json.dumps(measure(run_dir, backend)))
    except RequestError as error:
        replace_text(result, json.dumps({"unfit": in_one_line(error)}))
    except Exception:
        print(without_secrets(traceback.format_exc()), end="", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # As a worker ends: native threads may hang at exit.
    os._exit(code)


if __name__ == "__main__":
    main()
