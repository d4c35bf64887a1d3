"""What a checkpoint holds apart from the engine's state."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ortlaunch.trainer.checkpoint import resume
from ortlaunch.trainer.context import RunContext
from ortlaunch.trainer.feed import Feed
from ortlaunch.trainer.observe import Observed


@dataclass(frozen=True)
class CheckpointFacts:
    """Reads the facts of the run at the moment of a checkpoint."""

    context: RunContext
    observed: Observed
    feed: Feed

    def of_worker(self) -> dict[str, Any]:
        """What this worker needs to continue: its position in the data."""
        position = self.feed.position
        return {"position": {**position.as_dict(), "states": position.states}}

    def of_run(self, step: int) -> dict[str, Any]:
        """The facts with which `resume` decides whether and where a run can continue.

        Args:
            step: the step that has ended.
        """
        parts = self.observed.parts
        return {
            "step": step,
            "tokens": self.observed.recorder.tokens_seen,
            "workers": self.context.workers.world_size,
            "kind": resume.kind_of(self.context.config),
            "precision": self.context.config.train.precision.value,
            "optimizer": resume.optimizer_of(self.context.config),
            "seed": self.context.config.seed,
            "data": parts.loader.fingerprint,
            "samples": parts.loader.samples,
            "reading": parts.reading,
            "position": self.feed.position.as_dict(),
            "mlflow_run_id": self.context.run.mlflow_run_id(),
            "time": time.time(),
            "shapes": parts.shapes,
        }
