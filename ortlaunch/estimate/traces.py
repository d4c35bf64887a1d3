"""The traces that an estimate is made of, each made once, and what this process shows of a worker without tensors."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, EagerConfig
from ortlaunch.data.batch import Batch, named
from ortlaunch.estimate.band import CONTEXT, MIB, OPENING, Band, loaders_of
from ortlaunch.estimate.gpu_trace import gpu_trace
from ortlaunch.estimate.ledger import Use
from ortlaunch.estimate.pretend import join_nobody, threads_of
from ortlaunch.estimate.request import Request
from ortlaunch.estimate.trace import Trace, shapes_of, trace
from ortlaunch.trainer.prepare import open_loader

_BESIDE = 10 * MIB
"""What a worker holds beside what the tracing process does, such as threads and workspaces of its kernels. The tracing
process holds its own bookkeeping instead."""
_THREAD = 850 * 2**10
"""What kernels hold for each further thread: a transformer's layer with 64 threads took 53 MiB more than with one."""
_CONNECTIONS = 17 * MIB
"""What a worker holds for its exchange with others."""
_MOST_SAMPLES = 2**20
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class UntraceableError(Exception):
    """A model cannot be traced on tensors without content."""


class Traces:
    """Traces a run and those near it in this process, which stands for a worker."""

    def __init__(self, config: Config, request: Request) -> None:
        """
        Args:
            config: the run's configuration.
            request: its size and its limit.

        Raises:
            RequestError: the data cannot be opened.
        """
        self._config = config
        self._request = request
        self._workers = replace(join_nobody(request.world_size), threads=threads_of(config, request.workers))
        # It stays open, so that this process holds the data that a worker holds.
        self._loader = open_loader(config, self._workers)
        self._loader.start_processes()
        self._batch: Batch = next(self._loader)
        self._opening = max(0, _take_peak() - _resident())
        """Bytes that opening the data took and gave back, as where all of it is tokenized."""
        self.loaders = _loaders(self._loader.processes)
        """The memory of a worker's loader processes."""
        self._held_out = self._evaluated()
        self._known: dict[tuple[bool, int, int], Trace] = {}
        """By whether activations are checkpointed, the micro-batch, and the accumulated micro-batches."""
        self.base = 0
        """Bytes of a worker without tensors, after `asked`."""

    def asked(self) -> Trace:
        """The trace of the run as it is asked for.

        Raises:
            RequestError: the request is refused as in a run.
            UntraceableError: the model needs tensors with content, or its step fails.
        """
        try:
            return self._traced(self._config)
        except RequestError:
            raise
        except Exception as error:
            raise UntraceableError(f"{type(error).__name__}: {_shortened(error)}") from error
        finally:
            self.base = self.base or (CONTEXT.middle if self._request.on_gpu else self._process_base())

    def near(self, config: Config) -> Trace:
        """The trace of a run that is near the one that is asked for.

        Raises:
            RequestError: it is refused as in a run, or its step fails, as that of batch normalization on one sample.
        """
        try:
            return self._traced(config)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"a step of this configuration fails: {_shortened(error)}") from error

    @property
    def most_samples(self) -> int:
        """The largest micro-batch that the data has for each worker."""
        samples = self._loader.samples
        most = _MOST_SAMPLES if samples is None else samples // self._request.world_size
        return max(most, self._config.train.batch_size)

    def _traced(self, config: Config) -> Trace:
        train = config.train
        key = train.activation_checkpointing, train.batch_size, train.grad_accumulation
        if key not in self._known:
            self._known[key] = self._traced_anew(config)
        return self._known[key]

    def _traced_anew(self, config: Config) -> Trace:
        shapes = shapes_of(self._batch, config.train.batch_size)
        # What other backends hold is a factor on this where they are not tried; see `phase_band`.
        config = replace(config, backend=EagerConfig())
        if self._request.on_gpu:
            return gpu_trace(config, self._workers, shapes)
        found = trace(config, self._workers, shapes)
        opening = Use(self._opening, self._opening)
        return replace(found, phases={OPENING: opening, **found.phases})

    def _process_base(self) -> int:
        """Bytes of a worker without tensors. This process has imported, opened and built the same, with one thread."""
        # Of what a trace has freed the allocator keeps up to 80 MiB, by chance: 373 to 405 MiB for gpt2_nano.
        _give_free_memory_back()
        connections = _CONNECTIONS if self._request.world_size > 1 else 0
        threads = (threads_of(self._config, self._request.workers) - 1) * _THREAD
        return _resident() + _BESIDE + connections + threads + self._held_out

    def _evaluated(self) -> int:
        """Bytes of the held-out batches, which a worker keeps."""
        train = self._config.train
        if train.eval_every is None:
            return 0
        held_out = self._loader.held_out(train.eval_samples)
        return sum(tensor.nbytes for one in held_out for tensor in named(one.batch).values())


def _shortened(error: BaseException) -> str:
    """The beginning of an error's text in one line."""
    return " ".join(str(error).split())[:300]


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _take_peak() -> int:
    """The most that was resident since the last call; since this process began where the kernel keeps only that."""
    lines = _STATUS.read_text().splitlines()
    with contextlib.suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK)
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _loaders(processes: Sequence[int]) -> Band:
    """The memory of loader processes that have read their first batches, without what is a part of files."""
    found = [psutil.Process(process).memory_full_info() for process in processes]
    common = max((one.rss - one.shared - one.uss for one in found), default=0)
    return loaders_of([one.uss for one in found], max(0, common))


def _give_free_memory_back() -> None:
    """Lets glibc return what it keeps of freed tensors; other allocators keep it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
