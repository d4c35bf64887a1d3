"""What the first batch decided stays decided, and other batches get other outputs than in PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

from ortlaunch.ort.source import SourceLine
from ortlaunch.ort.verify.examination import Examination
from ortlaunch.ort.verify.trap import trap


@trap("frozen_branch", "Write it without looking at values from Python (torch.where)")
def look(examination: Examination) -> str | None:
    if examination.strayed is None:
        return None
    batch, gap = examination.strayed
    if examination.is_random:
        # Random outputs cannot be compared. Random decisions are frozen by the export nevertheless.
        places = examination.decisions_by_chance()
        what = "what chance decides in PyTorch is decided once for all"
        return _said(what, places, examination) if places else None
    if examination.wrong_when_traced is not None:
        return None
    what = f"the outputs for other batches, weights or buffers than those of the trace are not PyTorch's ({gap})"
    return _said(what, examination.decisions_that_differ(batch), examination)


def _said(what: str, places: Iterable[SourceLine], examination: Examination) -> str:
    return f"under ONNX Runtime {what}{examination.where(places)}"
