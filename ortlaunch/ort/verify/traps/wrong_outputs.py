"""The outputs are others than PyTorch's already for the batch that the model was exported with."""

from __future__ import annotations

from ortlaunch.ort.verify.examination import Examination
from ortlaunch.ort.verify.trap import trap


@trap("wrong_outputs", "Find the part of it that is exported wrongly")
def look(examination: Examination) -> str | None:
    if examination.strayed is None or examination.is_random or examination.wrong_when_traced is None:
        return None
    return f"under ONNX Runtime the model's outputs are not PyTorch's ({examination.wrong_when_traced})"
