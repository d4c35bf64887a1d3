"""What an estimate says: bands and verdict of the run as it is asked for, and what could be changed about it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.candidates import possible
from ortlaunch.config.neighbours import NO_CHANGE
from ortlaunch.config.schema import AutoConfig, Config
from ortlaunch.estimate.band import Band, bands_of, compilers_of, times, total, verdict, worst
from ortlaunch.estimate.micro_batch import Search, Sized
from ortlaunch.estimate.probing import Line, line_of
from ortlaunch.estimate.request import PROBED, Request
from ortlaunch.estimate.trace import Trace
from ortlaunch.estimate.traces import Traces, shortened

_NOTE_WITHOUT_PROBE = (
    "the memory of {} is not known without real steps, {}: the figures are factors on what eager PyTorch holds, "
    "with a wide band"
)
_NOTE_OF_AUTO = (
    "backend=auto may take {}: the figures are those of whichever needs the most, of which only eager is traced"
)
_NEIGHBOURS = ("checkpointing_saves_bytes", "largest_batch_size", "likely_batch_size", "change")
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_NOTE_OF_ALLOCATOR = "LD_PRELOAD has {}: the figures are those with glibc's allocator, and a run may take more"
_CHECKPOINTING = "train.activation_checkpointing=true"
_LIKELY_CHANGE = "{} is likely enough: an estimate with it probes it"


@dataclass(frozen=True)
class Found:
    """What is known of one configuration's memory."""

    trace: Trace
    probed: dict[str, dict[str, Band]]
    """The memory of each phase under a backend that was probed, by the backend's name."""


