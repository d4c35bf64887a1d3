"""Run under torchrun: trains the same few steps with each backend, trainer and precision that the CPU has.

Writes {cell: losses} for the test to read.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import torch

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, Device, DigitsConfig
from ortlaunch.data.loader import build_loader
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import make_task
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.workers import Workers, join
from ortlaunch.trainer.wrapping import wrap
from tests.support.torchrun import leave

STEPS = 30


def main() -> None:
    """Arguments: the file to write, then cells as NAME:OVERRIDE,OVERRIDE."""
    workers: Workers | None = None
    results: dict[str, list[float]] = {}
    for case in sys.argv[2:]:
        name, _, overrides = case.partition(":")
        config = to_config(compose(["device=cpu", "model=mlp", "tracking=none", *overrides.split(",")]))
        workers = workers or join(config, Device.cpu)
        results[name] = losses(config, workers)
    assert workers is not None
    if workers.is_first:
        torch.save(results, sys.argv[1])
    leave()


def losses(config: Config, workers: Workers) -> list[float]:
    """The mean loss over all samples of each step: 16 of them, whether two workers share them or each takes all."""
    alone = config.trainer.name == "single"
    share = {"rank": 0, "world_size": 1} if alone else {"rank": workers.rank, "world_size": workers.world_size}
    loader = build_loader(DigitsConfig(), batch_size=16 // share["world_size"], seed=0, **share)
    seed_everything(0)
    model = build_model(config.model)
    batches = list(islice(loader, STEPS))
    engine = wrap(model, config, workers, make_task(model, batches[0]), Path(sys.argv[1]).parent)
    seen = []
    for batch in batches:
        loss = float(engine.micro_step(batch, last=True).loss)
        engine.step()
        seen.append(float(workers.gather([loss]).mean()))
    with engine.evaluating():
        assert bool(engine.evaluate(batches[0]).loss.isfinite())
    return seen


main()
