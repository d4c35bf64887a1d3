"""A probe of ``ortlaunch estimate``: ``python -m ortlaunch.estimate.probe FOLDER``.

The memory of ONNX Runtime and of torch.compile cannot be traced on tensors without content. So this process really
takes a run's phases, as the first of its workers, with the configuration's micro-batch, and measures itself. It reads
``config.yaml`` and ``probe.json`` in the folder. It writes ``report.json``, or ``refused.txt`` if the phases cannot be
run.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import add_working_folder
from ortlaunch.base.processes import be_first_to_die, die_with_parent
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import Allow, Config, OrtConfig, OrtDebugConfig
from ortlaunch.config.trainers import trainer_of
from ortlaunch.estimate import exchange
from ortlaunch.estimate.band import OPENING
from ortlaunch.estimate.ledger import Use
from ortlaunch.estimate.pretend import join_nobody, replacements
from ortlaunch.estimate.trace import Rehearsal
from ortlaunch.launch.report_process import REFUSED, REPORT
from ortlaunch.trainer.imports import import_stack
from ortlaunch.trainer.prepare import open_loader

REQUEST = "probe.json"
"""The file with ``world_size``, ``threads`` of a worker, ``most_bytes``, what the process may take beyond what it has
at its start, and ``most_seconds`` of processor time."""
_FURTHER_STEPS = 3
"""The most steps after the second one that a probe takes."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_LOOK_SECONDS = 0.002
"""How often a probe looks how long a step has computed."""


class Peak(NamedTuple):
    """The memory of a process in one phase, in bytes."""

    least: int
    """Without the step beside which the copy of a checkpoint is by chance."""
    likely: int
    """The same with that step, within which the copy is gone when it is written."""
    most: int
    """With the copy to the step's end."""


class ProcessMeter:
    """The resident memory of this process; its peak is the kernel's."""

    def __init__(self, threads: int = 1) -> None:
        """
        Args:
            threads: of a worker, where this process has one: it takes a step in so many times the seconds.
        """
        self._threads = threads

    @property
    def now(self) -> Use:
        """What is resident now."""
        size = int(psutil.Process().memory_info().rss)
        return Use(size, size, size, size)

    def take_peak(self) -> Use:
        """The largest resident memory since the last call; since the process began where the kernel keeps only that."""
        lines = _STATUS.read_text().splitlines()
        size = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
        return Use(size, size, size, size)

    def repeated(self, times: int) -> contextlib.AbstractContextManager[int]:
        """Nothing is repeated by itself. The first ones of the steps show most of what grows from step to step."""
        return contextlib.nullcontext(max(0, min(times, _FURTHER_STEPS)))

    @contextlib.contextmanager
    def after(self, seconds: float, act: Callable[[], None]) -> Iterator[None]:
        """Within it is a step, and something is done once, when this process has computed as long as a worker.

        Args:
            seconds: of a worker.
            act: what is done, in another thread. A step that takes less time ends without it.
        """
        until, over = time.process_time() + self._threads * seconds, threading.Event()

        def wait() -> None:
            while time.process_time() < until:
                if over.wait(_LOOK_SECONDS):
                    return
            act()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def answering(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is made up: tensors have content."""
        return contextlib.nullcontext()


def phases(config: Config, world_size: int, threads: int) -> dict[str, Peak]:
    """Takes the phases of a run, and returns the peak of this process in each of them.

    Args:
        config: the run's configuration, with ``backend=ort`` or ``backend=compile``.
        world_size: its workers; this process is the first of them.
        threads: those of a worker.

    Raises:
        RequestError: the request is refused as in a run.
        Exception: a phase fails.
    """
    from ortlaunch.ort.cache.exports import exporting_anew
    from ortlaunch.ort.verify.start import FRESH_BATCHES

    if isinstance(config.backend, OrtConfig):
        config = replace(config, backend=_unhindered(config.backend))
    workers, meter = join_nobody(world_size), ProcessMeter(threads)
    with open_loader(config, workers) as loader:
        loader.start_processes()
        batches = list(islice(loader, 1 + FRESH_BATCHES))
        opening = meter.take_peak()
        held_out = list(loader.held_out(config.train.eval_samples)) if config.train.eval_every is not None else []
        # The export is a part of a first start's peak, whatever is kept of an earlier one.
        with replacements(), exchange.held(), exporting_anew():
            found = Rehearsal(config, workers, batches, meter, is_fake=False).trace()
        del held_out
    peaks = {name: Peak(use.least, use.process, use.most) for name, use in {OPENING: opening, **found.phases}.items()}
    if "end" in peaks and "checkpoint" in peaks:
        # The allocator may keep the copy's memory to the end.
        end, copied = peaks["end"], peaks["checkpoint"]
        peaks["end"] = Peak(min(end.least, copied.least), end.likely, end.most + copied.most - copied.likely)
    return peaks


def _unhindered(backend: OrtConfig) -> OrtConfig:
    """The backend without graphs to be written and refusals at the start, which are no matter of memory.

    Wrong gradients are allowed only where the run allows them: else it compares gradients after evaluations.
    """
    allowed = [kind for kind in Allow if kind is not Allow["wrong_gradients"] or kind in backend.allow]
    return replace(backend, allow=allowed, debug=OrtDebugConfig())


def main() -> None:
    """Probes the run whose configuration is in the folder."""
    die_with_parent()
    be_first_to_die()
    folder = Path(sys.argv[1])
    add_working_folder()
    request = json.loads((folder / REQUEST).read_text())
    resource.setrlimit(resource.RLIMIT_CPU, (int(request["most_seconds"]), resource.RLIM_INFINITY))
    try:
        config = load_config(folder / "config.yaml")
        torch.set_num_threads(1)
        import_stack(trainer_of(config.trainer), config.backend.name)
        most = int(psutil.Process().memory_info().vms) + int(request["most_bytes"])
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        found = phases(config, int(request["world_size"]), int(request["threads"]))
    except RequestError as error:
        (folder / REFUSED).write_text(str(error))
    except Exception as error:
        (folder / REFUSED).write_text(f"{type(error).__name__}: {error}")
    else:
        (folder / REPORT).write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
