"""Derives the one-line verdict, which says which backend to use or what to change."""

from __future__ import annotations

from ortlaunch.base.text import counted
from ortlaunch.check.report import Cost, Export, Parity, Randomness, Structure
from ortlaunch.ort.verify.comparison import TensorComparison


def verdict(
    structure: Structure,
    export: Export | None,
    parity: Parity | None,
    randomness: Randomness | None,
    cost: Cost | None,
) -> tuple[bool, str]:
    """Returns whether the model is fit for ONNX Runtime, and the line."""
    if structure.problems:
        return False, f"change the model: {structure.problems[0]}"
    reason = _export_reason(export) or _parity_reason(parity) or _randomness_reason(randomness) or _start_reason(export)
    if reason is not None:
        why, remedy = reason
        return False, f"use backend={_best(cost, without_ort=True)} because {why}; or {remedy}"
    return True, _fit(cost)


def _export_reason(export: Export | None) -> tuple[str, str] | None:
    if export is None:
        return "the export was not reached", "run the check again"
    if export.unsupported_operators:
        first = export.unsupported_operators[0]
        where = f" ({first.module or 'the model itself'}{', ' + first.location if first.location else ''})"
        more = len(export.unsupported_operators) - 1
        others = f" and {more} more" if more else ""
        return (
            f"ONNX Runtime has no {first.name}{where}{others}",
            "write it with other operators",
        )
    if not export.succeeded:
        return f"the export fails: {export.error}", "change what it names in the model"
    culprits = [one for one in export.tracer_warnings if one.effect in ("changes_outputs", "decided_by_chance")]
    if culprits:
        one = culprits[0]
        return f"`{one.statement}` at {one.location} is frozen by the export", "write it with torch.where"
    broken = next((probe for probe in export.probes if probe.differs), None)
    if broken is not None:
        return (
            f"the outputs differ from PyTorch's on {broken.kind.replace('_', ' ')} {broken.shape}",
            "find what in the model depends on it",
        )
    if not export.comparable:
        return (
            "its outputs are random with dropout off too, so that nothing can be compared",
            "check it with that randomness switched off",
        )
    return None


def _parity_reason(parity: Parity | None) -> tuple[str, str] | None:
    if parity is None:
        return "parity was not reached", "run the check again"
    if parity.error is not None:
        return f"training fails under ONNX Runtime: {parity.error}", "change what it names in the model"
    if parity.stale_buffers:
        count = len(parity.stale_buffers)
        return (
            f"{counted(count, 'buffer')} ({parity.stale_buffers[0]}) would not move under ONNX Runtime",
            "change to a layer without running statistics (GroupNorm, LayerNorm) in the model",
        )
    groups = {
        "loss": parity.loss,
        "outputs": parity.outputs,
        "gradients": parity.gradients,
        "parameters": parity.parameters,
        "buffers": parity.buffers,
    }
    for name, group in groups.items():
        if group is not None and not group.ok:
            return f"the {name} are not PyTorch's: {_what(group)}", "change that part of the model"
    return None


def _what(group: TensorComparison) -> str:
    if group.differing:
        one = group.differing[0]
        amount = "not comparable" if one.error is None else f"relative error {one.error:.1e}"
        return f"{one.name}, {amount}, tolerance {one.tolerance:.0e}"
    name, (expected, actual) = next(iter(group.dtypes.items()))
    return f"{name} is {actual} instead of {expected}"


def _randomness_reason(randomness: Randomness | None) -> tuple[str, str] | None:
    if randomness is None:
        return "randomness was not reached", "run the check again"
    if randomness.problems:
        return randomness.problems[0], "change where the model draws random numbers"
    return None


def _start_reason(export: Export | None) -> tuple[str, str] | None:
    if export is None or not export.refused:
        return None
    first = export.refused[0]
    return first.what, f"{first.advice[0].lower()}{first.advice[1:]}"


def _fit(cost: Cost | None) -> str:
    if cost is None or cost.backends["ort"].step_seconds is None or cost.backends["eager"].step_seconds is None:
        return "use backend=ort: it computes what PyTorch computes (its cost was not measured)"
    ort, eager = cost.backends["ort"].step_seconds, cost.backends["eager"].step_seconds
    best = _best(cost, without_ort=False)
    ratio = f"{ort / eager:.2f} of eager's step time"
    if best == "ort":
        return (
            f"use backend=ort: the same results, {ratio}, its export paid for after {cost.pays_off_after_steps} steps"
        )
    pays = "never pays" if cost.pays_off_after_steps is None else f"pays after {cost.pays_off_after_steps} steps"
    return (
        f"backend=ort gives the same results ({ratio}, its export {pays}); use backend={best} because it is faster here"
    )


def _best(cost: Cost | None, *, without_ort: bool) -> str:
    """Returns the backend with the shortest step, or eager if nothing was measured."""
    if cost is None:
        return "eager"
    known = {
        name: one.step_seconds
        for name, one in cost.backends.items()
        if one.step_seconds is not None and not (without_ort and name == "ort")
    }
    return min(known, key=lambda name: known[name]) if known else "eager"
