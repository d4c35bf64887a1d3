"""Named figures of several workers, packed into one collective."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ortlaunch.trainer.figures import Figures
from ortlaunch.trainer.workers import Workers


@dataclass(frozen=True)
class Sample(Figures):
    loss: torch.Tensor
    system: torch.Tensor
    seconds: torch.Tensor


@dataclass(frozen=True)
class Pair(Workers):
    """Two workers; the second one's figures are ten times the first one's."""

    def gather(self, values: list[float]) -> torch.Tensor:
        COLLECTIVES.append(values)
        return torch.tensor([values, [10.0 * value for value in values]], dtype=torch.float64)


COLLECTIVES: list[list[float]] = []


def test_every_figure_keeps_its_name_and_its_workers() -> None:
    COLLECTIVES.clear()
    # The order of the keywords does not matter.
    mine = Sample.of(seconds=4, loss=1.0, system=[2.0, 3.0])
    everyone = mine.gather(Pair(0, 2, torch.device("cpu"), threads=1))
    assert len(COLLECTIVES) == 1
    assert everyone.loss.tolist() == [1.0, 10.0]
    assert everyone.system.tolist() == [[2.0, 3.0], [20.0, 30.0]]
    assert everyone.seconds.tolist() == [4.0, 40.0]


def test_a_single_worker_gets_its_own_figures_with_all_their_digits() -> None:
    mine = Sample.of(loss=0.1, system=[float("nan")], seconds=1e-17)
    everyone = mine.gather(Workers(0, 1, torch.device("cpu"), threads=1))
    assert everyone.loss.tolist() == [0.1]
    assert everyone.seconds.tolist() == [1e-17]
    assert everyone.system.shape == (1, 1) and everyone.system.isnan().all()
