"""Forward changes a value of Python that its results depend on, such as a counter, which the export keeps."""

from __future__ import annotations

from ortlaunch.ort.verify.examination import Examination
from ortlaunch.ort.verify.trap import trap


@trap("python_state", "Keep it in a buffer, or pass it to forward as a tensor")
def look(examination: Examination) -> str | None:
    if examination.draws_elsewhere:
        return (
            "forward draws random numbers of Python or NumPy, and under ONNX Runtime they stay those of the trace "
            "(torch's own are drawn anew)"
        )
    change = examination.python_change
    if change is None:
        return None
    return (
        f"each forward changes {change.where} in PyTorch (from {change.before} to {change.after}), and under ONNX "
        "Runtime it keeps the value that it had when the graph was traced"
    )
