"""The loss has other gradients than in PyTorch: an operator is differentiated wrongly, or the export lost a hook."""

from __future__ import annotations

from ortlaunch.ort.verify.examination import Examination
from ortlaunch.ort.verify.trap import trap


@trap("wrong_gradients", "Change that part of the model")
def look(examination: Examination) -> str | None:
    if examination.strayed is not None or examination.is_random:
        return None
    return examination.gradient_error
