"""Buffers that move in PyTorch, as BatchNorm's statistics do, stay as they are or get other values."""

from __future__ import annotations

import torch

from ortlaunch.ort.verify.examination import WIDER, Examination
from ortlaunch.ort.verify.gap import Gap, widest
from ortlaunch.ort.verify.nested import NamedTensors
from ortlaunch.ort.verify.trap import trap


@trap("stale_buffers", "Take a layer without running statistics (GroupNorm, LayerNorm)")
def look(examination: Examination) -> str | None:
    if not examination.moved:
        return None
    batch = examination.batches[-1]
    expected, dropped = examination.buffers_in_pytorch(batch)
    actual, moved = examination.buffers_under_ort(batch)
    wrong = sorted(examination.moved - moved)
    what = "moves with every batch in PyTorch and stays as it is under ONNX Runtime"
    if not wrong and not dropped:
        # If dropout affects the buffer, its values cannot be compared.
        gaps = {name: _gap(name, actual, expected) for name in sorted(examination.moved)}
        wrong = [name for name, gap in gaps.items() if gap.exceeds(WIDER * gap.tolerance)]
        what = "gets other values under ONNX Runtime than in PyTorch"
    if not wrong:
        return None
    others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"the model's buffer {wrong[0]}{others} {what}, so evaluation would use statistics of no batch"


def _gap(name: str, actual: NamedTensors, expected: NamedTensors) -> Gap:
    """Returns the error of a buffer; that of a running mean is relative to the standard deviation where that is larger.

    Behind another normalization the mean is zero but for rounding.
    """
    head, _, last = name.rpartition("running_mean")
    variance = expected.get(f"{head}running_var")
    if last or variance is None or actual[name].shape != variance.shape:
        return widest({name: actual[name]}, {name: expected[name]})
    deviation = variance.sqrt()
    return widest(
        {name: torch.cat([actual[name], deviation])},
        {name: torch.cat([expected[name], deviation])},
    )
