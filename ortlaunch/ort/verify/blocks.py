"""The check at the start of a run under ZeRO 3, where ONNX Runtime runs the model block by block.

The parameters of a block exist only while it runs. So the model is run on the batches, and the first block of each
class records the arguments of its calls. At the end of the last forward it is checked as a model of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ortlaunch.base.errors import RequestError
from ortlaunch.models.task import Batch, Task
from ortlaunch.ort.blocks import OrtBlock, attached
from ortlaunch.ort.verify.pair import Context
from ortlaunch.ort.verify.start import QuickCheck
from ortlaunch.ort.verify.state import ModelState, copied, same_random_numbers
from ortlaunch.ort.verify.trace import TraceWarning, trace_warnings
from ortlaunch.ort.verify.trap import Finding


def block_findings(model: torch.nn.Module, task: Task, precision: Context, batches: list[Batch]) -> list[Finding]:
    """Returns the problems of the blocks of a model under ZeRO 3; see `QuickCheck.findings`.

    Args:
        model: the model that `session.wrap_blocks` returned, under DeepSpeed.
        task: how the model is called.
        precision: the context in which the run calls the model.
        batches: at least two, on the model's device. All workers have the same number of them.

    Raises:
        RequestError: a block is in evaluation mode, and would pass no gradients on to weights that are trained.
    """
    for block in attached(model):
        if not block.block.training and _has_trained_weights(model, up_to=block.block):
            raise RequestError(
                f"the block {block.path} is kept in evaluation mode, and ONNX Runtime's graph for that has no "
                "gradients: keep its parts in eval() instead of the block itself, or use trainer.zero_stage=2 or "
                "backend=eager"
            )
    first_of_class = {type(block.block): block for block in reversed(attached(model))}
    watches = [_Watch(block, precision, passes=len(batches)) for block in first_of_class.values()]
    with same_random_numbers():
        state = ModelState(model)
        try:
            for batch in batches:
                # Without gradients, the blocks would export and run the graph without dropout.
                with precision():
                    task.outputs(model, batch)
        finally:
            for watch in watches:
                watch.end()
            state.restore()
    return [finding for watch in watches for finding in watch.findings]


def _has_trained_weights(model: torch.nn.Module, *, up_to: torch.nn.Module) -> bool:
    """Whether a weight of a block, or of what a model has before it, is trained."""
    parameters = list(model.parameters())
    own = {id(parameter) for parameter in up_to.parameters()}
    last = max((index for index, parameter in enumerate(parameters) if id(parameter) in own), default=-1)
    return any(parameter.requires_grad for parameter in parameters[: last + 1])


class _Call:
    """Replaces the task by a block's call: the batch contains its tensors in order."""

    def outputs(self, module: torch.nn.Module, batch: Batch) -> Any:
        return module(*batch.values())

    def loss(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """A sum of all outputs with weights that differ, so that every element's gradient counts."""
        tensors = [x for x in pytree.tree_leaves(self.outputs(module, batch)) if isinstance(x, torch.Tensor)]
        return sum((_weighted(x) for x in tensors if x.requires_grad), torch.zeros(()))


class _Watch:
    """Replaces a block's forward for some passes, and checks the block in the last one."""

    def __init__(self, block: OrtBlock, precision: Context, passes: int) -> None:
        self.findings: list[Finding] = []
        self._block = block
        self._precision = precision
        self._passes = passes
        self._calls: list[Batch] = []
        self._warnings: list[TraceWarning] = []
        block.block.forward = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._calls.append(copied({f"input {n}": tensor for n, tensor in enumerate(tensors)}))
        with trace_warnings() as warnings:
            outputs = self._block(*args, **kwargs)
        self._warnings += warnings
        # A block that is called in several ways has a graph for each. Only the first one is checked.
        if len(self._calls) == self._passes and len(self._block.ort_modules) == 1:
            check = QuickCheck(self._block.ort_modules[0], _Call(), self._precision)  # type: ignore[arg-type]
            self.findings = check.findings(self._calls, self._warnings)
        return outputs

    def end(self) -> None:
        """Restores the block's forward."""
        self._block.block.forward = self._block  # type: ignore[method-assign]


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float64).cos()
    return (tensor * weights.reshape(tensor.shape).to(tensor.dtype)).sum()
