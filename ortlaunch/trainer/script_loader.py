"""The batches of a loader that a script has made, from the place where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Self

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.data.batch import count, digest, named
from ortlaunch.data.position import Position
from ortlaunch.trainer.checkpoint import rng
from ortlaunch.trainer.feed import PositionedBatch

_END = object()
_GENERATORS = ("", "sampler", "batch_sampler")
"""Where a loader may have a generator of its own: itself, and its samplers."""


class ScriptLoader:
    """Goes over a loader again and again. Where it is in an epoch is known by the batches that it has given.

    An epoch's order comes from generators: their state at its beginning is a part of the position.
    """

    is_uneven = False

    def __init__(self, loader: Iterable[Any] | None, start: Position) -> None:
        """
        Args:
            loader: gives this worker's batches; None for a script that makes its own, which are then all None.
            start: where to go on.
        """
        self._loader = loader
        self._length = len(loader) if isinstance(loader, Sized) else None
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._batches = start.epoch, start.batches if loader is None else 0
        self._states: tuple[Any, ...] = ()
        self._ahead: list[PositionedBatch] = []
        if start.batches and loader is not None:
            self._skip(start)

    @property
    def fingerprint(self) -> str:
        """What is known of the loader."""
        return "" if self._length is None else f"{self._length} batches"

    @property
    def samples(self) -> int | None:
        """Not known of a loader."""
        return None

    @property
    def reading(self) -> dict[str, Any]:
        """What the position depends on: nothing without a loader."""
        return {} if self._loader is None else {"run.steps": "a loader"}

    def close(self) -> None:
        """Lets go of the loader's iterator, which ends its processes."""
        self._iterator = None

    def first_digest(self) -> str:
        """A digest of the next batch, which stays the next; empty for one without tensors."""
        if not self._ahead:
            self._ahead.append(next(self))
        batch = self._ahead[0].batch
        return digest(batch) if named(batch) and all(one.device.type == "cpu" for one in named(batch).values()) else ""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PositionedBatch:
        if self._ahead:
            return self._ahead.pop()
        if self._loader is None:
            self._batches += 1
            return PositionedBatch(None, Position(0, batches=self._batches), samples=0, everyone=None)
        batch = self._taken()
        if batch is _END:
            if self._batches == 0:
                raise RequestError(
                    "run.steps: the loader gives no batch: it is empty, or an iterator that is gone through once; give "
                    "a DataLoader or a list"
                )
            self._epoch, self._batches, self._iterator = self._epoch + 1, 0, None
            return next(self)
        place = Position(self._epoch, batches=self._batches, states=self._states)
        return PositionedBatch(batch, place, samples=count(batch) if named(batch) else 0, everyone=None)

    def _taken(self) -> Any:
        if self._iterator is None:
            self._begin_epoch()
        assert self._iterator is not None
        batch = next(self._iterator, _END)
        self._batches += batch is not _END
        return batch

    def _begin_epoch(self) -> None:
        assert self._loader is not None
        for part in _parts(self._loader, (*_GENERATORS, "dataset")):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        own = [one.get_state() for one in self._generators()]
        self._states = ({"rng": rng.capture(), "generators": own},)
        self._iterator = iter(self._loader)

    def _skip(self, start: Position) -> None:
        """Begins the epoch as it was begun, and reads what was taken of it."""
        for state in start.states:
            rng.restore(state["rng"])
            for generator, own in zip(self._generators(), state["generators"], strict=True):
                generator.set_state(own)
        for _ in range(start.batches):
            if self._taken() is _END:
                raise RequestError(
                    f"run.steps: the run goes on after batch {start.batches} of an epoch, and the loader has only "
                    f"{self._batches}: give it the same data and batch size as before"
                )

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(part, "generator", None) for part in _parts(self._loader, _GENERATORS)]
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _parts(loader: Any, names: Iterable[str]) -> list[Any]:
    """A loader, its samplers, and the sampler of its batch sampler, as far as it has them."""
    parts = [loader if not name else getattr(loader, name, None) for name in names]
    parts.append(getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    return list({id(part): part for part in parts if part is not None}.values())
