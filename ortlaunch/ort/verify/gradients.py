"""Compares the gradients of one batch's loss: ONNX Runtime's with PyTorch's, and both with PyTorch's in fp64.

The buffers that the same passes leave are compared and judged alike.

A model may be so sensitive that PyTorch's own gradients in fp32 are far from the true ones (BatchNorm over four rows).
Then ONNX Runtime's differ from PyTorch's as much, and are right all the same. So where they differ, fp64 decides: an
error is one that is larger than rounding explains, and several times PyTorch's own.

Where an activation is so near to the kink of a ReLU that rounding decides on which side it is, PyTorch may be right by
luck alone. So before an error counts, PyTorch's own is measured some times more, with weights that are off by rounding.

A model that draws random numbers gets the same ones on both sides. If the losses differ nevertheless, because not all
numbers are torch's, then nothing is said. Numbers of fp64 are others, so such a model is not judged by fp64.

While a run trains, ONNX Runtime's gradients are in memory once, as in a step. PyTorch's are compared as they come, each
with ONNX Runtime's, and both are freed. Where gradients differ, as many at a time are computed again, and kept, as
`_JUDGED` says, while the model runs in fp64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from ortlaunch.data.batch import Batch, named
from ortlaunch.models.task import Task
from ortlaunch.ort import session
from ortlaunch.ort.tracing import decisions
from ortlaunch.ort.tracing.checkpoints import without_reentrance
from ortlaunch.ort.verify.compare import Comparing, is_as_good, relative_error, worst_first
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
_JUDGED = 1 / 8
"""Share of the model's gradients that fp64 judges at a time, if no gradient alone is larger."""
_AT_ONCE = 2**24
"""Elements of gradients that are judged at a time in any case; each part costs three forwards and backwards."""

_SAME_RATE = 1e-3
"""Difference of two rates of dropout that is none."""
_NUDGE = 2.0**-20
"""By how much of itself a weight is moved at most: some roundings of fp32, as many as a convolution adds up."""
_NUDGES = 8
"""How many times. A kink that is nearer than the nudges move is passed in half of them."""

_BUFFER = "buffer "
"""What the names of buffers begin with among those of gradients."""

_Take = Callable[[str, torch.Tensor], None]
"""Is given each gradient and each buffer by its name."""


class Errors(NamedTuple):
    """What is wrong, each as a sentence without a full stop; None where nothing is."""

    gradients: str | None = None
    buffers: str | None = None


