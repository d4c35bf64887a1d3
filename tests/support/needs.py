"""What some tests need of the machine."""

from __future__ import annotations

import os

import pytest


def needs(found: object, reason: str) -> None:
    """Skips the test, with the reason, where something is missing; in CI nothing may be.

    Args:
        found: whether it is there.
        reason: what is missing.
    """
    if not found:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
