"""Profiles some steps of a run, at no cost for the others."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ortlaunch.config.schema import MemoryProfileConfig, NsightProfileConfig, ProfileConfig, TorchProfileConfig
from ortlaunch.run.run import Run
from ortlaunch.trainer.hooks import Hook
from ortlaunch.trainer.workers import Workers

_NOTHING = contextlib.nullcontext()
_MOST_ALLOCATIONS = 200_000


class Profile(Hook, ABC):
    """Profiles ``steps`` steps from ``start`` on, counted from the first step of this attempt."""

    def __init__(self, cfg: ProfileConfig, first_step: int) -> None:
        """
        Args:
            cfg: which steps.
            first_step: the number of this attempt's first step.
        """
        self._begin = first_step + cfg.start
        self._end = self._begin + cfg.steps - 1
        self._active = False

    def step_begins(self, step: int) -> None:
        if step == self._begin:
            self._active = True
            self.start()

    def step_ends(self, step: int) -> bool:
        if not self._active:
            return False
        self.step_ended()
        if step == self._end:
            self._active = False
            self.finish()
        return True

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Names a part of a step in the results."""
        return self.named(name) if self._active else super().span(name)

    @abstractmethod
    def start(self) -> None:
        """Starts to profile."""

    def step_ended(self) -> None:
        """A profiled step has ended."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Stops, and writes the results."""

    def named(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Names a part of a step while it is profiled."""
        return _NOTHING


class TorchProfile(Profile):
    """torch's profiler: ``trace-rank-N.json.gz`` and ``operators-rank-N.txt``."""

    def __init__(self, cfg: TorchProfileConfig, first_step: int, folder: Path, workers: Workers) -> None:
        super().__init__(cfg, first_step)
        self._cfg = cfg
        self._folder = folder
        self._workers = workers
        self._profiler: Any = None

    def start(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._workers.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(wait=0, warmup=0, active=self._cfg.steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=self._cfg.shapes,
            with_stack=self._cfg.stacks,
        )
        self._profiler.start()

    def step_ended(self) -> None:
        self._profiler.step()

    def finish(self) -> None:
        self._profiler.stop()
        self._profiler = None

    def named(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(f"ortlaunch/{name}")

    def _write(self, profiler: Any) -> None:
        self._folder.mkdir(exist_ok=True)
        rank = self._workers.rank
        profiler.export_chrome_trace(str(self._folder / f"trace-rank-{rank}.json.gz"))
        by = "self_cuda_time_total" if self._workers.device.type == "cuda" else "self_cpu_time_total"
        averages = profiler.key_averages(group_by_input_shape=self._cfg.shapes)
        table = averages.table(sort_by=by, row_limit=self._cfg.operators, max_name_column_width=80)
        (self._folder / f"operators-rank-{rank}.txt").write_text(table + "\n")


class Bystander(Profile):
    """A worker that is not profiled but waits for workers that are: its steps take longer, too."""

    def start(self) -> None:
        return

    def finish(self) -> None:
        return


class MemoryProfile(Profile):
    """Every allocation on this worker's GPU: ``memory-rank-N.pickle``."""

    def __init__(self, cfg: MemoryProfileConfig, first_step: int, folder: Path, workers: Workers) -> None:
        super().__init__(cfg, first_step)
        self._file = folder / f"memory-rank-{workers.rank}.pickle"

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)

    def finish(self) -> None:
        self._file.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self._file))
        torch.cuda.memory._record_memory_history(enabled=None)


class NsightProfile(Profile):
    """NVTX ranges, and the capture range that nsys waits for. nsys itself writes the results."""

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()

    def finish(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(f"ortlaunch/{name}")
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def make_profile(cfg: ProfileConfig | None, first_step: int, run_dir: Path, workers: Workers) -> Profile | None:
    """The configured profile of this worker; None for none.

    Args:
        cfg: which profiler, and which steps.
        first_step: the number of this attempt's first step.
        run_dir: the run folder.
        workers: this worker's place.
    """
    folder = Run(run_dir).profile
    if isinstance(cfg, TorchProfileConfig):
        if workers.rank in cfg.ranks:
            return TorchProfile(cfg, first_step, folder, workers)
        return Bystander(cfg, first_step)
    if isinstance(cfg, MemoryProfileConfig):
        return MemoryProfile(cfg, first_step, folder, workers)
    if isinstance(cfg, NsightProfileConfig):
        return NsightProfile(cfg, first_step)
    return None
