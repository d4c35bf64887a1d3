"""One worker's run, in its phases from the configuration to the results."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.config.schema import Config
from ortlaunch.trainer import memory_error, ranges
from ortlaunch.trainer.build import build
from ortlaunch.trainer.context import open_context
from ortlaunch.trainer.leave import leave
from ortlaunch.trainer.observe import observe
from ortlaunch.trainer.train import train
from ortlaunch.trainer.workers import Workers


def train_run(config: Config, run_dir: Path, workers: Workers, startup: dict[str, float], started: float) -> None:
    """Trains one worker's part of a run, from building it to its results; all workers call it.

    Args:
        config: the run's configuration.
        run_dir: its folder.
        workers: this worker's place.
        startup: start-up times measured so far, by metric name.
        started: when the launcher started the run, in seconds since the epoch.

    Raises:
        RequestError: the request cannot be fulfilled.
        TrainingError: the training failed; a lack of memory comes with figures and advice.
    """
    try:
        context = open_context(config, run_dir, workers, started)
        parts = build(context, startup)
        observed = observe(context, parts)
        trained = train(context, observed)
        leave(context, trained)
    except Exception as error:
        explanation = memory_error.explained(ranges.explained(error, config), config, run_dir, workers.rank)
        if explanation is error:
            raise
        raise explanation from error
