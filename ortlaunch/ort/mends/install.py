"""Installs all corrections of ORTModule together."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ortlaunch.models import modes
from ortlaunch.ort import cache
from ortlaunch.ort.mends import (
    buffers,
    checkpoints,
    copying,
    decisions,
    densities,
    failed_calls,
    failed_export,
    fast_paths,
    forwards,
    functions,
    generators,
    gradients,
    guard,
    outputs,
    padding,
    randomness,
    returned,
    scripts,
    side_effects,
    statistics,
    sums,
    truths,
    unneeded,
    untraceable,
    views,
    written_out,
)
from ortlaunch.ort.verify.reference import NotesRates


@dataclass
class _Export:
    """A graph that is being made."""

    flags: list[bool]
    """The modes of the model's modules."""
    trains: bool
    reads: decisions.Reads = field(default_factory=decisions.Reads)
    """Where the trace has read tensors' values."""
    watches: bool = True
    """Whether the graph is to return what was read."""
    moved: list[str] = field(default_factory=list)
    """The buffers that the trace has changed."""
    constants: list[str] = field(default_factory=list)
    """Those that it has changed although they are constants of the graph."""
    rates: list[float] = field(default_factory=list)
    """The rates of dropout in the trace."""


_exports: ContextVar[_Export | None] = ContextVar("_exports", default=None)


def install() -> None:
    """Corrects this process's ORTModule; repeated calls do nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._io import _FlattenedModule

    cache.install()
    gradients.install()
    statistics.register()
    outputs.install()
    copying.install()
    densities.install()
    forwards.install()
    randomness.install()
    guard.install()
    padding.register_gradients()
    returned.install()
    sums.install()
    unneeded.install()
    if hasattr(_FlattenedModule, "_ortlaunch_forward"):
        return
    original_forward, original_export = _FlattenedModule.forward, GraphTransitionManager._get_exported_model

    def forward(self: Any, *args: Any) -> list[Tensor]:
        """Runs the model's forward, which ORTModule calls to find the outputs and then to trace the model."""
        current = _exports.get()
        is_training = current is not None and current.trains
        if current is not None and current.trains:
            # The exporter has set all modules to train mode, including those in eval mode.
            modes.set_modes(self._original_module, current.flags)
        tracked = gradients.tracked() if is_training else contextlib.nullcontext()
        refusing = side_effects.RefusesSideEffects(self._original_module) if is_training else contextlib.nullcontext()
        # The trace sees the buffers as the step finds them.
        is_traced = torch._C._get_tracing_state() is not None
        restored = contextlib.nullcontext() if is_traced else buffers.restored(self._original_module)
        with (
            restored,
            checkpoints.without_reentrance(),
            tracked,
            refusing,
            fast_paths.off(),
            untraceable.replaced(),
            generators.RefusesOwnGenerators(),
            generators.seeding_refused(),
            failed_calls.TracesOn(),
            truths.TakesTruths(),
            written_out.WritesOut(self._original_module),
            buffers.collected(self._original_module) as moved,
            statistics.collected(self._original_module, is_training) as (names, batch_statistics),
            decisions.collected(current is not None and current.watches) as reads,
            NotesRates() as noted,
        ):
            flat = original_forward(self, *args)
        if current is not None:
            current.reads, current.moved, current.constants = reads, moved.names, moved.constants
            current.rates = noted.rates
        # ORTModule also makes a graph for inference of a model in train mode, if gradients are off.
        names, batch_statistics = (names, batch_statistics) if is_training else ([], [])
        self._output_schema = outputs.Outputs(self._output_schema, [x.dtype for x in flat], names)
        return [*flat, *batch_statistics, *moved.values, *reads.tensors]

    def exported(current: _Export, arguments: dict[str, Any]) -> Any:
        try:
            return cache.export(failed_export.with_lines(original_export), arguments)
        except Exception:
            if not current.reads.tensors or not current.watches:
                raise
            # What was read may come from operators that cannot be exported, and that the outputs do not need.
            current.watches = False
            return cache.export(failed_export.with_lines(original_export), arguments)

    def export(*, flattened_module: Any, model_info_for_export: Any, **rest: Any) -> Any:
        is_training = model_info_for_export.export_mode == torch.onnx.TrainingMode.TRAINING
        model = flattened_module._original_module
        scripts.refuse_modules(model)
        with (
            modes.kept(model) as flags,
            modes.only_set(model),
            buffers.restored(model),
            functions.watched(),
            views.followed(),
            scripts.branches_refused(),
            failed_export.noted(),
        ):
            current = _Export(flags, is_training)
            token = _exports.set(current)
            arguments = {"flattened_module": flattened_module, "model_info_for_export": model_info_for_export, **rest}
            try:
                with buffers.as_inputs(model, buffers.moved_constants(model)):
                    graph, schema = exported(current, arguments)
                if current.constants:
                    with buffers.restored(model), buffers.as_inputs(model, current.constants):
                        graph, schema = exported(current, arguments)
            finally:
                _exports.reset(token)
        # The schema is that of a forward before the trace, which does not know on what the trace depends.
        schema.buffers = current.moved
        schema.decisions = current.reads.decisions(evaluates=not is_training)
        schema.rates = current.rates
        return graph, schema

    _FlattenedModule.forward = _FlattenedModule._ortlaunch_forward = forward
    GraphTransitionManager._get_exported_model = staticmethod(export)
