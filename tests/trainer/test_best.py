"""Which evaluation is the best one, and when a run gives up."""

from __future__ import annotations

import math

from ortlaunch.trainer.best import BestSoFar

KNOWN = {"eval/loss": False, "eval/accuracy": True, "eval/likeness": None}


def course(best: BestSoFar, *values: float) -> list[bool]:
    """Whether each evaluation is better than all before it."""
    found = []
    for value in values:
        best.take(dict.fromkeys(KNOWN, value))
        found.append(best.is_better)
    return found


def test_on_a_tie_the_earlier_is_the_best_and_what_is_no_number_is_none() -> None:
    assert course(BestSoFar("eval/accuracy", None, KNOWN, {}), 0.5, 0.5, 0.6, 0.4) == [True, False, True, False]
    assert course(BestSoFar(None, None, KNOWN, {}), math.nan, 2.0, math.nan, 1.0) == [False, True, False, True]
    assert course(BestSoFar("eval/likeness:min", None, KNOWN, {}), 2.0, 3.0, 1.0) == [True, False, True]


def test_patience_counts_on_after_a_resume_and_begins_anew_for_another_value() -> None:
    best = BestSoFar("eval/accuracy", 3, KNOWN, {})
    course(best, 0.5, 0.4, 0.3)
    assert not best.gives_up
    for asked, gives_up in (("eval/accuracy", True), ("eval/accuracy:min", False)):
        again = BestSoFar(asked, 3, KNOWN, best.state())
        course(again, 0.45)
        assert again.gives_up is gives_up
