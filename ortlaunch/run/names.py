"""The tags that identify runs in a tracking server."""

from __future__ import annotations

RUN_ID_TAG = "ortlaunch.run_id"
SWEEP_TAG = "ortlaunch.sweep"
"""The folder of the sweep that a run belongs to."""
KIND_TAG = "ortlaunch.kind"
"""Has the value `sweep` on the parent run of a sweep, which trains nothing itself."""
CHANGED_PARAM = "ortlaunch.changed."
"""With a parameter's key behind it: the value that a later attempt of the run gave it. MLflow never changes a parameter."""
