"""Named figures of several workers, packed into one collective."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
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
    pair = Pair(0, 2, torch.device("cpu"), threads=1)
    everyone = Sample.gathered(pair, seconds=4, loss=1.0, system=[2.0, 3.0])
    assert len(COLLECTIVES) == 1
    assert everyone.loss.tolist() == [1.0, 10.0]
    assert everyone.system.tolist() == [[2.0, 3.0], [20.0, 30.0]]
    assert everyone.seconds.tolist() == [4.0, 40.0]


def test_a_single_worker_gets_its_own_figures_with_all_their_digits() -> None:
    alone = Workers(0, 1, torch.device("cpu"), threads=1)
    everyone = Sample.gathered(alone, loss=0.1, system=[float("nan")], seconds=1e-17)
    assert everyone.loss.tolist() == [0.1]
    assert everyone.seconds.tolist() == [1e-17]
    assert everyone.system.shape == (1, 1) and everyone.system.isnan().all()


def test_a_figure_that_is_missing_or_unknown_is_an_error() -> None:
    alone = Workers(0, 1, torch.device("cpu"), threads=1)
    with pytest.raises(KeyError, match="seconds"):
        Sample.gathered(alone, loss=0.1, system=[1.0])
    with pytest.raises(TypeError, match="Sample has no typo"):
        Sample.gathered(alone, loss=0.1, system=[1.0], seconds=1.0, typo=1.0)
