"""Compares training steps with PyTorch's: the same weights, the same batches, dropout off."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import torch

from ortlaunch.check.export import Setting
from ortlaunch.check.report import Parity
from ortlaunch.models.task import Batch, loss_of
from ortlaunch.ort import session
from ortlaunch.ort.refusal import last_line
from ortlaunch.ort.tracing.buffers import copied_buffers
from ortlaunch.ort.verify.compare import compare_with_exact, relative_error
from ortlaunch.ort.verify.comparison import TensorComparison
from ortlaunch.ort.verify.nested import NamedTensors, named_tensors
from ortlaunch.ort.verify.pair import Context
from ortlaunch.ort.verify.reference import Reference
from ortlaunch.ort.verify.state import ModelState, in_fp64, same_random_numbers, seed_all

STEPS = 3

_SAME_LOSS = 1e-2
"""The most by which PyTorch's losses in the run's precision and in fp64 differ where both compute the same."""

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

    Where ONNX Runtime's results differ from PyTorch's, PyTorch in fp64 decides which of them rounding explains.

    The steps are plain gradient descent. An adaptive optimizer would make full steps from gradients that are only
    rounding errors, and the check would report these as differences.

    Args:
        model: the plain model; it is not changed.
        batches: one for each step.
        setting: settings of the check.
    """
    eager = _train(copy.deepcopy(model), batches, setting, setting.precision, None)
    try:
        ort = _train(setting.wrap(model), batches, setting, setting.precision, eager.rate)
    except Exception as error:
        return Parity("failed", error=last_line(str(error)))
    exact = _train_in_fp64(model, batches, setting, eager)

    def compared(group: str) -> TensorComparison:
        return compare_with_exact(getattr(ort, group), getattr(eager, group), getattr(exact, group, None))

    result = Parity(
        "ok",
        steps=STEPS,
        loss=compared("loss"),
        outputs=compared("outputs"),
        gradients=compared("gradients"),
        parameters=compared("parameters"),
        buffers=compared("buffers"),
        stale_buffers=sorted(eager.moved - ort.moved),
    )
    groups = (result.loss, result.outputs, result.gradients, result.parameters, result.buffers)
    if result.stale_buffers or not all(group is None or group.ok for group in groups):
        result.status = "failed"
    return result


def _train_in_fp64(model: torch.nn.Module, batches: list[Batch], setting: Setting, eager: _Trained) -> _Trained | None:
    """Trains in PyTorch in fp64; None if the model does not run so, or draws other random numbers in fp64."""
    try:
        wide = copy.deepcopy(model).double()
        exact = _train(wide, [in_fp64(batch) for batch in batches], setting, contextlib.nullcontext, eager.rate)
    except Exception:
        return None
    error = relative_error(eager.loss["loss"].double(), exact.loss["loss"])
    return exact if error is not None and error <= _SAME_LOSS else None


def _train(
    model: torch.nn.Module, batches: list[Batch], setting: Setting, precision: Context, rate: float | None
) -> _Trained:
    plain = session.plain_model(model) if hasattr(model, "_torch_module") else model
    state: ModelState | None = None
    first: tuple[NamedTensors, NamedTensors, NamedTensors] | None = None
    before = copied_buffers(plain)
    with Reference(), same_random_numbers():
        for step in range(STEPS):
            batch = batches[step % len(batches)]
            # A model that draws numbers itself gets the same ones on both sides.
            seed_all(setting.seed + step)
            with precision():
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
