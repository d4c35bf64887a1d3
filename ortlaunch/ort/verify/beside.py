"""Finds what a block leaves for the rest of the model beside its outputs.

Under ZeRO 3 the blocks are graphs, and the rest of the model is PyTorch. A graph runs no Python: an auxiliary loss that
a block keeps in an attribute, what it appends to a list, what a hook within it notes would stay what the trace left.

The model is run on one batch, and the outputs of its blocks are recorded. In two more passes the blocks return these
again; in the second of them, each also runs in PyTorch, for what it leaves. Nothing but that can make a difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ortlaunch.config.schema import Allow
from ortlaunch.models.task import Batch
from ortlaunch.ort.blocks import OrtBlock
from ortlaunch.ort.verify.gap import widest
from ortlaunch.ort.verify.nested import NamedTensors, named_tensors
from ortlaunch.ort.verify.pair import Context, as_in_training
from ortlaunch.ort.verify.state import ModelState, same_random_numbers, saved_random_numbers
from ortlaunch.ort.verify.trap import Finding

_ROUNDING = 1e-6
"""Relative difference up to which values are the same."""
_ADVICE = "Return it from the block, use trainer.zero_stage=2"

_Forward = Callable[..., Any]


def beside(
    blocks: list[OrtBlock],
    run: Callable[[Batch], Any],
    before: Batch,
    batch: Batch,
    precision: Context,
    state: ModelState,
) -> Finding | None:
    """Returns a finding where the model reads what a block leaves beside its outputs.

    Args:
        blocks: of the model; each has run.
        run: runs the model on a batch and returns its outputs.
        before: a batch other than `batch`.
        batch: what the passes are made with.
        precision: the context in which the run calls the model.
        state: of the model; every pass starts from it.
    """
    calls = _Calls()

    def outputs(forward: _Forward, batch: Batch = batch) -> NamedTensors:
        calls.begin()
        state.restore()
        try:
            with same_random_numbers(), precision(), as_in_training(), _replaced(blocks, forward):
                return named_tensors(run(batch))
        finally:
            state.restore()

    # The comparisons of blocks may have left what `batch` leaves.
    outputs(OrtBlock.in_pytorch, before)
    recorded = outputs(calls.record)
    again = outputs(partial(calls.give, in_pytorch=False))
    # Without it, the model itself goes by what changes from pass to pass, such as a list that grows.
    is_same = calls.strayed is None and not _differ(again, recorded)
    in_pytorch = outputs(partial(calls.give, in_pytorch=True))
    if not is_same or (calls.strayed is None and not _differ(in_pytorch, recorded)):
        return None
    where = calls.strayed or "the model's outputs"
    return Finding(
        Allow["python_state"],
        f"{where} depend on something that a block leaves beside its outputs (an attribute such as an auxiliary loss, "
        "an entry of a list or dict, what a hook within it notes, an input that it changes in place), and under ONNX "
        "Runtime a block leaves nothing but its outputs",
        _ADVICE,
    )


@dataclass(frozen=True)
class _Call:
    inputs: NamedTensors
    returned: Any
    advance: Callable[[], None]
    """Sets the random numbers to where the call left them."""


class _Calls:
    """The calls of the blocks in one pass, in order."""

    def __init__(self) -> None:
        self.strayed: str | None = None
        """The first inputs that are others than in the pass that was recorded; None where there are none."""
        self._all: list[_Call] = []
        self._next = 0

    def begin(self) -> None:
        """Called before each pass."""
        self._next, self.strayed = 0, None

    def record(self, block: OrtBlock, *args: Any, **kwargs: Any) -> Any:
        """Stands for a block's forward, and notes its call."""
        inputs = _summary(args, kwargs)
        returned = block(*args, **kwargs)
        self._all.append(_Call(inputs, pytree.tree_map(_apart, returned), saved_random_numbers()))
        return returned

    def give(self, block: OrtBlock, *args: Any, in_pytorch: bool, **kwargs: Any) -> Any:
        """Stands for a block's forward, and returns what the call returned that was recorded."""
        call = self._all[self._next] if self._next < len(self._all) else None
        self._next += 1
        if self.strayed is None and (call is None or _differ(_summary(args, kwargs), call.inputs)):
            self.strayed = f"the inputs of the block {block.path}"
        if in_pytorch:
            block.in_pytorch(*args, **kwargs)
        if call is None:
            return block(*args, **kwargs)
        call.advance()
        return pytree.tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, call.returned)


def _apart(value: Any) -> Any:
    """A copy of a tensor that needs a gradient where the tensor does."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _summary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NamedTensors:
    """A few figures of each tensor, in place of a copy."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return {str(number): _figures(tensor.detach()) for number, tensor in enumerate(tensors)}


def _figures(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros(3, dtype=torch.float64)
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # A mask may be infinite.
    wide = torch.nan_to_num(parts.double(), nan=0.5, posinf=1.0, neginf=-1.0)
    return torch.stack([wide.mean(), wide.abs().mean(), wide.square().mean()])


def _differ(one: NamedTensors, other: NamedTensors) -> bool:
    return one.keys() != other.keys() or widest(one, other).exceeds(_ROUNDING)


@contextlib.contextmanager
def _replaced(blocks: list[OrtBlock], forward: _Forward) -> Iterator[None]:
    """Puts `forward`, which is given the block, in the place of each block's."""
    try:
        for block in blocks:
            block.block.forward = partial(forward, block)  # type: ignore[method-assign]
        yield
    finally:
        for block in blocks:
            block.block.forward = block  # type: ignore[method-assign]
