"""The loss has other gradients than in PyTorch: an operator is differentiated wrongly, or the export lost a hook."""

from __future__ import annotations

from ortlaunch.ort.verify.examination import Examination
from ortlaunch.ort.verify.trap import trap


@trap("wrong_gradients", "Change that part of the model")
def look(examination: Examination) -> str | None:
    if examination.strayed is not None:
        return None
    if examination.is_random:
        # They must exist at least.
        examination.compute_gradients()
        return None
    what, batch = examination.errors.gradients, examination.batches[-1]
    return what and what + examination.where(examination.decisions_that_differ(batch))
