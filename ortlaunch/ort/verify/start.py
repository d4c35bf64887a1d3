"""The check at the start of a run, which finds silent errors on the run's own first batches.

It uses the run's own ORTModule, so nothing is exported twice. The first training forward makes the export that the run
needs anyway. The exported graph is then run with dropout off, and must return PyTorch's outputs for batches that it was
not traced with. Weights, buffers, gradients and random numbers are restored, except ONNX Runtime's own random numbers,
so the caller seeds them afterwards. The trainer's wrapper (DDP, DeepSpeed) is bypassed, so none of its hooks is called.

Tolerances are wide, because the check looks for wrong results and not for rounding errors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable

import torch

from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.config.options import TRAPS
from ortlaunch.models.task import Batch, Task
from ortlaunch.ort import session
from ortlaunch.ort.module import cache
from ortlaunch.ort.module.failed_node import failure
from ortlaunch.ort.refusal import cause
from ortlaunch.ort.tracing import failed_export
from ortlaunch.ort.tracing.checkpoints import without_reentrance
from ortlaunch.ort.verify.compare import is_as_good, relative_error
from ortlaunch.ort.verify.examination import WIDER, Examination
from ortlaunch.ort.verify.gap import widest
from ortlaunch.ort.verify.gradients import Gradients
from ortlaunch.ort.verify.pair import Context
from ortlaunch.ort.verify.state import ModelState, copied, in_fp64, same_random_numbers, seed_all
from ortlaunch.ort.verify.trace import TraceWarning, trace_warnings
from ortlaunch.ort.verify.trap import Finding

_KIND = r"^torch\.onnx\.[\w.]*: "
"""What an error of torch's exporter begins with."""
_OTHER_SEED = 2
FRESH_BATCHES = 2
"""Number of batches besides the traced one on which the graph is checked."""


