"""Exports the model and compares the exported graph with PyTorch on other data."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.check.operators import unsupported_operators
from ortlaunch.check.report import Effect, Export, Probe, Refused, TracedStatement
from ortlaunch.config.schema import OrtConfig
from ortlaunch.data.batch import IDS, Batch, count, is_flat, joined, named, part
from ortlaunch.models.task import Task
from ortlaunch.ort import session
from ortlaunch.ort.refusal import last_line
from ortlaunch.ort.source import SourceLine, location
from ortlaunch.ort.verify.fitting import Fitting
from ortlaunch.ort.verify.gap import widest
from ortlaunch.ort.verify.pair import Context, Decisions, Pair, changed_decisions
from ortlaunch.ort.verify.start import FRESH_BATCHES
from ortlaunch.ort.verify.state import ModelState
from ortlaunch.ort.verify.trace import TraceWarning, trace_warnings

_TRIES = 8
"""Passes over the same batch with which random decisions are detected."""


@dataclass(frozen=True)
class Setting:
    """Settings that all parts of the check share."""

    task: Task
    precision: Context
    backend: OrtConfig
    """The backend, with fallback=error and without the export cache."""
    threads: int
    seed: int

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wraps a copy of `model` in an ORTModule that saves no graphs."""
        return session.wrap(copy.deepcopy(model), self.backend, threads=self.threads, onnx_dir=None)


@dataclass(frozen=True)
class _Outcome:
    """A probe, and the decisions that PyTorch's forward took on its data."""

    probe: Probe
    batch: Batch
    decisions: Decisions


def check_export(model: torch.nn.Module, batches: list[Batch], setting: Setting) -> tuple[Export, torch.nn.Module]:
    """Exports a copy of the model as a run would, dropout included, and compares the graph with PyTorch on other data.

    Args:
        model: the plain model; it is not changed.
        batches: the first one is traced, and the others are new data.
        setting: settings of the check.

    Returns:
        The findings, and the ORTModule.
    """
    wrapped = setting.wrap(model)
    try:
        with trace_warnings() as warned, setting.precision():
            setting.task.outputs(wrapped, batches[0])
    except Exception as error:
        return _failed(model, batches[0], setting, error, warned), wrapped
    found = Export("ok", succeeded=True, seconds=session.export_seconds(wrapped))
    pair = Pair(wrapped, setting.task, setting.precision, ModelState(session.plain_model(wrapped)))
    found.comparable = not pair.is_random(batches[0]) or pair.hold_chance(batches[0])
    fitting = Fitting(wrapped, setting.task, setting.precision)
    found.refused = _refused(fitting, batches, setting, warned)
    outcomes = _probe(pair, batches) if found.comparable else []
    outcomes = [outcome if found.refused else _fitted(fitting, outcome) for outcome in outcomes]
    fitting.use(batches[0])
    found.probes = [outcome.probe for outcome in outcomes]
    chance = pair.chance_decisions(batches[0], _TRIES)
    traced = pair.eager(batches[0])[1]
    found.tracer_warnings = [_judged(one, traced, outcomes, chance) for one in warned]
    effects = {one.effect for one in found.tracer_warnings}
    if found.refused or any(probe.differs for probe in found.probes) or "decided_by_chance" in effects:
        found.status = "failed"
    elif not found.comparable or "decides_otherwise" in effects:
        found.status = "warning"
    return found, wrapped


def _refused(fitting: Fitting, batches: list[Batch], setting: Setting, warned: list[TraceWarning]) -> list[Refused]:
    try:
        found = fitting.findings(batches[: 1 + FRESH_BATCHES], warned)
    except RequestError as error:
        return [Refused("error", str(error), "change what it names in the model")]
    return [Refused(one.kind.value, one.what, one.advice) for one in found if one.kind not in setting.backend.allow]


