"""The rules of ``backend=ort`` are the same in each Python; `test_backends.py` has those of a Python without it."""

from __future__ import annotations

import pytest

from tests.support.ort import pretend_ort


@pytest.fixture(autouse=True)
def ort_as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_ort(monkeypatch)
