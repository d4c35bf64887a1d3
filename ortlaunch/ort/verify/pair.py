"""A plain model and the graph exported from it, called with the same weights and buffers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ortlaunch.models import modes
from ortlaunch.models.task import Batch, Task, loss_of
from ortlaunch.ort import session
from ortlaunch.ort.source import SourceLine
from ortlaunch.ort.tracing.checkpoints import without_reentrance
from ortlaunch.ort.verify.compare import errors_from_exact, is_as_good, tolerance_of
from ortlaunch.ort.verify.gap import Gap, widest
from ortlaunch.ort.verify.graph import TracedGraph
from ortlaunch.ort.verify.nested import NamedTensors, named_tensors
from ortlaunch.ort.verify.python_state import EVALUATED, PythonChange, python_change
from ortlaunch.ort.verify.reference import Reference
from ortlaunch.ort.verify.state import (
    ModelState,
    copied,
    in_fp64,
    random_state,
    same_random_numbers,
    seed_all,
)

Context = Callable[[], contextlib.AbstractContextManager[Any]]
Decisions = dict[SourceLine, list[str]]
_SEED = 1


class Pair:
    """Runs both with dropout off and everything else in train mode.

    Attributes:
        state: the state of the plain model from which every pass starts.
        moved: names of the buffers that PyTorch's forward passes have changed.
        draws_elsewhere: whether they have drawn random numbers of Python or NumPy.
    """

    def __init__(self, wrapped: torch.nn.Module, task: Task, precision: Context, state: ModelState) -> None:
        """
        Args:
            wrapped: an ORTModule that has exported.
            task: how the model is called.
            precision: the context in which PyTorch runs it.
            state: see the attribute.
        """
        self._plain = session.plain_model(wrapped)
        self._graph = TracedGraph(wrapped)
        self._task = task
        self._precision = precision
        self.state = self._after = state
        self.moved: set[str] = set()
        self.draws_elsewhere = False
        self._is_held = False

    def eager(self, batch: Batch) -> tuple[NamedTensors, Decisions]:
        """Returns PyTorch's outputs, and the tensor values that Python code read."""
        self.state.restore()
        with self._chance(), as_in_training(), self._precision(), Reference() as reference:
            before = random_state()
            outputs = self._task.outputs(self._plain, copied(batch))
            self.draws_elsewhere |= random_state() != before
        self.moved |= self.state.moved_buffers()
        self._after = self.state.later()
        self.state.restore()
        return named_tensors(outputs), dict(reference.decisions)

    def state_after(self, batch: Batch) -> ModelState:
        """Returns the state from which PyTorch's next pass would start."""
        self.eager(batch)
        return self._after

    def python_change(self, batch: Batch, another: Batch) -> PythonChange | None:
        """Returns a value of the model's Python code that each pass changes; None where there is none."""

        def forward(*, other: bool = False) -> NamedTensors:
            with same_random_numbers(), as_in_training(), self._precision(), Reference() as reference:
                outputs = self._task.outputs(self._plain, copied(another if other else batch))
            return named_tensors(outputs) | _rates(reference)

        def step() -> NamedTensors:
            with same_random_numbers():
                outputs, loss, found = self._differentiate(batch)
            gradients = {f"gradient of {name}": one for name, one in found.items()}
            return {**outputs, "loss": loss, **gradients, **self._evaluated(batch)}

        self.state.restore()
        try:
            return python_change(self._plain, forward, step, self.state.restore_buffers)
        finally:
            self.state.restore()

    def _differentiate(self, batch: Batch) -> tuple[NamedTensors, torch.Tensor, NamedTensors]:
        """Returns PyTorch's outputs, its loss and the gradients of the parameters that have one."""
        leaves = {name: leaf for name, leaf in self._plain.named_parameters() if leaf.requires_grad}
        one = copied(batch)
        with torch.enable_grad(), without_reentrance():
            with self._precision(), Reference() as reference:
                outputs = self._task.outputs(self._plain, one)
            loss = loss_of(outputs, one)
            found: Any = [None] * len(leaves)
            if leaves and loss.requires_grad:
                found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        gradients = {name: one for name, one in zip(leaves, found, strict=True) if one is not None}
        return named_tensors(outputs) | _rates(reference), loss.detach(), gradients

    def _evaluated(self, batch: Batch) -> NamedTensors:
        """Returns PyTorch's outputs in evaluation mode; none where the model does not run so."""
        was_training = self._plain.training
        with modes.kept(self._plain):
            try:
                self._plain.eval()
                with same_random_numbers(), torch.no_grad(), self._precision(), Reference():
                    outputs = self._task.outputs(self._plain, copied(batch))
            except Exception:
                return {}
            finally:
                # A model may do more than to set the mode, as LoRA's layers do: they merge their weights.
                self._plain.train(was_training)
        return {EVALUATED + name: one for name, one in named_tensors(outputs).items()}

    def exported(self, batch: Batch) -> NamedTensors:
        """Returns the graph's outputs."""
        self.state.restore()
        try:
            with self._chance():
                return named_tensors(self._task.outputs(self._graph, batch))  # type: ignore[arg-type]
        finally:
            self.state.restore()

    def gap(self, batch: Batch) -> Gap:
        """Returns the output that differs most."""
        expected, _ = self.eager(batch)
        return widest(self.exported(batch), expected)

    def is_rounding(self, batch: Batch) -> bool:
        """Whether the graph's outputs are as near to PyTorch's in fp64 as PyTorch's own, for a model without chance.

        An output may be the mean of normalized values, of which fp32 leaves nothing but rounding.
        """
        truth = self._exact(batch)
        if truth is None:
            return False
        owns = errors_from_exact(self.eager(batch)[0], truth)
        errors = errors_from_exact(self.exported(batch), truth)
        return all(is_as_good(errors.get(name), own, tolerance_of(truth[name].float())) for name, own in owns.items())

    def _exact(self, batch: Batch) -> NamedTensors | None:
        """Returns PyTorch's outputs in fp64; None where the model does not run so."""
        self.state.restore()
        try:
            model = copy.deepcopy(self._plain).double()
            with as_in_training(), Reference():
                return named_tensors(self._task.outputs(model, in_fp64(batch)))
        except Exception:
            return None
        finally:
            self.state.restore()

    def is_random(self, batch: Batch) -> bool:
        """Whether two passes over the same batch differ without dropout, in PyTorch or in the graph."""
        for run in (lambda: self.eager(batch)[0], lambda: self.exported(batch)):
            first = run()
            torch.rand(1)
            if widest(run(), first).differs:
                return True
        return False

    def hold_chance(self, batch: Batch) -> bool:
        """Gives every later pass the same random numbers, if PyTorch and the graph then return the same outputs.

        They do where all numbers are torch's; NumPy's, for example, are constants in the graph.

        Returns:
            Whether they do. If not, passes stay random.
        """
        self._is_held = True
        self._is_held = not self.gap(batch).differs
        return self._is_held

    def chance_decisions(self, batch: Batch, tries: int) -> set[SourceLine]:
        """Returns the lines that read other values in repeated passes over the same batch."""
        held, self._is_held = self._is_held, False
        try:
            first = self.eager(batch)[1]
            others = [self.eager(batch)[1] for _ in range(tries)]
        finally:
            self._is_held = held
        return {place for other in others for place in changed_decisions(first, other)}

    @contextlib.contextmanager
    def _chance(self) -> Iterator[None]:
        """Seeds a pass where chance is held."""
        if not self._is_held:
            yield
            return
        with same_random_numbers():
            seed_all(_SEED)
            yield


def _rates(reference: Reference) -> NamedTensors:
    """The rates of dropout as an output: with dropout off, nothing else shows that they change."""
    return {"the rates of dropout": torch.tensor(reference.rates)} if reference.rates else {}


def changed_decisions(first: Decisions, second: Decisions) -> set[SourceLine]:
    """Returns the lines that read different values."""
    return {place for place in {*first, *second} if first.get(place) != second.get(place)}


@contextlib.contextmanager
def as_in_training() -> Iterator[None]:
    """Has PyTorch track gradients, which models look at and set hooks on, and save nothing for a backward."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing):
        yield


def _nothing(_: Any) -> Any:
    return None
