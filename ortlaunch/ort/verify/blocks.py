"""The check at the start of a run under ZeRO 3, where ONNX Runtime runs the model block by block.

The parameters of a block exist only while it runs. So the model is run on the batches, and a block is compared with
PyTorch at the end of its forward: the first block of each class as a model of its own, with the arguments of its calls,
and the outputs and gradients of the other ones, and of further ways to call it. `beside` then looks for what blocks
leave for the rest of the model beside their outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ortlaunch.base.counting import is_power_of_two
from ortlaunch.base.errors import RequestError, WrongGradientsError
from ortlaunch.config.schema import Allow
from ortlaunch.models import modes
from ortlaunch.models.task import Batch, Task
from ortlaunch.ort import session
from ortlaunch.ort.blocks import OrtBlock, attached
from ortlaunch.ort.module import cache
from ortlaunch.ort.module.by_size import Sizes
from ortlaunch.ort.tracing import decisions
from ortlaunch.ort.verify.beside import beside
from ortlaunch.ort.verify.block_errors import BlockTask, gradients_error, outputs_error
from ortlaunch.ort.verify.pair import Context
from ortlaunch.ort.verify.sizes import Evaluated, is_new, sizes_of
from ortlaunch.ort.verify.start import QuickCheck
from ortlaunch.ort.verify.state import ModelState, copied, same_random_numbers
from ortlaunch.ort.verify.trace import TraceWarning, trace_warnings
from ortlaunch.ort.verify.trap import Finding

_ADVICE = "Use trainer.zero_stage=2"


@dataclass
class Rechecks:
    """When the gradients of blocks are compared while a run trains, beside those of inputs with new sizes."""

    after_evaluations: bool = True
    """After the first, second, fourth evaluation and so on; of a model with a ``train()`` of its own, after each."""
    asked: int = 0
    """How often the run has asked for a comparison of the next forward."""


def block_findings(
    model: torch.nn.Module,
    task: Task,
    precision: Context,
    batches: list[Batch],
    allow: Sequence[Allow] = (),
    rechecks: Rechecks | None = None,
) -> list[Finding]:
    """Returns the problems of the blocks of a model under ZeRO 3; see `QuickCheck.findings`.

    From then on, each block is compared with PyTorch where the sizes of its inputs are new, in some evaluations and
    after them, and where `rechecks` asks for it.

    Args:
        model: the model that `session.wrap_blocks` returned, under DeepSpeed.
        task: how the model is called.
        precision: the context in which the run calls the model.
        batches: at least two, on the model's device. All workers have the same number of them.
        allow: findings that do not stop the run.
        rechecks: asks for comparisons later.

    Raises:
        RequestError: a block is in evaluation mode, and would pass no gradients on to weights that are trained, or
            forward calls a block more than once, or none.
    """
    for block in attached(model):
        if not block.block.training and _has_trained_weights(model, up_to=block.block):
            raise RequestError(
                f"the block {block.path} is kept in evaluation mode, and ONNX Runtime's graph for that has no "
                "gradients: keep its parts in eval() instead of the block itself, or use trainer.zero_stage=2 or "
                "backend=eager"
            )
    if not batches:
        return []
    first_of_class = {type(block.block): block for block in reversed(attached(model))}
    passes = _Passes(precision, len(batches))
    watches = [_Watch(block, passes, is_first=first_of_class[type(block.block)] is block) for block in attached(model)]
    with same_random_numbers():
        state = ModelState(model)
        try:
            for number, batch in enumerate(batches):
                passes.current = number
                # Without gradients, the blocks would export and run the graph without dropout.
                with cache.reading(), precision(), trace_warnings() as new:
                    task.outputs(model, batch)
                passes.warnings += new
        finally:
            state.restore()
            for watch in watches:
                watch.end()
        _check_calls(watches)
        left = beside(
            attached(model), lambda batch: task.outputs(model, copied(batch)), batches[0], batches[-1], precision, state
        )
    has_own = modes.has_own(model)
    for watch in watches:
        watch.block.watched_by(_Training(watch, precision, allow, rechecks or Rechecks(), has_own_modes=has_own))
    found = [finding for watch in watches for finding in watch.findings]
    return [*found, *([left] if left is not None else [])]


def _has_trained_weights(model: torch.nn.Module, *, up_to: torch.nn.Module) -> bool:
    """Whether a weight of a block, or of what a model has before it, is trained."""
    parameters = list(model.parameters())
    own = {id(parameter) for parameter in up_to.parameters()}
    last = max((index for index, parameter in enumerate(parameters) if id(parameter) in own), default=-1)
    return any(parameter.requires_grad for parameter in parameters[: last + 1])


def _check_calls(watches: list[_Watch]) -> None:
    if not any(watch.most_calls for watch in watches):
        raise RequestError(
            f"the model's forward calls none of its blocks ({watches[0].block.path} …), perhaps only parts of them, "
            "and ONNX Runtime would run nothing: choose other blocks by backend.blocks, or use trainer.zero_stage=2 "
            "or backend=eager"
        )
    for watch in watches:
        if watch.most_calls > 1 and any(parameter.requires_grad for parameter in watch.block.block.parameters()):
            raise RequestError(
                f"the block {watch.block.path} is called {watch.most_calls} times in one forward, and with "
                "backend=ort and trainer.zero_stage=3 DeepSpeed reduces a block's gradients after each of them: choose "
                "other blocks by backend.blocks, or use trainer.zero_stage=2 or backend=eager"
            )


@dataclass
class _Passes:
    """The passes over the run's first batches."""

    precision: Context
    count: int
    current: int = 0
    warnings: list[TraceWarning] = field(default_factory=list)

    @property
    def are_ending(self) -> bool:
        return self.current == self.count - 1