class Study:
    """Judges one configuration and its neighbours by their traces, and reports."""

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
        self._traces = Traces(config, request)
        self._possible = possible(config)
        self._backends = [one.backend.name for one in self._possible]
        self._lines: dict[str, Line] = {}
        """By the backend that was probed."""
        self._why_no_line = "which --quick leaves out"
        self._found_asked: Found | None = None

    def report(self) -> dict[str, Any]:
        """The estimate of the run, as plain values.

        Raises:
            RequestError: the model or the trainer refuses the request.
        """
        config = self._config
        traced = self._traces.asked()
        self._find_lines()
        asked = self._found_asked = Found(traced, self._by_lines(config))
        machine = self._machine(asked)
        word = verdict(machine, self._request.limit)
        found = {
            "model": config.model.target or config.model.name,
            "backend": config.backend.name,
            "trainer": config.trainer.name,
            "precision": config.train.precision.value,
            "device": "cuda" if self._request.on_gpu else "cpu",
            "batch_size": config.train.batch_size,
            "world_size": self._request.world_size,
            "method": self._method(asked),
            "probed_batch_sizes": next((list(line.sizes) for line in self._lines.values()), None),
            "note": "; ".join(filter(None, (self._traces.note or self._of_backend(), _of_allocator(os.environ)))),
            "workers": [self._worker(rank, asked) for rank in range(self._request.workers)],
            "machine": {
                **machine.to_json(),
                "compilers_bytes": self._compilers.middle,
                "loaders_bytes": self._loaders.middle,
                "limit_bytes": self._request.limit,
                "limit_source": self._request.limit_source,
            },
            "verdict": word,
        }
        return {**found, **self._neighbours(asked, word)}

    def _of_backend(self) -> str:
        """What the figures say about a backend that is not traced."""
        names = self._backends
        if isinstance(self._config.backend, AutoConfig) and len(names) > 1:
            return _NOTE_OF_AUTO.format(f"{', '.join(names[:-1])} or {names[-1]}")
        if not self._unknown or self._lines:
            return ""
        return _NOTE_WITHOUT_PROBE.format(PROBED[names[0]], self._why_no_line)

    def _method(self, asked: Found) -> str:
        if not self._traces.is_fake:
            return "a probe: one real step"
        by_steps = [
            f"{PROBED[backend]} by real steps with micro-batches {' and '.join(map(str, self._lines[backend].sizes))}"
            for backend in asked.probed
        ]
        return ", ".join(["fake tensors", *by_steps])

    @property
    def _unknown(self) -> set[str]:
        """The backends that the run may take and whose memory only real steps show."""
        return PROBED.keys() & self._backends

    def _find_lines(self) -> None:
        """Looks for probes of the backends that cannot be traced, and makes them if the request allows that."""
        workers, nodes = self._request.workers, self._request.nodes
        for config in self._possible:
            if config.backend.name not in PROBED:
                continue
            try:
                line = line_of(config, workers, nodes, may_probe=self._request.may_probe_backend)
            except RequestError as error:
                self._why_no_line = f"and the probe failed ({shortened(error)})"
            else:
                self._lines |= {} if line is None else {config.backend.name: line}

    def _by_lines(self, config: Config) -> dict[str, dict[str, Band]]:
        """The memory of each phase with the micro-batch of a configuration, by the backend that was probed."""
        if config.train.activation_checkpointing != self._config.train.activation_checkpointing:
            return {}
        return {name: line.bands(config.train.batch_size, self._traces.beside) for name, line in self._lines.items()}

    def _bands(self, found: Found, *, is_first: bool) -> dict[str, Band]:
        return self._bands_in(found, found.trace.phases_of(is_first=is_first))

    def _bands_in(self, found: Found, names: Sequence[str]) -> dict[str, Band]:
        of_all = found.trace.to_json()["phases"]
        phases = {name: of_all[name] for name in names}
        return bands_of(self._backends, self._traces.base, phases, found.probed)

    def _worker(self, rank: int, found: Found) -> dict[str, Any]:
        bands = self._bands(found, is_first=rank == 0)
        phase, whole = worst(bands)
        phases = found.trace.phases
        use = phases[phase]
        parts = found.trace.to_json()["parts"]
        return {
            "rank": rank,
            **whole.to_json(),
            "peak_phase": phase,
            "parts": {
                "base_bytes": self._traces.base,
                **{f"{name}_bytes": size for name, size in parts.items()},
                "allocator_bytes": max(0, use.process - use.tensors),
            },
            "phases": {
                name: {**band.to_json(), "tensors_bytes": phases[name].tensors}
                | {"process_bytes": phases[name].process}
                for name, band in bands.items()
            },
        }

    def _machine(self, found: Found) -> Band:
        """The memory of all workers of a machine together."""
        first = worst(self._bands(found, is_first=True))[1]
        others = times(worst(self._bands(found, is_first=False))[1], self._request.workers - 1)
        return total([first, others, self._compilers, self._loaders])

    @property
    def _compilers(self) -> Band:
        """The memory of torch.compile's compilers on a machine."""
        return compilers_of(self._backends, self._request.workers)

    @property
    def _loaders(self) -> Band:
        """The memory of the processes on a machine that read data."""
        return times(self._traces.loaders, self._request.workers)

    def _neighbours(self, asked: Found, word: str) -> dict[str, Any]:
        """What checkpointing would save, the largest micro-batch, and the change that makes the run fit."""
        nothing = dict.fromkeys(_NEIGHBOURS)
        if not self._traces.is_fake or self._request.quick:
            return nothing
        is_needed = word in ("tight", "does not fit")
        largest = self._largest(self._config)
        change = self._nearest_change(largest) if is_needed else None
        return {
            "checkpointing_saves_bytes": self._checkpointing(asked.trace),
            "largest_batch_size": largest,
            "likely_batch_size": self._likely(largest or 0),
            "change": change,
        }

    def _checkpointing(self, asked: Trace) -> int | None:
        """Bytes of a worker's step that activation checkpointing saves; None if the model does not support it."""
        if self._config.train.activation_checkpointing:
            return None
        try:
            other = self._traces.near(_checkpointed(self._config))
        except RequestError:
            return None
        return max(0, asked.phases["step"].process - other.phases["step"].process)

    def _largest(self, config: Config) -> int | None:
        """The largest micro-batch that was traced with a high figure within the limit; 0 if there is none.

        Args:
            config: the configuration with the micro-batch to begin with.
        """
        limit, size = self._request.limit, config.train.batch_size
        if limit is None:
            return None
        parts = self._traces.near(config).parts
        # Gradients may lie in the trainer's buffers.
        stays = (
            self._traces.base + parts.parameters + parts.optimizer_state + max(parts.gradients, parts.trainer_buffers)
        )
        most = self._traces.most_samples
        return Search(lambda one: self._sized(config, one), limit, self._request.sharing, most, stays).largest(size)

    def _likely(self, largest: int) -> int | None:
        """A micro-batch above the largest that fits for sure; it is likely to fit and too far from the probes to know.

        Only what real steps have shown can be told without further ones.
        """
        limit, size = self._request.limit, self._config.train.batch_size
        if limit is None or len(self._lines) < len(self._possible):
            return None
        for smaller in _divisors(size, size):
            is_far = not all(line.is_near(smaller) for line in self._lines.values())
            found = self._near(_with(self._config, batch_size=smaller))
            if smaller > largest and is_far and self._machine(found).middle <= limit:
                return smaller
        return None

    def _sized(self, config: Config, batch_size: int) -> Sized:
        found = self._near(_with(config, batch_size=batch_size))
        first, others = (
            {name: band.high for name, band in self._bands(found, is_first=is_first).items()}
            for is_first in (True, False)
        )
        return Sized(self._machine(found).high, first, others)

    def _near(self, config: Config) -> Found:
        """What is known of a configuration near the one that is asked for.

        Raises:
            RequestError: it is refused as in a run, or its step fails.
        """
        probed = self._by_lines(config)
        # Where only a backend may run that was probed, eager PyTorch need not be traced.
        asked = self._found_asked if len(probed) == len(self._possible) else None
        return Found(self._traces.near(config) if asked is None else asked.trace, probed)

    def _nearest_change(self, largest: int | None) -> str:
        """The smallest change that makes the run fit, in words.

        Args:
            largest: the largest micro-batch that fits without another change.
        """
        limit = self._request.limit
        assert limit is not None
        for words, config in self._changes(largest):
            # Beside its accumulation, a micro-batch may leave other holes in the heap than the search has found.
            with contextlib.suppress(RequestError):
                if self._machine(self._near(config)).high <= limit:
                    return words
        likely = self._likely(0)
        if likely is None:
            return NO_CHANGE
        words, _ = next(_smaller(self._config, likely))
        return _LIKELY_CHANGE.format(words)

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
    for size in _divisors(train.batch_size, largest or 0):
        accumulation = train.grad_accumulation * (train.batch_size // size)
        words = f"train.batch_size={size} train.grad_accumulation={accumulation}"
        yield words, _with(config, batch_size=size, grad_accumulation=accumulation)


def _with(config: Config, **changes: Any) -> Config:
    return replace(config, train=replace(config.train, **changes))


def _checkpointed(config: Config) -> Config:
    return _with(config, activation_checkpointing=True)


def _divisors(size: int, largest: int) -> Iterator[int]:
    """The divisors of `size` below it and up to `largest`, the largest first."""
    return (one for one in range(min(largest, size - 1), 0, -1) if size % one == 0)