def _failed(
    model: torch.nn.Module, batch: Batch, setting: Setting, error: Exception, warned: list[TraceWarning]
) -> Export:
    text = str(error)
    opset = session.opset()
    return Export(
        "failed",
        error=last_line(text) or type(error).__name__,
        unsupported_operators=unsupported_operators(copy.deepcopy(model), setting.task, batch, opset, text),
        tracer_warnings=[TracedStatement(one.location, one.statement, one.message, "none") for one in warned],
    )


def _probe(pair: Pair, batches: list[Batch]) -> list[_Outcome]:
    probes: list[tuple[str, Batch]] = [("fresh_data", batch) for batch in batches[1:]]
    probes += [("batch_size", batch) for batch in _other_batch_sizes(batches)]
    probes += [("sequence_length", batch) for batch in _other_lengths(batches)]
    outcomes = [_try(pair, kind, batch) for kind, batch in probes]
    return [outcome for outcome in outcomes if outcome is not None]


def _try(pair: Pair, kind: str, batch: Batch) -> _Outcome | None:
    shape = list(next(iter(named(batch).values())).shape)
    try:
        expected, decisions = pair.eager(batch)
    except Exception:
        # PyTorch fails as well, for example on a sequence longer than the model's positions.
        return None
    try:
        gap = widest(pair.exported(batch), expected)
    except Exception as error:
        probe = Probe(kind, shape, True, None, None, last_line(str(error)))  # type: ignore[arg-type]
    else:
        probe = Probe(kind, shape, gap.differs, gap.name, gap.error)  # type: ignore[arg-type]
    return _Outcome(probe, batch, decisions)


def _fitted(fitting: Fitting, outcome: _Outcome) -> _Outcome:
    """An outcome with the graph that a run would make for the sizes of its batch, where the first one is not right."""
    if not outcome.probe.differs or outcome.probe.kind == "fresh_data" or not fitting.add([outcome.batch]):
        return outcome
    return replace(outcome, probe=replace(outcome.probe, differs=False, error=None, message=None, own_graph=True))


def _other_batch_sizes(batches: list[Batch]) -> list[Batch]:
    size = count(batches[0])
    others = [part(batches[0], 0, size - 1) if size > 1 else None, joined(batches[0], batches[1])]
    return [one for one in others if one is not None]


def _other_lengths(batches: list[Batch]) -> list[Batch]:
    # Of own data nobody knows which dimensions are a length.
    if not is_flat(batches[0]) or IDS not in batches[0] or any(one.ndim != 2 for one in batches[0].values()):
        return []
    length = batches[0][IDS].shape[1]
    longer = {
        name: torch.cat([tensor, batches[1][name][:, : length // 2]], dim=1) for name, tensor in batches[0].items()
    }
    shorter = [{name: tensor[:, :cut] for name, tensor in batches[0].items()} for cut in (length // 2, length - 1)]
    return [*shorter, longer]


def _judged(
    warning: TraceWarning, traced: Decisions, outcomes: list[_Outcome], chance: set[SourceLine]
) -> TracedStatement:
    return TracedStatement(
        location(warning.place),
        warning.statement,
        warning.message,
        _effect(warning.place, traced, outcomes, chance),
    )


def _effect(place: SourceLine, traced: Decisions, outcomes: list[_Outcome], chance: set[SourceLine]) -> Effect:
    if place in chance:
        return "decided_by_chance"
    otherwise = [outcome for outcome in outcomes if place in changed_decisions(traced, outcome.decisions)]
    if any(outcome.probe.differs for outcome in otherwise):
        return "changes_outputs"
    if otherwise:
        return "decides_otherwise"
    # Outside a trace, sizes are plain numbers, so a decision on a size is not recorded. Only the outputs can show it.
    looked_at_a_size = place not in traced
    unexplained = [outcome for outcome in outcomes if outcome.probe.differs and outcome.probe.kind != "fresh_data"]
    return "changes_outputs" if looked_at_a_size and unexplained else "none"
