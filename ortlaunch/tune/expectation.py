"""What the trials so far predict for cells that were not tried: a Gaussian process over the axes.

Two cells are alike on an axis if they have the same value; values of a numeric axis are also alike if they are near
each other. The process is a sum of effects of single axes, of pairs of axes and of all axes together. How much of each,
and how near is near, is what makes the scores so far most likely. It works on the logarithm of the score. Whether a
cell trains at all is learned in the same way, from all trials.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortlaunch.tune.cell import Cell

_SHARES = ((0.8, 0.15, 0.05), (0.5, 0.4, 0.1), (0.25, 0.6, 0.15), (0.2, 0.3, 0.5))
"""Shares of the variance: of single axes, of pairs, of all axes together."""
_NEAR = (1.5, 4.0)
"""Distances, in ranks of a numeric axis, at which its values begin to differ."""
_NOISE = (0.03, 0.1)
"""Standard deviations of a trial's logarithm."""
_OF_FAILURES = (0.25, 0.6, 0.15), 1.5, 0.3
"""The same three for the question whether a cell trains."""
_TRAINS = 0.8
"""How likely a cell trains of which nothing is known."""


@dataclass(frozen=True)
class Alike:
    """How alike cells of two lists are: sums over single axes, over pairs, and over all."""

    singles: Any
    pairs: Any
    together: Any

    def weighted(self, shares: tuple[float, float, float]) -> Any:
        """The covariance, with variance 1."""
        return shares[0] * self.singles + shares[1] * self.pairs + shares[2] * self.together


class Expectation:
    """The process over a fixed list of cells."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        """
        Args:
            cells: all cells that will be asked about; they have the same axes.
        """
        import numpy

        self._place = {cell: index for index, cell in enumerate(cells)}
        self._columns: list[tuple[Any, bool]] = []
        for number in range(len(cells[0].values)):
            values = {cell.values[number][1] for cell in cells}
            if len(values) > 1:  # An axis with one value says nothing.
                ranks = {
                    value: rank for rank, value in enumerate(sorted(values, key=lambda one: (str(type(one)), one)))
                }
                column = numpy.array([ranks[cell.values[number][1]] for cell in cells], dtype=float)
                self._columns.append((column, all(isinstance(value, int) for value in values)))

    def gain(self, known: Mapping[Cell, float], asked: Sequence[Cell]) -> Any:
        """How much each asked cell is expected to improve the best score, on the scale of logarithms.

        Args:
            known: scores of the cells that were tried, 0 for those that failed; at least two are above 0.
            asked: cells to say something about.
        """
        import numpy

        logs = {cell: math.log(score) for cell, score in known.items() if score > 0}
        mean, spread = self._speeds(logs, asked)
        trained = numpy.array([float(score > 0) for score in known.values()])
        shares, near, noise = _OF_FAILURES
        among, across = (self._alike(one, list(known), near).weighted(shares) for one in (list(known), asked))
        among = among + noise**2 * numpy.eye(len(trained))
        trains = _TRAINS + across @ numpy.linalg.solve(among, trained - _TRAINS)
        return _improvement(mean, spread, max(logs.values())) * numpy.clip(trains, 0.02, 1.0)

    def _speeds(self, logs: Mapping[Cell, float], asked: Sequence[Cell]) -> tuple[Any, Any]:
        """Mean and standard deviation of the logarithm of the score of each asked cell."""
        import numpy

        tried = list(logs)
        found = numpy.array(list(logs.values()))
        middle, scale = float(found.mean()), max(0.05, float(found.std()))
        found = (found - middle) / scale
        among = {near: self._alike(tried, tried, near) for near in _NEAR}
        choices = itertools.product(_SHARES, _NEAR, _NOISE)
        fits = {
            choice: _likelihood(among[choice[1]].weighted(choice[0]), choice[2] / scale, found) for choice in choices
        }
        shares, near, noise = max(fits, key=lambda choice: fits[choice])
        covariance = among[near].weighted(shares) + (noise / scale) ** 2 * numpy.eye(len(found))
        across = self._alike(asked, tried, near).weighted(shares)
        solved = numpy.linalg.solve(covariance, numpy.column_stack([found, across.T]))
        mean = across @ solved[:, 0]
        explained = numpy.einsum("ij,ji->i", across, solved[:, 1:])
        return middle + scale * mean, scale * numpy.sqrt(numpy.maximum(1e-9, 1.0 - explained))

    def _alike(self, left: Sequence[Cell], right: Sequence[Cell], near: float) -> Alike:
        import numpy

        rows = numpy.array([self._place[cell] for cell in left])
        others = numpy.array([self._place[cell] for cell in right])
        total, squares = numpy.zeros((len(rows), len(others))), numpy.zeros((len(rows), len(others)))
        together = numpy.ones((len(rows), len(others)))
        for column, is_numeric in self._columns:
            apart = numpy.abs(column[rows][:, None] - column[others][None, :])
            reach = math.sqrt(3) * apart / near
            alike = (1 + reach) * numpy.exp(-reach) if is_numeric else (apart == 0).astype(float)
            total += alike
            squares += alike**2
            together *= alike
        axes = max(1, len(self._columns))
        pairs = (total**2 - squares) / max(1, axes * (axes - 1))
        return Alike(total / axes, pairs, together)


def _likelihood(alike: Any, noise: float, found: Any) -> float:
    """The logarithm of the likelihood of what was found, but for a constant."""
    import numpy

    factor = numpy.linalg.cholesky(alike + (noise**2 + 1e-8) * numpy.eye(len(found)))
    half = numpy.linalg.solve(factor, found)
    return float(-0.5 * half @ half - numpy.log(numpy.diag(factor)).sum())


def _improvement(mean: Any, spread: Any, best: float) -> Any:
    import numpy
    from scipy.special import ndtr

    above = (mean - best) / spread
    density = numpy.exp(-0.5 * above**2) / math.sqrt(2 * math.pi)
    return (mean - best) * ndtr(above) + spread * density
