"""A script's calls of its model under ONNX Runtime, compared with PyTorch's as a run compares its own steps.

What the script makes of the outputs is not known. So a call stands for a batch, and its loss is the squared distance of
all its outputs from fixed numbers: a graph whose gradients of weights and inputs are right for it is so for any loss.
The first call is checked as at the start of a run, some further ones are compared before they count, and then those of
``backend.recheck_every``. Calls that need no gradients, and those in evaluation mode, are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.data.batch import Batch, described, mapped, named
from ortlaunch.models.task import Task
from ortlaunch.ort import session
from ortlaunch.ort.tracing import decisions
from ortlaunch.ort.verify.start import FRESH_BATCHES
from ortlaunch.ort.verify.state import copied
from ortlaunch.trainer.backend_run import OrtRun
from ortlaunch.trainer.engine import Engine


class _Called(Task):
    """Calls the model with the arguments of a script's call."""

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Any:
        """The outputs, and beside them a loss that depends on all of them."""
        positional = [value for name, value in batch.items() if name.isdecimal()]
        named_ones = {name: value for name, value in batch.items() if not name.isdecimal()}
        outputs = model(*positional, **named_ones)
        return {"loss": _distance(outputs), "outputs": outputs}


class ScriptCalls:
    """The calls of one wrapped model in training."""

    def __init__(self, engine: Engine, backend: OrtRun) -> None:
        """
        Args:
            engine: the wrapped model.
            backend: what compares it with PyTorch.
        """
        self._engine = engine
        self._backend = backend
        self._task = _Called(())
        self._count = 0
        self._step = 0
        self._is_first = True

    def begin(self, step: int) -> None:
        """A step begins; it is compared at its first call."""
        self._step, self._is_first = step, True

    def trained(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The outputs of a call in training, as ONNX Runtime computes them.

        Raises:
            RequestError: the call cannot be compared, or ONNX Runtime would compute something else.
            WrongGradientsError: it has computed something else.
        """
        given = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        batch = mapped(given, _with_gradient)
        # Without the script's graph, which would live as long.
        apart = mapped(batch, lambda one: one.detach().requires_grad_(one.requires_grad))
        self._compare(apart)
        model = self._engine.inner
        exports = session.exports(model)
        values = list(batch.values())
        outputs = self._engine.module(*values[: len(args)], **{name: batch[name] for name in kwargs})
        if self._backend.is_active:
            if session.exports(model) != exports:
                raise RequestError(
                    "the script calls its model in training in another way than at first, or has changed it (other "
                    "arguments, other weights that are trained, other modes of modules), and backend=ort has compared "
                    "the first way alone: always train it in the same way, or use backend=eager"
                )
            self._backend.micro_batch_ends(apart)
        return outputs

    def evaluated(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The outputs of a call that trains nothing."""
        self._backend.evaluated_in_torch([*args, kwargs])
        return session.plain_model(self._engine.inner)(*args, **kwargs)

    def _compare(self, batch: Batch) -> None:
        if self._count == 0:
            self._backend.check(self._task, [copied(batch)])
        else:
            has_compared = self._backend.micro_batch_begins(self._step, 0 if self._is_first else 1, batch)
            if self._count <= FRESH_BATCHES and not has_compared:
                with decisions.as_at_start():
                    self._backend.compare(self._step, batch)
        self._count += 1
        self._is_first = False


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that needs a gradient if it can have one.

    A model may be called with inputs that need one and with others, as a GAN's judge is. Both then have the same graph.
    """
    if tensor.requires_grad or not tensor.is_floating_point():
        return tensor
    return tensor.detach().requires_grad_()


def _distance(outputs: Any) -> torch.Tensor:
    found = [one for one in named(outputs).values() if one.is_floating_point() and one.numel()]
    if not found:
        raise RequestError(
            f"the model returns {described(outputs)}: without numbers that can have a gradient there is nothing to "
            "compare with PyTorch: use backend=eager"
        )
    generator = torch.Generator().manual_seed(0)
    total = found[0].new_zeros(())
    for one in found:
        aims = torch.randn(one.shape, generator=generator).to(one)
        total = total + torch.where(one.isfinite(), one - aims, 0.0).square().mean()
    return total