class QuickCheck:
    """Compares one worker's ORTModule with the plain model inside it."""

    def __init__(self, wrapped: torch.nn.Module, task: Task, precision: Context) -> None:
        """
        Args:
            wrapped: the ORTModule, before or after its first forward.
            task: how the model is called.
            precision: the context in which the run calls the model (autocast).
        """
        self._wrapped = wrapped
        self._task = task
        self._precision = precision
        self._warnings: list[TraceWarning] = []

    def findings(self, batches: list[Batch], warnings: Iterable[TraceWarning] = ()) -> list[Finding]:
        """Returns the problems; empty if there are none, or if the model fell back to PyTorch.

        Args:
            batches: on the model's device; the first one is used for the export.
            warnings: the tracer's warnings, if the model was already exported.

        Raises:
            RequestError: the model runs in eager PyTorch and not under ONNX Runtime.
        """
        known = list(warnings)
        with same_random_numbers():
            return cache.judged(self._wrapped, lambda: self._checked(batches, known))

    def _checked(self, batches: list[Batch], warnings: list[TraceWarning]) -> list[Finding]:
        self._warnings = list(warnings)
        state = ModelState(session.plain_model(self._wrapped))
        try:
            return self._findings(batches, state)
        except (RequestError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            state.restore()
            # The model's own error comes first.
            self._run_plain(batches)
            if isinstance(error, TrainingError):
                raise RequestError(f"backend=ort cannot train this model: {error}") from error
            manager = session.training_manager(self._wrapped)
            what = (failure(manager, str(error)) if manager is not None else None) or cause(error)
            statement = failed_export.take()
            what = f"{statement} cannot be exported: {re.sub(_KIND, '', what)}" if statement else what
            raise RequestError(
                f"backend=ort cannot train this model: {what}. Use backend=eager or backend=compile, or "
                "change that part (`ortlaunch check` with the same keys names it where it can)"
            ) from error
        finally:
            state.restore()

    def _findings(self, batches: list[Batch], state: ModelState) -> list[Finding]:
        with trace_warnings() as new:
            self._forward(batches[0])
        self._warnings += new
        if not session.is_active(self._wrapped):
            if session.fallback_reason(self._wrapped) is None:
                raise RequestError(
                    "the model is in evaluation mode when a run trains it (its train() leaves it so), and ONNX "
                    "Runtime's graph for that has no gradients: let train() set the mode and keep single modules in "
                    "eval(), or use backend=eager or backend=compile"
                )
            # The model fell back to PyTorch (backend.fallback=warn), so there is nothing to compare.
            cache.forget(self._wrapped)
            return []
        examination = Examination(self._wrapped, self._task, self._precision, state, batches, self._warnings)
        findings = [trap.finding(examination) for trap in TRAPS.values()]
        return [finding for finding in findings if finding is not None]

    def _forward(self, batch: Batch) -> None:
        with self._precision():
            self._task.outputs(self._wrapped, copied(batch))

    def _run_plain(self, batches: list[Batch]) -> None:
        """Runs the plain model on each batch, forward and backward; hooks of gradients are not called."""
        plain = session.plain_model(self._wrapped)
        leaves = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        for batch in batches:
            with torch.enable_grad(), self._precision(), without_reentrance():
                loss = self._task.loss(plain, copied(batch))
            if leaves and loss.requires_grad:
                torch.autograd.grad(loss, leaves, allow_unused=True)


def gradient_error(
    wrapped: torch.nn.Module, task: Task, precision: Context, batch: Batch, *, with_buffers: bool = True
) -> str | None:
    """Says what is wrong with a model's gradients, or its buffers; None where nothing is, or where chance decides.

    Args:
        wrapped: the ORTModule, which trains. Its weights, buffers, gradients and random numbers are left as they are.
        task: how the model is called.
        precision: the context in which the run calls the model (autocast).
        batch: on the model's device.
        with_buffers: whether wrong buffers matter.
    """
    with same_random_numbers():
        state = ModelState(session.plain_model(wrapped))
        try:
            errors = Gradients(wrapped, task, precision, state).errors(batch, WIDER, with_buffers=with_buffers)
            return errors.gradients or errors.buffers
        except (RequestError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"ONNX Runtime cannot compute the model's gradients ({cause(error)})"
        finally:
            state.restore()


def evaluation_error(wrapped: torch.nn.Module, task: Task, precision: Context, batch: Batch) -> str | None:
    """Says what is wrong with the loss of a batch in evaluation mode; None where nothing is. As `gradient_error`.

    Buffers are left as they are. Values of Python go on as in PyTorch, so that the next batch shows what changes them.
    """
    plain = session.plain_model(wrapped)
    state = ModelState(plain)

    def loss_of(model: torch.nn.Module, seed: int | None = None) -> torch.Tensor:
        try:
            with same_random_numbers(), torch.no_grad(), precision():
                if seed is not None:
                    seed_all(seed)
                return task.loss(model, copied(batch))
        finally:
            state.restore_buffers()

    loss, expected = loss_of(wrapped), loss_of(plain)
    gap = widest({"loss": loss}, {"loss": expected})
    if not gap.exceeds(WIDER * gap.tolerance):
        return None
    after = ModelState(plain)
    try:
        state.restore()
        if widest({"loss": loss_of(plain, seed=_OTHER_SEED)}, {"loss": expected}).differs:
            return None
        state.restore()
        exact = _loss_in_fp64(plain, task, batch)
    finally:
        after.restore()
    if exact is not None:
        error, own = (relative_error(one.double(), exact) for one in (loss, expected))
        if is_as_good(error, own, WIDER * gap.tolerance):
            return None
    return f"the loss of this batch is {float(loss):.6g} under ONNX Runtime, and {float(expected):.6g} in PyTorch"


def _loss_in_fp64(plain: torch.nn.Module, task: Task, batch: Batch) -> torch.Tensor | None:
    """Returns PyTorch's loss in fp64; None where the model does not run so."""
    try:
        with same_random_numbers(), torch.no_grad():
            return task.loss(copy.deepcopy(plain).double(), in_fp64(batch)).double()
    except Exception:
        return None
