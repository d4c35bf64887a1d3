"""Compares a block under ZeRO 3 with PyTorch, while its parameters are gathered."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ortlaunch.models.task import Batch
from ortlaunch.ort import session
from ortlaunch.ort.verify.compare import errors_from_exact, is_as_good, tolerance_of
from ortlaunch.ort.verify.dropout_off import dropout_off
from ortlaunch.ort.verify.examination import WIDER
from ortlaunch.ort.verify.gap import widest
from ortlaunch.ort.verify.nested import NamedTensors, named_tensors
from ortlaunch.ort.verify.pair import Context, as_in_training
from ortlaunch.ort.verify.reference import Reference
from ortlaunch.ort.verify.start import gradient_error
from ortlaunch.ort.verify.state import ModelState, copied, in_fp64, same_random_numbers, seed_all

_SEEDS = (1, 2)


class BlockTask:
    """Replaces the task by a block's call: the batch contains its tensors in order."""

    def outputs(self, module: torch.nn.Module, batch: Batch) -> Any:
        """Calls the block."""
        return module(*batch.values())

    def loss(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """A sum of all outputs with weights that differ, so that every element's gradient counts."""
        tensors = [x for x in pytree.tree_leaves(self.outputs(module, batch)) if isinstance(x, torch.Tensor)]
        return sum((_weighted(x) for x in tensors if x.requires_grad), torch.zeros(()))


def gradients_error(ort_module: torch.nn.Module, inputs: Batch, precision: Context) -> str | None:
    """Says what is wrong with the gradients of a block's weights and inputs; None where nothing is.

    Args:
        ort_module: the block's ORTModule, which trains.
        inputs: the block's tensors.
        precision: the context in which the run calls the model.
    """
    return gradient_error(ort_module, BlockTask(), precision, inputs)  # type: ignore[arg-type]


def outputs_error(ort_module: torch.nn.Module, inputs: Batch, precision: Context) -> str | None:
    """Says which of a block's outputs is not PyTorch's, in its present mode; None where each is, or chance decides.

    The arguments are those of `gradients_error`. Buffers are left as they are. Values of Python go on, as in PyTorch.
    """
    plain = session.plain_model(ort_module)
    state = ModelState(plain)
    trains = torch.is_grad_enabled()

    def outputs(model: torch.nn.Module, seed: int) -> NamedTensors:
        try:
            with same_random_numbers(), precision(), Reference():
                seed_all(seed)
                return named_tensors(model(*copied(inputs).values()))
        finally:
            state.restore_buffers()

    def in_pytorch(seed: int) -> NamedTensors:
        if not trains:
            return outputs(plain, seed)
        with as_in_training():
            return outputs(plain, seed)

    expected = in_pytorch(_SEEDS[0])
    if trains:
        with dropout_off(ort_module):
            actual = outputs(ort_module, _SEEDS[0])
    else:
        actual = outputs(ort_module, _SEEDS[0])
    gap = widest(actual, expected)
    if not gap.exceeds(WIDER * gap.tolerance):
        return None
    after = ModelState(plain)
    try:
        state.restore()
        if widest(in_pytorch(_SEEDS[1]), expected).differs:
            return None
        state.restore()
        truth = _exact(plain, inputs)
    finally:
        after.restore()
    if truth is not None:
        errors, owns = errors_from_exact(actual, truth), errors_from_exact(expected, truth)
        if all(is_as_good(errors.get(name), own, tolerance_of(truth[name].float())) for name, own in owns.items()):
            return None
    return f"the outputs under ONNX Runtime are not PyTorch's ({gap})"


def _exact(plain: torch.nn.Module, inputs: Batch) -> NamedTensors | None:
    """Returns PyTorch's outputs in fp64; None where the block does not run so."""
    try:
        with same_random_numbers(), torch.no_grad(), Reference():
            seed_all(_SEEDS[0])
            return named_tensors(copy.deepcopy(plain).double()(*in_fp64(inputs).values()))
    except Exception:
        return None


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float64).cos()
    return (tensor * weights.reshape(tensor.shape).to(tensor.dtype)).sum()
