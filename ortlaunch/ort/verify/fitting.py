"""Graphs for batches of other sizes than those of the trace: one that is not right for a size gets one beside it.

A forward may go by a size: ``torch.eye(len(x))``, ``loss / math.sqrt(n)``, a loop over samples. The tracer takes such a
number for a constant. The sizes for which that is wrong get a graph of their own. It is traced with another batch,
which is brought to these sizes, and then checked as at a run's start, on a batch that it has not seen.
"""

from __future__ import annotations

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.data.batch import named
from ortlaunch.models.task import Batch, Task
from ortlaunch.ort.module import cache
from ortlaunch.ort.module.by_size import Graphs, Sizes
from ortlaunch.ort.tracing import decisions
from ortlaunch.ort.verify.pair import Context
from ortlaunch.ort.verify.sizes import is_new, resized, sizes_of
from ortlaunch.ort.verify.start import QuickCheck, evaluation_error
from ortlaunch.ort.verify.trace import TraceWarning
from ortlaunch.ort.verify.trap import Finding


class Fitting:
    """The graphs of a whole model under one ORTModule. All batches are on the model's device."""

    def __init__(self, wrapped: torch.nn.Module, task: Task, precision: Context) -> None:
        """
        Args:
            wrapped: the ORTModule.
            task: how the model is called.
            precision: the context in which the run calls the model (autocast).
        """
        self._wrapped = wrapped
        self._task = task
        self._precision = precision
        self._graphs, self._evaluation_graphs = (Graphs(wrapped, trains=trains) for trains in (True, False))
        self._known: list[Batch] = []
        """What the model was first checked with."""
        self._evaluated: Batch = {}
        self._evaluated_sizes: set[Sizes] = set()

    def findings(
        self, batches: list[Batch], warnings: list[TraceWarning] | None = None, *, may_add: bool = True
    ) -> list[Finding]:
        """Returns what the check at a run's start finds; see `QuickCheck.findings`.

        Args:
            batches: the first one is used for the export.
            warnings: the tracer's warnings, if the model was already exported.
            may_add: whether batches of other sizes than the first may get graphs of their own.
        """
        self._known = batches
        check = QuickCheck(self._wrapped, self._task, self._precision)
        try:
            found = check.findings(batches, warnings or ())
        except RequestError:
            if may_add and self._add_each(batches):
                return []
            raise
        return [] if found and may_add and self._add_each(batches) else found

    def use(self, batch: Batch) -> None:
        """Has the next forward in training use the graph for a batch."""
        self._graphs.use(sizes_of(batch))

    def add(self, batches: list[Batch]) -> bool:
        """Gives the sizes of some batches a graph of their own, if one is right for them; returns whether it is.

        It is then in use.
        """
        sizes = sizes_of(batches[0])
        made = next(filter(None, (resized(one, batches[0]) for one in self._known)), None)
        if made is None or not self._graphs.add(sizes):
            return False
        if not self._is_right([made, *batches]):
            self._graphs.drop(sizes)
            return False
        _tell("trained on", batches[0])
        return True

    def _add_each(self, batches: list[Batch]) -> bool:
        """Whether batches are of several sizes and right with a graph for each of them; then they have these graphs."""
        by_sizes: dict[Sizes, list[Batch]] = {}
        for batch in batches:
            by_sizes.setdefault(sizes_of(batch), []).append(batch)
        first, *others = by_sizes.values()
        made = resized(others[0][0], first[0]) if others else None
        return made is not None and self._is_right([*first, made]) and all(map(self.add, others))

    def _is_right(self, batches: list[Batch]) -> bool:
        """Whether the check at a run's start finds nothing in the graph in use, which the first batch exports."""
        try:
            with decisions.as_at_start():
                return not QuickCheck(self._wrapped, self._task, self._precision).findings(batches)
        except Exception:
            # The caller says what is wrong without this graph.
            return False

    def fit_evaluated(self, batch: Batch) -> None:
        """Has the next forward in evaluation mode use a graph that is right for a batch, where there can be one."""
        sizes, other = sizes_of(batch), self._evaluated
        self._evaluated = batch
        self._evaluation_graphs.use(sizes)
        if not is_new(sizes, self._evaluated_sizes):
            return
        if not other:
            # It is that of the trace, unless the graph was kept by another start.
            with decisions.not_noted():
                cache.judged(self._wrapped, lambda: not self._evaluates(batch))
            return
        made = resized(other, batch)
        with decisions.not_noted():
            if made is None or self._evaluates(batch) or not self._evaluation_graphs.add(sizes):
                return
            # The first one exports.
            if self._evaluates(made) and self._evaluates(batch):
                _tell("evaluated", batch)
            else:
                self._evaluation_graphs.drop(sizes)

    def _evaluates(self, batch: Batch) -> bool:
        """Whether the graph in use gives the loss of a batch in evaluation mode."""
        try:
            return evaluation_error(self._wrapped, self._task, self._precision, batch) is None
        except Exception:
            # The forward that follows says it.
            return False

    def close(self) -> None:
        """Ends the sessions of all graphs but the first ones."""
        self._graphs.close()
        self._evaluation_graphs.close()


def shapes(batch: Batch) -> str:
    """Says the sizes of a batch."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named(batch).items())


def _tell(done: str, batch: Batch) -> None:
    print(f"ONNX Runtime has a graph of its own for batches of {shapes(batch)} that are {done}: forward goes by sizes")
