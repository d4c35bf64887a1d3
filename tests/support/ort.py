"""Tests of ``backend=ort`` in a Python that has no onnxruntime-training."""

from __future__ import annotations

from typing import Any

import pytest

from ortlaunch.config import backends

MISSING = backends.why_no_ort("this test")
"""Why such tests are skipped; None where they run."""


def runnable(table: dict[str, Any]) -> dict[str, Any]:
    """Returns those runs of a table that this Python can make."""
    return {name: words for name, words in table.items() if MISSING is None or "backend=ort" not in str(words)}


class WithoutOrt(pytest.Module):
    """A file of tests that is skipped as a whole, because its imports need onnxruntime-training."""

    def collect(self) -> list[pytest.Item]:  # type: ignore[override]
        pytest.skip(str(MISSING), allow_module_level=True)


def pretend_ort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets requests with ``backend=ort`` be composed and checked in each Python, as if it were installed."""
    # Several modules hold `why_no_ort` by their own name; all of them come here.
    monkeypatch.setattr(backends, "_absence", lambda: None)


def pretend_no_ort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process take ONNX Runtime for absent, as it is in Python 3.12."""
    monkeypatch.setattr(backends, "_absence", lambda: "which is not here")
