"""Forward changes parameters in place: ``Embedding(max_norm)``, weights that it clamps or rescales."""

from __future__ import annotations

from ortlaunch.ort.verify.examination import Examination
from ortlaunch.ort.verify.trace import location
from ortlaunch.ort.verify.trap import trap


@trap("changed_parameters", "Change weights outside forward, or compute with a changed copy of them")
def look(examination: Examination) -> str | None:
    writes = examination.parameter_writes
    if not writes:
        return None
    first = writes[0]
    others = f" and {len(writes) - 1} more" if len(writes) > 1 else ""
    what = f"forward changes the parameter {first.parameter}{others} in PyTorch"
    return f"{what} ({first.operator} at {location(first.place)}), and it stays as it is under ONNX Runtime"