class _Watch:
    """Compares a block in the passes at the start."""

    def __init__(self, block: OrtBlock, passes: _Passes, *, is_first: bool) -> None:
        """
        Args:
            block: the block.
            passes: the passes.
            is_first: whether it is the first of its class, which is checked as a model of its own.
        """
        self.block = block
        self.findings: list[Finding] = []
        self.sizes: set[Sizes] = set()
        """Those of the tensors that it was called with."""
        self._calls = [0] * passes.count
        self._passes = passes
        self._is_first = is_first
        self._inputs: list[Batch] = []
        block.watched_by(self)

    def __call__(self, ort_module: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
        passes = self._passes
        self._calls[passes.current] += torch.is_grad_enabled()
        inputs = named(tensors)
        is_new(sizes_of(inputs), self.sizes)
        if self._is_first and torch.is_grad_enabled() and ort_module is self.block.ort_modules[0]:
            self._inputs.append(copied(inputs))
            if passes.are_ending and len(self._inputs) > 1 and not self.findings:
                check = QuickCheck(ort_module, BlockTask(), passes.precision)  # type: ignore[arg-type]
                self.findings = check.findings(self._inputs, passes.warnings)
                self._is_first = False
        elif passes.current and not self.findings:
            self._compare(ort_module, inputs)

    @property
    def most_calls(self) -> int:
        """How often a pass has called the block with gradients, at most."""
        return max(self._calls)

    def end(self) -> None:
        """Lets the block go on without it."""
        self.block.watched_by(None)

    def _compare(self, ort_module: torch.nn.Module, inputs: Batch) -> None:
        if session.fallback_reason(ort_module) is not None:
            return
        self.findings = cache.judged(ort_module, lambda: self._errors(ort_module, inputs))

    def _errors(self, ort_module: torch.nn.Module, inputs: Batch) -> list[Finding]:
        error = outputs_error(ort_module, inputs, self._passes.precision)
        kind = Allow["wrong_outputs"]
        if error is None and self._passes.are_ending and torch.is_grad_enabled():
            error, kind = gradients_error(ort_module, inputs, self._passes.precision), Allow["wrong_gradients"]
        return [Finding(kind, f"in the block {self.block.path}, {error}", _ADVICE)] if error is not None else []


class _Training:
    """Compares a block while the run trains.

    Its outputs and gradients are compared where the sizes of its inputs are new, and when `Rechecks` says so; its
    outputs in some evaluations. Nothing of it needs the other workers, whose batches have other sizes.
    """

    def __init__(
        self,
        watch: _Watch,
        precision: Context,
        allow: Sequence[Allow],
        rechecks: Rechecks,
        *,
        has_own_modes: bool,
    ) -> None:
        self._block = watch.block.block
        self._path = watch.block.path
        self._precision = precision
        self._allow = set(allow)
        self._sizes = set(watch.sizes)
        self._evaluated = Evaluated()
        self._rechecks = rechecks
        self._has_own_modes = has_own_modes
        self._was_training = True
        self._turns = {True: 0, False: 0}
        """How often the block was put into training and into evaluation mode."""
        self._due = {True: 0, False: 0}
        """How often these turns have asked for a comparison."""
        self._compared: dict[tuple[int, bool], int] = {}
        """What was asked for when an ORTModule was compared last in a mode."""

    def __call__(self, ort_module: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
        if session.fallback_reason(ort_module) is not None:
            return
        inputs = named(tensors)
        is_asked = self._is_asked(ort_module)
        with decisions.not_noted():
            if not torch.is_grad_enabled():
                error = self._error(ort_module, inputs, is_asked)
            else:
                if is_asked:
                    self._recheck(ort_module, inputs)
                error = self._error_of_new_sizes(ort_module, inputs)
        if error is None:
            return
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        where = "" if torch.is_grad_enabled() else "in evaluation mode, "
        raise RequestError(
            f"{where}in the block {self._path}, called with tensors of {shapes}, {error}: its forward goes by a size, "
            "or by a value of Python that changes, and ONNX Runtime's graph does what it did in the trace. Use no loop "
            "or branch over sizes, keep what changes in buffers, use backend=eager, or accept it with "
            f"backend.allow=[{'frozen_branch' if torch.is_grad_enabled() else 'wrong_outputs'}]"
        )

    def _is_asked(self, ort_module: torch.nn.Module) -> bool:
        """Whether a comparison of this ORTModule is due, which it is once."""
        trains = self._block.training
        if trains is not self._was_training:
            self._was_training = trains
            self._turns[trains] += 1
            is_in_turn = trains and is_power_of_two(self._turns[trains])
            self._due[trains] += self._rechecks.after_evaluations and (is_in_turn or self._has_own_modes)
        due = self._due[trains] + (self._rechecks.asked if trains else 0)
        place = id(ort_module), trains
        is_asked = due > self._compared.get(place, 0)
        self._compared[place] = due
        return is_asked

    def _recheck(self, ort_module: torch.nn.Module, inputs: Batch) -> None:
        if Allow["wrong_gradients"] in self._allow:
            return
        error = outputs_error(ort_module, inputs, self._precision)
        error = error or gradients_error(ort_module, inputs, self._precision)
        if error is not None:
            raise WrongGradientsError(
                f"in the block {self._path}, {error}: evaluation, train() or other code has changed a value of Python "
                "or a buffer that is not saved and that its forward goes by, or an operator is differentiated wrongly. "
                "The weights are those before this step. Resume from the last checkpoint with backend=eager, or accept "
                "the difference with backend.allow=[wrong_gradients]"
            )

    def _error_of_new_sizes(self, ort_module: torch.nn.Module, inputs: Batch) -> str | None:
        if self._allow - {Allow["stale_buffers"]} or not is_new(sizes_of(inputs), self._sizes):
            return None
        found = outputs_error(ort_module, inputs, self._precision)
        return found or gradients_error(ort_module, inputs, self._precision)

    def _error(self, ort_module: torch.nn.Module, inputs: Batch, is_asked: bool) -> str | None:
        is_due = self._evaluated.is_due(inputs) or is_asked
        if not is_due or Allow["wrong_outputs"] in self._allow:
            return None
        return outputs_error(ort_module, inputs, self._precision)


def named(tensors: Sequence[Any]) -> Batch:
    """A block's tensors as a batch."""
    return {f"input {number}": tensor for number, tensor in enumerate(tensors)}
