"""Compares training steps with PyTorch's: the same weights, the same batches, dropout off.

A model may be so sensitive (BatchNorm over four rows) that PyTorch in fp32 is far from PyTorch in fp64. Where ONNX
Runtime differs from the former, the latter decides: what is nearly as close to it as PyTorch in fp32 is right.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.check.export import Setting
from ortlaunch.check.report import Parity
from ortlaunch.models.task import Batch, loss_of
from ortlaunch.ort import session
from ortlaunch.ort.refusal import last_line
from ortlaunch.ort.verify.compare import FLOOR, compare, relative_error
from ortlaunch.ort.verify.comparison import TensorComparison
from ortlaunch.ort.verify.gradients import AS_GOOD
from ortlaunch.ort.verify.nested import NamedTensors, named_tensors
from ortlaunch.ort.verify.reference import Reference
from ortlaunch.ort.verify.state import ModelState, copied_buffers, same_random_numbers, seed_all

STEPS = 3

_GROUPS = ("loss", "outputs", "gradients", "parameters", "buffers")
_SAME_LOSS = 1e-4
"""The most by which PyTorch's losses in fp32 and fp64 differ where both compute the same."""
_STEP_SHARE = 1e-2
"""Length of a step over the length of the weights; it is so small that rounding errors do not grow over the steps."""


@dataclass(frozen=True)
class _Trained:
    """The results of training one backend from the same start."""

    loss: NamedTensors
    outputs: NamedTensors
    gradients: NamedTensors
    parameters: NamedTensors
    buffers: NamedTensors
    moved: set[str]
    """Buffers whose values changed during the training."""
    rate: float


def check_parity(model: torch.nn.Module, batches: list[Batch], setting: Setting) -> Parity:
    """Compares loss, outputs and gradients of the first step, and weights and buffers after `STEPS` steps.

    The steps are plain gradient descent. An adaptive optimizer would make full steps from gradients that are only
    rounding errors, and the check would report these as differences.

    Args:
        model: the plain model; it is not changed.
        batches: one for each step.
        setting: settings of the check.
    """
    eager = _train(copy.deepcopy(model), batches, setting, None)
    try:
        ort = _train(setting.wrap(model), batches, setting, eager.rate)
    except Exception as error:
        return Parity("failed", error=last_line(str(error)))
    result = Parity(
        "ok",
        steps=STEPS,
        loss=compare(ort.loss, eager.loss),
        outputs=compare(ort.outputs, eager.outputs),
        gradients=compare(ort.gradients, eager.gradients),
        parameters=compare(ort.parameters, eager.parameters),
        buffers=compare(ort.buffers, eager.buffers),
        stale_buffers=sorted(eager.moved - ort.moved),
    )
    if not _is_equal(result):
        _accept_rounding(result, ort, eager, _in_fp64(model, batches, setting, eager))
    if result.stale_buffers or not _is_equal(result):
        result.status = "failed"
    return result


def _is_equal(result: Parity) -> bool:
    groups = (getattr(result, name) for name in _GROUPS)
    return all(group is None or group.ok for group in groups)


def _in_fp64(model: torch.nn.Module, batches: list[Batch], setting: Setting, eager: _Trained) -> _Trained | None:
    """Trains the model in PyTorch in fp64; None where it does not run so, or is another model by its random numbers."""
    wide = [{name: x.double() if x.is_floating_point() else x for name, x in batch.items()} for batch in batches]
    exact = dataclasses.replace(setting, precision=contextlib.nullcontext)
    try:
        found = _train(copy.deepcopy(model).double(), wide, exact, eager.rate)
    except Exception:
        return None
    error = relative_error(eager.loss["loss"].double(), found.loss["loss"])
    return found if error is not None and error <= _SAME_LOSS else None


def _accept_rounding(result: Parity, ort: _Trained, eager: _Trained, true: _Trained | None) -> None:
    """Takes the tensors out of `result` that are about as close to fp64 as PyTorch's own in fp32."""
    if true is None:
        return
    for group in _GROUPS:
        comparison: TensorComparison | None = getattr(result, group)
        if comparison is not None:
            expected, own, actual = (getattr(one, group) for one in (true, eager, ort))
            largest = max((float(x.abs().max()) for x in expected.values() if x.numel()), default=0.0)

            def error(values: NamedTensors, name: str, expected: Any = expected, largest: float = largest) -> float:
                found = relative_error(values[name].double(), expected[name], FLOOR * largest)
                return math.inf if found is None else found

            comparison.differing = [
                one
                for one in comparison.differing
                if one.error is None or error(actual, one.name) > max(one.tolerance, AS_GOOD * error(own, one.name))
            ]


def _train(model: torch.nn.Module, batches: list[Batch], setting: Setting, rate: float | None) -> _Trained:
    plain = session.plain_model(model) if hasattr(model, "_torch_module") else model
    state: ModelState | None = None
    first: tuple[NamedTensors, NamedTensors, NamedTensors] | None = None
    before = copied_buffers(plain)
    with Reference(), same_random_numbers():
        for step in range(STEPS):
            batch = batches[step % len(batches)]
            # A model that draws numbers itself gets the same ones on both sides.
            seed_all(setting.seed + step)
            with setting.precision():
                outputs = setting.task.outputs(model, batch)
                loss = loss_of(outputs, batch)
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
            if first is None:
                first = ({"loss": loss.detach()}, named_tensors(outputs), gradients)
                rate = _rate(plain) if rate is None else rate
                # The export also runs a forward in PyTorch, so changes of buffers count only after it.
                state = ModelState(plain)
            _descend(plain, rate or 0.0)
    assert first is not None and state is not None
    moved = state.moved_buffers()
    parameters = {name: p.detach().clone() for name, p in plain.named_parameters()}
    after = {name: value for name, value in copied_buffers(plain).items() if name in before}
    return _Trained(*first, parameters, after, moved, rate or 0.0)


def _rate(model: torch.nn.Module) -> float:
    with_gradient = [p for p in model.parameters() if p.grad is not None]
    weights = sum(float(p.detach().double().pow(2).sum()) for p in with_gradient) ** 0.5
    gradient = sum(float(p.grad.double().pow(2).sum()) for p in with_gradient if p.grad is not None) ** 0.5
    return _STEP_SHARE * weights / gradient if gradient > 0 else 0.0


def _descend(model: torch.nn.Module, rate: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
                parameter.grad = None
