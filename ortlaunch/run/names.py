"""The tags that identify runs in a tracking server."""

from __future__ import annotations

RUN_ID_TAG = "ortlaunch.run_id"
SWEEP_TAG = "ortlaunch.sweep"
"""The folder of the sweep that a run belongs to."""
KIND_TAG = "ortlaunch.kind"
"""Has the value `sweep` on the parent run of a sweep, which trains nothing itself."""
CHANGED_PARAM = "ortlaunch.changed."
"""Followed by a parameter's key: the value that a later attempt gave it. MLflow never changes a parameter."""
