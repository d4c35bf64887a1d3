"""Compares the gradients of one batch's loss: ONNX Runtime's with PyTorch's, and both with PyTorch's in fp64.

A model may be so sensitive that PyTorch's own gradients in fp32 are far from the true ones (BatchNorm over four rows).
Then ONNX Runtime's differ from PyTorch's as much, and are right all the same. So where they differ, fp64 decides: an
error is one that is larger than rounding explains, and several times PyTorch's own.

A model that draws random numbers gets the same ones on both sides. If the losses differ nevertheless, because not all
numbers are torch's, then nothing is said. Numbers of fp64 are others, so such a model is not judged by fp64.

At most two sets of gradients are in memory at once, and what compares them takes little beside them. Before the first
step there is no state of an optimizer, so this is less than an adaptive optimizer takes later. Where gradients differ,
only these are kept while the model runs in fp64.
"""

from __future__ import annotations

import copy

import torch

from ortlaunch.models.task import Batch, Task
from ortlaunch.ort import session
from ortlaunch.ort.verify.compare import compare, errors_from_exact, floor_of, is_as_good
from ortlaunch.ort.verify.comparison import TensorDifference
from ortlaunch.ort.verify.dropout_off import dropout_off
from ortlaunch.ort.verify.gap import widest
from ortlaunch.ort.verify.nested import NamedTensors
from ortlaunch.ort.verify.pair import Context
from ortlaunch.ort.verify.reference import Reference
from ortlaunch.ort.verify.state import ModelState, copied, in_fp64, same_random_numbers, seed_all

_SEEDS = (1, 2)
_UNJUDGED = 0.05
"""An error from which a gradient counts as wrong where fp64 cannot judge it."""


class Gradients:
    """Computes gradients with dropout off, without the hooks of DDP and DeepSpeed, and without changing ``.grad``."""

    def __init__(self, wrapped: torch.nn.Module, task: Task, precision: Context, state: ModelState) -> None:
        """
        Args:
            wrapped: an ORTModule that has exported.
            task: how the model is called.
            precision: the context in which the run calls the model (autocast).
            state: the state of the plain model from which every pass starts.
        """
        self._wrapped = wrapped
        self._plain = session.plain_model(wrapped)
        self._task = task
        self._precision = precision
        self._state = state

    def error(self, batch: Batch, tolerance_factor: float) -> str | None:
        """Says what is wrong with ONNX Runtime's gradients, as a sentence without a full stop; None where nothing is.

        Args:
            batch: on the model's device.
            tolerance_factor: multiple of the tolerances of `compare` within which gradients count as equal.
        """
        eager, expected = self._of(self._plain, batch)
        with dropout_off(self._wrapped):
            ort, actual = self._of(self._wrapped, batch)
        far = [
            one
            for one in compare(ort, eager).differing
            if one.error is None or one.error > tolerance_factor * one.tolerance
        ]
        if not far:
            return None
        if not self._is_random(batch, expected):
            floor = floor_of(eager)
            # The others make room for the model in fp64.
            ort, eager = ({one.name: side[one.name] for one in far if one.name in side} for side in (ort, eager))
            return self._judged(far, ort, eager, floor, batch, tolerance_factor)
        if _differ(actual, expected):
            return None
        wrong = [one for one in far if one.error is None or one.error > _UNJUDGED]
        return _said(wrong[0].name, wrong[0].error, "PyTorch's") if wrong else None

    def _is_random(self, batch: Batch, loss: torch.Tensor) -> bool:
        """Whether PyTorch's loss with other random numbers is another one."""
        self._state.restore()
        try:
            return _differ(self._loss(self._plain, copied(batch), seed=_SEEDS[1]).detach(), loss)
        finally:
            self._state.restore()

    def compute(self, batch: Batch) -> None:
        """Computes ONNX Runtime's gradients alone, for a model whose gradients are random; raises what that raises."""
        self._of(self._wrapped, batch)

    def _judged(
        self,
        far: list[TensorDifference],
        ort: NamedTensors,
        eager: NamedTensors,
        floor: float,
        batch: Batch,
        tolerance_factor: float,
    ) -> str | None:
        """Says which of the gradients that differ from PyTorch's is wrong by fp64; None where none is."""
        truth = self._true(batch, list(eager))
        if truth is None:
            return _said(far[0].name, far[0].error, "PyTorch's")
        errors, owns = errors_from_exact(ort, truth, floor), errors_from_exact(eager, truth, floor)
        for one in far:
            error, own = errors.get(one.name), owns[one.name]
            if not is_as_good(error, own, tolerance_factor * one.tolerance):
                own_text = "not known" if own is None else f"{own:.2g}"
                return _said(one.name, error, f"PyTorch's in fp64 (PyTorch's own error: {own_text})")
        return None

    def _of(self, model: torch.nn.Module, batch: Batch) -> tuple[NamedTensors, torch.Tensor]:
        """Returns the gradients and the loss."""
        inputs = copied(batch)
        self._state.restore()
        try:
            loss = self._loss(model, inputs, seed=_SEEDS[0])
            return _differentiated(loss, self._plain, inputs), loss.detach()
        finally:
            self._state.restore()

    def _loss(self, model: torch.nn.Module, batch: Batch, seed: int) -> torch.Tensor:
        with same_random_numbers(), torch.enable_grad(), Reference(), self._precision():
            seed_all(seed)
            return self._task.loss(model, batch)

    def _true(self, batch: Batch, names: list[str]) -> NamedTensors | None:
        """PyTorch's gradients of these names in fp64; None where the model does not run so."""
        try:
            self._state.restore()
            model = copy.deepcopy(self._plain).double()
            wide = in_fp64(batch)
            with torch.enable_grad(), Reference():
                loss = self._task.loss(model, wide)
            return _differentiated(loss, model, wide, names)
        except Exception:
            return None


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return widest({"loss": one}, {"loss": other}).differs


def _said(name: str, error: float | None, reference: str) -> str:
    amount = "cannot even be compared with" if error is None else f"differs by {error:.2g} of its largest value from"
    return f"under ONNX Runtime the gradient of {name} {amount} {reference}"


def _differentiated(
    loss: torch.Tensor, model: torch.nn.Module, batch: Batch, names: list[str] | None = None
) -> NamedTensors:
    """Returns the gradients of all parameters and inputs that need one, or of some; unused ones are zero."""
    leaves: NamedTensors = {name: one for name, one in model.named_parameters() if one.requires_grad}
    leaves |= {f"input {name}": tensor for name, tensor in batch.items() if tensor.requires_grad}
    if names is not None:
        leaves = {name: leaves[name] for name in names}
    if not leaves or not loss.requires_grad:
        return {}
    # Not `backward`, which would call the hooks of DDP and DeepSpeed.
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient.detach()
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }
