"""The replay of the search on a measured grid, with a grid that is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ortlaunch.launch.trial import Outcome
from tests.benchmarks import tune_grids
from tests.benchmarks.tune_grids import MOST_CELLS, ROUNDS, Grid
from tests.support.ort import pretend_ort

SPEEDS = {"eager": 1.0, "compile": 1.3, "ort": 2.0}


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grid:
    """The grid of mlp, in which ort with the largest micro-batch is the fastest and compile fails."""
    pretend_ort(monkeypatch)
    monkeypatch.setattr(tune_grids, "_FOLDER", tmp_path)
    monkeypatch.setattr(tune_grids, "CLOSE_ROUNDS", ROUNDS)
    space = Grid.of("mlp").space
    cells = {}
    for cell in space.cells:
        slower = 0.8 if cell["checkpointing"] == "on" else 1.0
        rate = 100.0 * SPEEDS[str(cell["backend"])] * int(cell["micro_batch"]) * slower
        good = [Outcome("ok", 10.0, rate=rate * factor).to_json() for factor in (0.99, 1.0, 1.01)]
        bad = [Outcome("failed", 5.0, reason="made to fail").to_json()] * 3
        kept = bad if cell["backend"] == "compile" else good
        cells[str(cell)] = [{**one, "trained_seconds": 3.0, "others": 0.0} for one in kept[:ROUNDS]]
    (tmp_path / "mlp.json").write_text(json.dumps({"cells": cells}))
    return Grid.of("mlp")


def test_what_is_missing_of_a_grid_is_known(grid: Grid) -> None:
    assert list(grid.missing()) == []
    cell = grid.space.cells[3]
    grid.measured[str(cell)].pop()
    assert list(grid.missing()) == [(ROUNDS - 1, cell)]
    assert len(grid.space.cells) <= MOST_CELLS


def test_cells_near_the_best_have_further_rounds(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_grids, "CLOSE_ROUNDS", ROUNDS + 1)
    missing = list(grid.missing())
    assert {number for number, _ in missing} == {ROUNDS}
    cells = [cell for _, cell in missing]
    assert cells == grid.close()
    assert grid.best() in cells
    assert all(grid.score(cell) >= 0.9 * grid.score(grid.best()) for cell in cells)
    assert len(cells) < len(grid.space.cells) / 4


@pytest.mark.parametrize("facts", [{"others": 0.3}, {"trained_seconds": 0.02}])
def test_a_trial_of_a_busy_machine_or_of_few_steps_is_measured_again(grid: Grid, facts: dict[str, float]) -> None:
    kept = grid.measured[str(grid.best())]
    kept[0].update(facts)
    path = tune_grids._path("mlp")
    path.write_text(json.dumps({"cells": grid.measured}))
    assert list(Grid.of("mlp").missing()) == [(ROUNDS - 1, grid.best())]


def test_a_replayed_search_finds_the_best_for_a_part_of_the_cost(grid: Grid) -> None:
    assert (grid.best()["backend"], grid.best()["micro_batch"]) == ("ort", 8)
    assert 0.005 < grid.noise() < 0.02
    found = grid.replayed(1, 0.3 * grid.seconds())
    assert found.share > 0.97
    assert found.is_inside
    assert not found.is_best_pruned
    assert 0 < found.cost <= 0.4


def test_a_best_cell_that_a_rule_left_out_is_told(grid: Grid) -> None:
    for text, kept in grid.measured.items():
        # What recomputes is never tried where the same without it fits.
        factor = 10.0 if "checkpointing=on" in text else 1.0
        for one in kept:
            one["rate"] *= factor
    found = grid.replayed(1, 0.3 * grid.seconds())
    assert found.is_best_pruned
    assert found.is_loss
    assert found.share < 0.5


def test_a_best_cell_that_is_as_fast_as_the_one_that_a_rule_kept_is_no_loss(grid: Grid) -> None:
    # Under ONNX Runtime both are nearly the same graph, and the better of two noisy figures is either of them.
    for text, kept in grid.measured.items():
        factor = 1.2505 if "checkpointing=on" in text else 1.0
        for one in kept:
            one["rate"] *= factor
    assert grid.best()["checkpointing"] == "on"
    found = grid.replayed(1, 0.3 * grid.seconds())
    assert (found.is_best_pruned, found.is_loss) == (True, False)
    assert found.share > 0.99
