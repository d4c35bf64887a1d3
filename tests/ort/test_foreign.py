"""Families of transformers through ``ortlaunch check``; ``tests/ort/families.md`` shows the verdicts."""

from __future__ import annotations

import pytest

from tests.ort.foreign import BY_NAME, FOREIGN
from tests.ort.foreign_table import TABLE, Row, checked, read, row_of

LEAST = 38
"""Families that must be fit."""


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.family: row for row in read(TABLE)}


def test_the_table_tells_of_forty_families_of_every_kind(rows: dict[str, Row]) -> None:
    assert set(rows) == set(BY_NAME)
    assert len(rows) >= 40
    kinds = {"decoder", "mixture of experts", "state space", "encoder", "encoder-decoder", "vision", "audio"}
    assert kinds <= {row.kind for row in rows.values()}


def test_nearly_all_are_fit_and_the_others_are_refused_for_a_reason(rows: dict[str, Row]) -> None:
    verdicts = [row.verdict for row in rows.values()]
    assert set(verdicts) <= {"fit", "refused"}
    assert verdicts.count("fit") >= LEAST
    assert all(row.note for row in rows.values() if row.verdict == "refused")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_each_family_gets_the_verdict_of_the_table(rows: dict[str, Row]) -> None:
    now = {family.name: row_of(family, outcome) for family, outcome in checked(FOREIGN)}
    assert {name: row.verdict for name, row in now.items()} == {name: row.verdict for name, row in rows.items()}