class Gradients:
    """Computes gradients with dropout off, without the hooks of DDP and DeepSpeed, and without changing ``.grad``.

    Attributes:
        stale: names of the buffers that move in PyTorch and not under ONNX Runtime.
    """

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
        self.stale: set[str] = set()
        self._moved: set[str] = set()
        """The buffers that the last pass has moved."""
        self._rates: list[float] = []
        """The rates of dropout in the last forward."""

    def errors(self, batch: Batch, tolerance_factor: float, *, with_buffers: bool = True) -> Errors:
        """Says what is wrong with ONNX Runtime's gradients, and with its buffers.

        Where nothing is, the values that Python reads of tensors in this pass are verified.

        Args:
            batch: on the model's device.
            tolerance_factor: multiple of the tolerances of `compare` within which gradients count as equal.
            with_buffers: whether buffers matter.
        """
        with decisions.not_noted() as met:
            errors = self._errors(batch, tolerance_factor)
            errors = errors if with_buffers else errors._replace(buffers=None)
        if errors == Errors():
            decisions.verify(met)
        return errors

    def _errors(self, batch: Batch, tolerance_factor: float) -> Errors:
        ort: NamedTensors = {}
        actual = self._under_ort(batch, ort.__setitem__)
        moved = self._moved
        comparing = Comparing()

        def compare(name: str, gradient: torch.Tensor) -> None:
            comparing.add(name, ort.pop(name, None), gradient, self._scale(name))

        expected = self._computed(self._plain, batch, compare)
        self.stale = self._moved - moved
        if (rates := self._other_rates()) is not None:
            return Errors(rates)
        far = [
            one
            for one in worst_first(comparing.results())
            if one.error is None or one.error > tolerance_factor * one.tolerance
        ]
        if not far:
            return Errors()
        is_random = self._is_random(batch, expected)
        if is_random and _differ(actual, expected):
            return Errors()

        def worst(*, of_buffers: bool) -> str | None:
            some = [one for one in far if one.name.startswith(_BUFFER) is of_buffers]
            if some and not is_random:
                return self._judged(some, comparing.floor, batch, tolerance_factor)
            wrong = [one for one in some if one.error is None or one.error > _UNJUDGED]
            return _said(wrong[0].name, wrong[0].error, "PyTorch's") if wrong else None

        return Errors(worst(of_buffers=False), worst(of_buffers=True))

    def _scale(self, name: str) -> float | None:
        """Returns what a buffer's error is relative to at least; None for a gradient.

        Of a running mean it is the standard deviation: behind another normalization the mean is zero but for rounding.
        """
        if not name.startswith(_BUFFER):
            return None
        path, _, last = name.removeprefix(_BUFFER).rpartition(".")
        variance = self._plain.get_submodule(path)._buffers.get("running_var")
        return float(variance.max().sqrt()) if last == "running_mean" and variance is not None else 0.0

    def _other_rates(self) -> str | None:
        """Says which rate of dropout in PyTorch's last forward is not that of the trace: its effect is chance."""
        traced = session.traced_rates(self._wrapped)
        # A call that the trace has replaced is not noted there.
        if len(traced) != len(self._rates):
            return None
        for rate, frozen in zip(self._rates, traced, strict=True):
            if abs(rate - frozen) > _SAME_RATE:
                return f"the rate of a dropout is {rate:.3g} in PyTorch and {frozen:.3g} in ONNX Runtime's graph"
        return None

    def _is_random(self, batch: Batch, loss: torch.Tensor) -> bool:
        """Whether PyTorch's loss with other random numbers is another one."""
        self._state.restore()
        try:
            return _differ(self._loss(self._plain, copied(batch), seed=_SEEDS[1]).detach(), loss)
        finally:
            self._state.restore()

    def compute(self, batch: Batch) -> None:
        """Computes ONNX Runtime's gradients alone, for a model whose gradients are random; raises what that raises."""
        self._computed(self._wrapped, batch, _forget)

    def _judged(
        self, far: list[TensorDifference], floor: Callable[[str], float], batch: Batch, tolerance_factor: float
    ) -> str | None:
        """Says which of the gradients that differ from PyTorch's is wrong by fp64; None where none is."""
        for some in self._parts(far, batch):
            names = [one.name for one in some]
            ort, eager, errors = NamedTensors(), NamedTensors(), dict[str, tuple[float | None, float | None]]()
            self._under_ort(batch, ort.__setitem__, names)
            self._computed(self._plain, batch, eager.__setitem__, names)
            judge = partial(_judge, ort=ort, eager=eager, floor=floor, errors=errors)
            if not self._run_in_fp64(batch, judge, names):
                return _said(some[0].name, some[0].error, "PyTorch's")
            wrong = [one for one in some if not is_as_good(*errors[one.name], tolerance_factor * one.tolerance)]
            nudged = self._errors_when_nudged([one.name for one in wrong], floor, batch) if wrong else {}
            for one in wrong:
                error, own = errors[one.name]
                if not is_as_good(error, nudged[one.name], tolerance_factor * one.tolerance):
                    own_text = "not known" if own is None else f"{own:.2g}"
                    return _said(one.name, error, f"PyTorch's in fp64 (PyTorch's own error: {own_text})")
        return None

    def _errors_when_nudged(self, names: list[str], floor: Callable[[str], float], batch: Batch) -> dict[str, float]:
        """Returns the largest errors of PyTorch's gradients with weights that are off by rounding, against fp64."""
        truth, largest = NamedTensors(), dict.fromkeys(names, 0.0)
        self._run_in_fp64(batch, truth.__setitem__, names)

        def compare(name: str, gradient: torch.Tensor) -> None:
            largest[name] = max(largest[name], relative_error(gradient, truth[name], floor(name)) or 0.0)

        generator = torch.Generator().manual_seed(_SEEDS[0])
        for _ in range(_NUDGES):
            self._state.restore()
            model = copy.deepcopy(self._plain)
            _nudge(model, generator)
            inputs = copied(batch)
            _differentiate(self._loss(model, inputs, seed=_SEEDS[0]), _leaves(model, inputs, names), compare)
            _give_buffers(model, compare, names)
        return largest

    def _parts(self, far: list[TensorDifference], batch: Batch) -> Iterator[list[TensorDifference]]:
        """Divides what differs into parts of which copies take little memory."""
        sizes = {name: leaf.numel() for name, leaf in _leaves(self._plain, batch).items()}
        sizes |= {_BUFFER + name: buffer.numel() for name, buffer in self._plain.named_buffers()}
        most = max(_JUDGED * sum(sizes.values()), _AT_ONCE)
        part: list[TensorDifference] = []
        for one in far:
            if part and sum(sizes[other.name] for other in (*part, one)) > most:
                yield part
                part = []
            part.append(one)
        yield part

    def _under_ort(self, batch: Batch, take: _Take, names: list[str] | None = None) -> torch.Tensor:
        with dropout_off(self._wrapped):
            return self._computed(self._wrapped, batch, take, names)

    def _computed(
        self, model: torch.nn.Module, batch: Batch, take: _Take, names: list[str] | None = None
    ) -> torch.Tensor:
        """Computes the gradients and buffers, or those of some names, and returns the loss."""
        inputs = copied(batch)
        self._state.restore()
        try:
            loss = self._loss(model, inputs, seed=_SEEDS[0])
            _differentiate(loss, _leaves(self._plain, inputs, names), take)
            self._moved = self._state.moved_buffers()
            _give_buffers(self._plain, take, names)
            return loss.detach()
        finally:
            self._state.restore()

    def _loss(self, model: torch.nn.Module, batch: Batch, seed: int) -> torch.Tensor:
        reference = Reference()
        with same_random_numbers(), torch.enable_grad(), reference, self._precision(), without_reentrance():
            seed_all(seed)
            loss = self._task.loss(model, batch)
        self._rates = reference.rates
        return loss

    def _run_in_fp64(self, batch: Batch, take: _Take, names: list[str]) -> bool:
        """Computes PyTorch's gradients of these names in fp64; returns whether the model runs so."""
        try:
            self._state.restore()
            model = copy.deepcopy(self._plain).double()
            wide = in_fp64(batch)
            with torch.enable_grad(), Reference(), without_reentrance():
                loss = self._task.loss(model, wide)
            _differentiate(loss, _leaves(model, wide, names), take)
            _give_buffers(model, take, names)
        except Exception:
            return False
        return True


