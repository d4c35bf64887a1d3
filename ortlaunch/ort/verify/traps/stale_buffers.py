"""Buffers that move in PyTorch, as BatchNorm's statistics do, stay as they are or get other values."""

from __future__ import annotations

from ortlaunch.ort.verify.examination import Examination
from ortlaunch.ort.verify.trap import trap


@trap(
    "stale_buffers", "Change it by operators alone, or take a layer without running statistics (GroupNorm, LayerNorm)"
)
def look(examination: Examination) -> str | None:
    if not examination.moved:
        return None
    what, stale = examination.errors.buffers, sorted(examination.stale)
    if stale:
        others = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
        what = (
            f"the model's buffer {stale[0]}{others} moves with every batch in PyTorch and stays as it is under ONNX "
            "Runtime, so evaluation would use statistics of no batch"
        )
    if what is None:
        return None
    return what + examination.where(examination.decisions_that_differ(examination.batches[-1]))
