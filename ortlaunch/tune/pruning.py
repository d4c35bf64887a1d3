"""Reasons not to try a cell, from what other trials have shown. Each is printed with the cells that it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.cell import Cell
from ortlaunch.tune.words import TRAINER

Seen = Mapping[Cell, Outcome]
"""The latest outcome of each cell that was tried."""

MICRO, CHECKPOINTING = "micro_batch", "checkpointing"
"""The axes that change the memory of a step in a known direction."""
OFF, ON = "off", "on"
OFFLOAD = "-offload"
"""The end of the trainers' values that hold the optimizer's state in the host's memory."""
NEEDS_MORE = "needs more memory than "
"""The beginning of the reasons that name another cell, which does not fit."""


class Pruner(Protocol):
    """What the schedule asks about a cell before it tries it."""

    def reason(self, cell: Cell, seen: Seen) -> str | None:
        """Why the cell need not be tried; None if it may be."""

    def before(self, cell: Cell) -> Sequence[Cell]:
        """The cells that are tried before this one, if they are tried at all: each may make this one needless."""


class Dominance:
    """Prunes what cannot be faster or cannot fit, given how other cells did."""

    def __init__(
        self,
        too_large: Callable[[Cell, Seen], str | None] = lambda cell, seen: None,
        accumulates: Callable[[Cell], bool] = lambda cell: True,
    ) -> None:
        """
        Args:
            too_large: why a cell cannot fit into the memory by the estimate's lower bound; None if it may fit. It is
                asked last, since an estimate takes seconds.
            accumulates: whether a cell has several micro-batches in a step. It then keeps gradients while it computes
                the next activations, and can need more memory than a larger micro-batch without accumulation.
        """
        self._too_large = too_large
        self._accumulates = accumulates
        self._known: dict[Cell, str | None] = {}

    def reason(self, cell: Cell, seen: Seen) -> str | None:
        return _needless(cell, seen) or self._larger(cell, seen)

    def estimated(self, cell: Cell, seen: Seen) -> str | None:
        """Why a cell that is about to be tried cannot fit by the estimate; None if it may."""
        if cell not in self._known:
            smaller = next((one for one in self._smaller(cell, self._known) if self._known[one]), None)
            self._known[cell] = (
                self._too_large(cell, seen) if smaller is None else f"{NEEDS_MORE}{smaller}: {self._known[smaller]}"
            )
        return self._known[cell]

    def before(self, cell: Cell) -> Sequence[Cell]:
        return [*_twins(cell)]

    def _larger(self, cell: Cell, seen: Seen) -> str | None:
        exhausted = {other: outcome for other, outcome in seen.items() if outcome.status == "out of memory"}
        other = next(self._smaller(cell, exhausted), None)
        return None if other is None else f"{NEEDS_MORE}{other}, which ran out of it"

    def _smaller(self, cell: Cell, among: Mapping[Cell, object]) -> Iterator[Cell]:
        """Cells of `among` that need no more memory than this one: a smaller micro-batch, or checkpointing too."""
        axes = dict(cell.values)
        if MICRO not in axes:
            return
        is_comparable = self._accumulates(cell)
        for other in among:
            its = dict(other.values)
            same = all(its[axis] == value for axis, value in axes.items() if axis not in (MICRO, CHECKPOINTING))
            saves = its.get(CHECKPOINTING, OFF) == axes.get(CHECKPOINTING, OFF) or axes.get(CHECKPOINTING) == OFF
            not_larger = its[MICRO] == axes[MICRO] or (is_comparable and int(its[MICRO]) < int(axes[MICRO]))
            if same and saves and other != cell and not_larger:
                yield other


def _needless(cell: Cell, seen: Seen) -> str | None:
    """Why a cell saves memory for nothing; None if it does not, or if that is not known."""
    return next((why for twin, why in _twins(cell).items() if twin in seen and seen[twin].ok), None)


def _twins(cell: Cell) -> dict[Cell, str]:
    """The cells that do less work for the same and need more memory, each with why the cell is needless if it fits."""
    axes, found = dict(cell.values), {}
    if axes.get(CHECKPOINTING) == ON:
        # Under ONNX Runtime too: its graph has all nodes of the other one, and those that are computed again.
        why = "computes activations again, and the same without checkpointing fits"
        found[cell.having(**{CHECKPOINTING: OFF})] = why
    trainer = str(axes.get(TRAINER))
    if trainer.endswith(OFFLOAD):
        why = "computes the optimizer on the host, and the same on the GPU fits"
        found[cell.having(**{TRAINER: trainer.removesuffix(OFFLOAD)})] = why
    return found