def _nudge(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Moves each weight by a random part of itself, of at most `_NUDGE`."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                parts = torch.rand(weight.shape, generator=generator).to(weight.device).mul_(2).sub_(1)
                weight.add_(weight * parts.to(weight.dtype), alpha=_NUDGE)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return widest({"loss": one}, {"loss": other}).differs


def _said(name: str, error: float | None, reference: str) -> str:
    is_buffer = name.startswith(_BUFFER)
    if error is not None:
        amount = f"differs by {error:.2g} of its largest value from"
    else:
        amount = "has other values than" if is_buffer else "cannot even be compared with"
    return f"under ONNX Runtime the {name if is_buffer else f'gradient of {name}'} {amount} {reference}"


def _forget(_name: str, _gradient: torch.Tensor) -> None:
    """Takes a gradient that is only computed."""


def _judge(
    name: str,
    truth: torch.Tensor,
    ort: NamedTensors,
    eager: NamedTensors,
    floor: Callable[[str], float],
    errors: dict[str, tuple[float | None, float | None]],
) -> None:
    """Notes how far ONNX Runtime's gradient and PyTorch's own are from the one in fp64."""
    ours = ort.pop(name, None)
    error = None if ours is None else relative_error(ours, truth, floor(name))
    errors[name] = error, relative_error(eager.pop(name), truth, floor(name))


def _leaves(model: torch.nn.Module, batch: Batch, names: list[str] | None = None) -> NamedTensors:
    """Returns the parameters and inputs that need a gradient, or some of them."""
    leaves: NamedTensors = {name: one for name, one in model.named_parameters() if one.requires_grad}
    leaves |= {f"input {name}": tensor for name, tensor in named(batch).items() if tensor.requires_grad}
    return leaves if names is None else {name: leaves[name] for name in names if name in leaves}


def _give_buffers(model: torch.nn.Module, take: _Take, names: list[str] | None = None) -> None:
    """Gives copies of the buffers, or of some of them, to `take`."""
    for name, buffer in model.named_buffers():
        if names is None or _BUFFER + name in names:
            take(_BUFFER + name, buffer.detach().clone())


def _differentiate(loss: torch.Tensor, leaves: NamedTensors, take: _Take) -> None:
    """Computes gradients and gives each to `take` as soon as it is complete; those of unused leaves are zero."""
    if not leaves or not loss.requires_grad:
        return
    handles = [leaf.register_hook(partial(_taken, take, name)) for name, leaf in leaves.items()]
    try:
        # Not `backward`, which would call the hooks of DDP and DeepSpeed.
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        if gradient is None:
            take(name, torch.zeros_like(leaf))


def _taken(take: _Take, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Hook of a leaf: gives its gradient away, and returns one of the same shape that takes no memory."""
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        take(name, gradient.detach().to_dense())
        return None
    take(name, gradient.detach())
    return gradient.new_zeros(()).expand(gradient.shape)
