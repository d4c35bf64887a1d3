"""What an estimate says: bands and verdict of the run as it is asked for, and what could be changed about it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.candidates import possible
from ortlaunch.config.neighbours import NO_CHANGE
from ortlaunch.config.schema import AutoConfig, Config
from ortlaunch.estimate.band import (
    NOTHING,
    OPENING,
    Band,
    any_of,
    by_trials,
    compilers_of,
    gpu_band,
    phase_band,
    times,
    total,
    verdict,
    worst,
)
from ortlaunch.estimate.micro_batch import largest
from ortlaunch.estimate.report import report
from ortlaunch.estimate.request import TRIED, Request
from ortlaunch.estimate.trace import BY_CHANCE, Trace
from ortlaunch.estimate.traces import Traces, UntraceableError

_NOTE_WITHOUT_TRIAL = (
    "the memory of {} is not known without real steps, {}: the figures are factors on what eager PyTorch holds, "
    "with a wide band"
)
_NOTE_OF_AUTO = (
    "backend=auto may take {}: the figures are those of whichever needs the most, of which only eager is traced"
)
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_NOTE_OF_ALLOCATOR = "LD_PRELOAD has {}: the figures are those with glibc's allocator, and a run may take more"
_CHECKPOINTING = "train.activation_checkpointing=true"


class Study:
    """Judges one configuration and its neighbours by their traces, and reports."""

    def __init__(self, config: Config, request: Request) -> None:
        """
        Args:
            config: the run's configuration.
            request: its size, its limit, and what trials have shown.

        Raises:
            RequestError: the data cannot be opened.
        """
        self._config = config
        self._request = request
        self._traces = Traces(config, request)
        self._backends = [one.backend.name for one in possible(config)]

    def report(self) -> dict[str, Any]:
        """The estimate of the run, as plain values; ``untraceable`` has the reason where there is none.

        Raises:
            RequestError: the model or the trainer refuses the request.
        """
        config, request = self._config, self._request
        try:
            asked = self._traces.asked()
        except UntraceableError as error:
            return {"untraceable": str(error)}
        machine = self._machine(config, asked)
        sizes = next((sorted(size for size, _ in points) for points in request.tried.values()), None)
        by_steps = [f"{TRIED[name]} by real steps with micro-batches {_listed(sizes)}" for name in request.tried]
        return report(
            config,
            request,
            machine=machine,
            workers=[self._worker(rank, asked) for rank in range(request.workers)],
            method=", ".join(["fake tensors", *by_steps]),
            tried=sizes,
            note="; ".join(filter(None, (self._of_backend(), _of_allocator(os.environ)))),
            compilers=self._compilers,
            loaders=self._loaders,
            neighbours=None if request.quick else self._neighbours(asked, verdict(machine, request.limit)),
        )

    def _of_backend(self) -> str:
        """What the figures say about a backend that is not traced."""
        names = self._backends
        if isinstance(self._config.backend, AutoConfig) and len(names) > 1:
            return _NOTE_OF_AUTO.format(_listed(names, "or"))
        if names[0] not in TRIED or names[0] in self._request.tried:
            return ""
        return _NOTE_WITHOUT_TRIAL.format(TRIED[names[0]], self._request.why_untried)

    def _bands(self, config: Config, trace: Trace, *, is_first: bool) -> dict[str, Band]:
        """The memory of a worker in each phase, or in the whole run under a backend that was tried; by their names."""
        tried = self._by_trials(config, trace, is_first=is_first)
        names = [name for name in self._backends if name not in tried]
        phases = {}
        for phase in trace.phases_of(is_first=is_first) if names else ():
            # No backend runs yet where data is opened.
            phases[phase] = any_of([self._phase("eager" if phase == OPENING else one, trace, phase) for one in names])
        return phases | {f"whole run under {TRIED[name]}": band for name, band in tried.items()}

    def _phase(self, backend: str, trace: Trace, phase: str) -> Band:
        use = trace.phases[phase]
        if self._request.on_gpu:
            return gpu_band(backend, use.tensors, use.reserved)
        gathers, is_sure = self._config.trainer.name == "fsdp", phase not in BY_CHANCE
        return phase_band(backend, self._traces.base, use.tensors, is_sure=is_sure, gathers=gathers)

    def _by_trials(self, config: Config, trace: Trace, *, is_first: bool) -> dict[str, Band]:
        """The memory of a worker under each backend that was tried; of none with other activations than there."""
        if config.train.activation_checkpointing != self._config.train.activation_checkpointing:
            return {}
        size, request = config.train.batch_size, self._request

        def tensors(*, is_first: bool, without: Sequence[str] = ()) -> int:
            return max(trace.phases[name].tensors for name in trace.phases_of(is_first=is_first) if name not in without)

        # By chance the trial has the copy of a checkpoint beside a step. It has measured the largest worker.
        of_first = tensors(is_first=True)
        chance = of_first - tensors(is_first=True, without=BY_CHANCE)
        less = 0 if is_first else of_first - tensors(is_first=False)
        found = {}
        for name, points in request.tried.items():
            band = by_trials(points, size, chance=chance, on_gpu=request.on_gpu)
            found[name] = replace(band, low=max(0, band.low - less), middle=max(0, band.middle - less))
        return found

    def _whole(self, config: Config, trace: Trace, *, is_first: bool) -> tuple[str, Band]:
        """The phase in which a worker holds the most, and its memory over all phases.

        Of several backends the low figure is that of the one which needs the least.
        """
        bands = self._bands(config, trace, is_first=is_first)
        phases = {name: band for name, band in bands.items() if name in trace.phases}
        others = [band for name, band in bands.items() if name not in trace.phases]
        return worst(bands)[0], any_of([*([worst(phases)[1]] if phases else []), *others])

    def _worker(self, rank: int, trace: Trace) -> dict[str, Any]:
        bands = self._bands(self._config, trace, is_first=rank == 0)
        phase, whole = self._whole(self._config, trace, is_first=rank == 0)
        eager = max(trace.phases_of(is_first=rank == 0), key=lambda name: trace.phases[name].tensors)
        use = trace.phases[eager]
        return {
            "rank": rank,
            **whole.to_json(),
            "peak_phase": phase,
            "parts": {
                "base_bytes": self._traces.base,
                **{f"{name}_bytes": size for name, size in asdict(trace.parts).items()},
                "allocator_bytes": max(0, self._phase("eager", trace, eager).middle - self._traces.base - use.tensors),
            },
            "phases": {name: band.to_json() | self._traced(trace, name) for name, band in bands.items()},
        }

    @staticmethod
    def _traced(trace: Trace, phase: str) -> dict[str, int]:
        use = trace.phases.get(phase)
        return {} if use is None else {"tensors_bytes": use.tensors, "process_bytes": use.reserved}

    def _machine(self, config: Config, trace: Trace) -> Band:
        """The memory of all workers of a machine together; of the GPU that needs the most."""
        first = self._whole(config, trace, is_first=True)[1]
        if self._request.on_gpu:
            return first
        others = times(self._whole(config, trace, is_first=False)[1], self._request.workers - 1)
        return total([first, others, self._compilers, self._loaders])

    @property
    def _compilers(self) -> Band:
        """The memory of torch.compile's compilers on a machine."""
        return NOTHING if self._request.on_gpu else compilers_of(self._backends, self._request.workers)

    @property
    def _loaders(self) -> Band:
        """The memory of the processes on a machine that read data."""
        return NOTHING if self._request.on_gpu else times(self._traces.loaders, self._request.workers)

    def _neighbours(self, asked: Trace, word: str) -> dict[str, Any]:
        """What checkpointing would save, the largest micro-batch, and the change that makes the run fit."""
        largest = self._largest(self._config)
        is_needed = word in ("tight", "does not fit")
        return {
            "checkpointing_saves_bytes": self._checkpointing(asked),
            "largest_batch_size": largest,
            "largest_batch_is_all": largest == self._traces.most_samples,
            "change": self._nearest_change(largest) if is_needed else None,
        }

    def _checkpointing(self, asked: Trace) -> int | None:
        """Bytes of a worker's step that activation checkpointing saves; None if the model does not support it."""
        if self._config.train.activation_checkpointing:
            return None
        try:
            other = self._traces.near(_checkpointed(self._config))
        except RequestError:
            return None
        return max(0, asked.phases["step"].reserved - other.phases["step"].reserved)

    def _largest(self, config: Config) -> int | None:
        """The largest micro-batch that was found with a high figure within the limit; 0 if there is none.

        Args:
            config: the configuration with the micro-batch to begin with.
        """
        limit = self._request.limit
        if limit is None:
            return None
        parts = self._traces.near(config).parts
        # Gradients may lie in the trainer's buffers.
        stays = parts.parameters + parts.optimizer_state + max(parts.gradients, parts.trainer_buffers)
        return largest(
            lambda size: self._high(_with(config, batch_size=size)),
            limit,
            config.train.batch_size,
            self._traces.most_samples,
            self._request.sharing * (self._traces.base + stays),
        )

    def _high(self, config: Config) -> int:
        """The high figure of a machine with a configuration near the one that is asked for.

        Raises:
            RequestError: it is refused as in a run, or its step fails.
        """
        asked = self._traces.asked()
        if self._by_trials(config, asked, is_first=True).keys() >= set(self._backends):
            # Eager PyTorch, which does not run, need not be traced again.
            return self._machine(config, asked).high
        return self._machine(config, self._traces.near(config)).high

    def _nearest_change(self, largest: int | None) -> str:
        """The smallest change that makes the run fit, in words.

        Args:
            largest: the largest micro-batch that fits without another change.
        """
        limit = self._request.limit
        assert limit is not None
        for words, config in self._changes(largest):
            with contextlib.suppress(RequestError):
                if self._high(config) <= limit:
                    return words
        return NO_CHANGE

    def _changes(self, largest: int | None) -> Iterator[tuple[str, Config]]:
        """Changes that keep the samples of a step, the smallest first, and what they make of the configuration."""
        checkpointed = None if self._config.train.activation_checkpointing else _checkpointed(self._config)
        if checkpointed is not None:
            yield _CHECKPOINTING, checkpointed
        yield from _smaller(self._config, largest)
        if checkpointed is not None:
            most = None
            with contextlib.suppress(RequestError):  # Not every model supports it.
                most = self._largest(checkpointed)
            yield from ((f"{_CHECKPOINTING} {words}", config) for words, config in _smaller(checkpointed, most))


def _of_allocator(variables: Mapping[str, str]) -> str:
    """What the figures say about an allocator that replaces glibc's."""
    other = next((name for name in _ALLOCATORS if name in variables.get("LD_PRELOAD", "")), None)
    return _NOTE_OF_ALLOCATOR.format(other) if other is not None else ""


def _smaller(config: Config, largest: int | None) -> Iterator[tuple[str, Config]]:
    """The same samples of a step in micro-batches up to `largest`, the largest first: words and configurations."""
    train = config.train
    for size in range(min(largest or 0, train.batch_size - 1), 0, -1):
        if train.batch_size % size == 0:
            accumulation = train.grad_accumulation * (train.batch_size // size)
            words = f"train.batch_size={size} train.grad_accumulation={accumulation}"
            yield words, _with(config, batch_size=size, grad_accumulation=accumulation)


def _with(config: Config, **changes: Any) -> Config:
    return replace(config, train=replace(config.train, **changes))


def _checkpointed(config: Config) -> Config:
    return _with(config, activation_checkpointing=True)


def _listed(values: Any, last: str = "and") -> str:
    *first, end = map(str, values or [""])
    return f"{', '.join(first)} {last} {end}" if first else end
