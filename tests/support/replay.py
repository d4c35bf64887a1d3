"""What plain torch computes for a run: its batches in one process, in fp64, by an optimizer that is not fused."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from ortlaunch.config.load import load_config
from ortlaunch.config.schema import Config
from ortlaunch.models.task import Batch, make_task
from ortlaunch.trainer.prepare import build_seeded, open_loader
from ortlaunch.trainer.workers import Workers


@dataclass(frozen=True)
class Replayed:
    """What a run should have computed."""

    losses: dict[int, float]
    """By step."""
    norms: dict[int, float]
    """Of the gradients before clipping, by step."""
    weights: dict[str, torch.Tensor]
    """And buffers after the last step."""


def replay(run_dir: Path, workers: int, *, zeros: bool = False) -> Replayed:
    """Trains what a run trained, for a constant learning rate, no clipping, and one decay for all weights.

    Args:
        run_dir: the run folder.
        workers: the run's number of workers. What they compute at the same time is one batch here.
        zeros: whether weights that a step does not use get a gradient of zeros.
    """
    config = load_config(run_dir / "config.yaml")
    train, losses, norms = config.train, {}, {}
    model = build_seeded(config).double()
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer = _optimizer(config, weights)
    alone = Workers(0, 1, torch.device("cpu"), torch.get_num_threads())
    with open_loader(config, alone, batch_size=train.batch_size * workers) as loader:
        for step in range(1, train.steps + 1):
            losses[step] = 0.0
            for batch in islice(loader, train.grad_accumulation):
                given = _double(batch)
                loss = make_task(model, given).loss(model, given) / train.grad_accumulation
                loss.backward()
                losses[step] += loss.item()
            norms[step] = float(torch.nn.utils.get_total_norm([one.grad for one in weights if one.grad is not None]))
            for weight in weights:
                if zeros and weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            optimizer.step()
            optimizer.zero_grad()
    return Replayed(losses, norms, model.state_dict())


def evaluated(run_dir: Path, workers: int, weights: dict[str, torch.Tensor]) -> float:
    """The loss on a run's held-out samples, the mean over its workers.

    Args:
        run_dir: the run folder.
        workers: the run's number of workers.
        weights: and buffers, by name.
    """
    config, losses = load_config(run_dir / "config.yaml"), []
    model = build_seeded(config).eval()
    model.load_state_dict(weights, assign=True)
    model.double()
    for rank in range(workers):
        with open_loader(config, Workers(rank, workers, torch.device("cpu"), torch.get_num_threads())) as loader:
            batches = [_double(batch) for batch in loader.held_out(config.train.eval_samples)]
        losses += [make_task(model, batch).loss(model, batch).item() for batch in batches]
    return sum(losses) / len(losses)


def _double(batch: Batch) -> Batch:
    return {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}


def _optimizer(config: Config, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    cfg, decay = config.optimizer, config.optimizer.weight_decay
    assert config.scheduler.name == "constant"
    assert config.train.clip_grad_norm is None
    assert cfg.decay_bias_and_norm
    if cfg.name == "sgd":
        return torch.optim.SGD(weights, cfg.lr, momentum=cfg.momentum, weight_decay=decay, foreach=False)
    return torch.optim.AdamW(weights, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, weight_decay=decay, foreach=False)
