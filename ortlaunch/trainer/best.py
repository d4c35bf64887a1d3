"""The best evaluation so far, and when to give up waiting for a better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.scores import best_of


class BestSoFar:
    """Compares each evaluation with the best one before it."""

    def __init__(
        self, asked: str | None, patience: int | None, directions: Mapping[str, bool | None], stored: Mapping[str, Any]
    ) -> None:
        """
        Args:
            asked: ``train.best``.
            patience: ``train.patience``.
            directions: see `Evaluation.directions`.
            stored: what `state` returned when a checkpoint was written; empty without one.

        Raises:
            RequestError: the evaluation has no such value, or which one is better is not known.
        """
        best = best_of(asked)
        if best.key not in directions:
            raise RequestError(f"train.best={asked}: the evaluation has no such value, but {', '.join(directions)}")
        higher = directions[best.key] if best.higher is None else best.higher
        if higher is None:
            raise RequestError(f"train.best={asked}: say which is better, by {best.key}:max or {best.key}:min")
        self.name = f"{best.key}:{'max' if higher else 'min'}"
        """The value and its direction."""
        self._key = best.key
        self._sign = -1.0 if higher else 1.0
        self._patience = patience
        self.is_asked = asked is not None
        """Whether a better value gets a checkpoint of its own."""
        mine = stored if stored.get("of") == self.name else {}
        self.score: float | None = None
        """Of the last evaluation: its value, or the negative of one where higher is better."""
        self._best: float | None = mine.get("best")
        self._worse: int = mine.get("worse", 0)
        self.is_better = False
        """Whether the last evaluation is better than all before it."""

    def take(self, values: Mapping[str, float]) -> None:
        """Takes an evaluation's values."""
        self.score = self._sign * values[self._key]
        self.is_better = math.isfinite(self.score) and (self._best is None or self.score < self._best)
        self._worse = 0 if self.is_better else self._worse + 1
        if self.is_better:
            self._best = self.score

    @property
    def gives_up(self) -> bool:
        """Whether ``train.patience`` is used up."""
        return self._patience is not None and self._worse >= self._patience

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"of": self.name, "best": self._best, "worse": self._worse}
