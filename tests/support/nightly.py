"""Cases of one kind of which CI runs the first ones, and ``make test-nightly`` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_in_ci(cases: Iterable[Any], count: int) -> list[Any]:
    """Returns the cases as parameters; those after the first `count` run at night only."""
    return [
        case if index < count else pytest.param(case, marks=pytest.mark.nightly) for index, case in enumerate(cases)
    ]
