"""The referee of numbers: a recorded run once more, in one process, in fp64, by plain torch alone.

The rules are written down here a second time, as the documentation has them: the loss of a step is the mean over its
micro-batches and workers, matrices alone decay, a learning rate follows its schedule, the first of `optimizer.groups`
that matches counts, and an average of the weights is what is evaluated and left. No code of ortlaunch computes anything
here.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ortlaunch.config.schema import Config
from tests.support.pool import Trained

Tensors = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Tensors, Tensors], torch.Tensor]
"""From the model, its buffers and a micro-batch to the loss."""
Items = Callable[[Tensors], int]
"""What the loss of a micro-batch is a mean over."""

LOSS, NORM, RATE, WEIGHTS = 3e-5, 5e-4, 1e-6, 3e-3
"""The largest relative differences that fp32 makes in a few steps; of the weights, as a share of how far they moved."""


@dataclass(frozen=True)
class Evaluated:
    """What a run evaluates on, and after which steps; and after the last one."""

    samples: Tensors
    every: int


@dataclass
class Course:
    """What a run computed: by step, and at its end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    """By name, at the end; in fp64."""
    first: Tensors = field(default_factory=dict)
    """The same before the first step."""


def replayed(
    model: nn.Module,
    loss: Loss,
    items: Items,
    config: Config,
    records: Sequence[Path],
    *,
    first_steps: int,
    sends_buffers: bool,
    workers: int,
    evaluated: Evaluated | None,
    begins: Mapping[str, int] | None = None,
) -> Course:
    """Trains on what a run, and those that resumed it, took.

    Args:
        model: the plain model, with any weights.
        loss: the loss of a micro-batch.
        items: what it is a mean over.
        config: that of the last run.
        records: the folders of `tests.support.recording`, in the order of the runs.
        first_steps: the steps of the first of several runs, after which it evaluates too.
        sends_buffers: whether each step begins with the first worker's buffers, as DDP has it.
        workers: how many there were.
        evaluated: what is evaluated; None for nothing.
        begins: patterns of names, each with the number of steps without these weights.
    """
    weights, kept = torch.load(records[0] / "state-0.pt")
    model.double()
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].double()
    buffers = [{name: _exact(buffer) for name, buffer in kept.items()} for _ in range(workers)]
    taken = [
        [batch for folder in records for batch in torch.load(folder / f"batches-{rank}.pt")] for rank in range(workers)
    ]
    course = Course(first=_weights(model))
    optimizers = _optimizers(model, config)
    trained = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
    average: Tensors = {}
    count = config.train.grad_accumulation
    for step in range(config.train.steps):
        if sends_buffers:
            buffers = [{name: value.clone() for name, value in buffers[0].items()} for _ in range(workers)]
        here = [(rank, batch) for rank in range(workers) for batch in taken[rank][step * count : (step + 1) * count]]
        here = [(rank, batch) for rank, batch in here if batch is not None]
        everything = sum(items(batch) for _, batch in here)
        total = torch.zeros((), dtype=torch.float64)
        for rank, batch in here:
            found = loss(model, buffers[rank], _exact_ones(batch))
            # A mean over nothing is no number, and is no part of the step.
            if number := items(batch):
                share = found * number / everything
                share.backward()
                total += share.detach()
            elif not everything:
                # Nothing moves the weights of a step without items but their decay.
                (found.nan_to_num() * 0.0).backward()
        for match, first in (begins or {}).items():
            for name in fnmatch.filter(dict(model.named_parameters()) if step < first else (), match):
                model.get_parameter(name).grad = None
        graded = [parameter.grad for parameter in trained if parameter.grad is not None]
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in graded))
        clip = config.train.clip_grad_norm
        if clip is not None and norm > clip:
            for gradient in graded:
                gradient *= clip / norm
        rate = config.optimizer.lr * _ratio(config, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_factor"]
            optimizer.step()
            optimizer.zero_grad()
        if (decay := config.train.ema) is not None:
            now = _weights(model)
            average = {name: decay * average.get(name, one) + (1 - decay) * one for name, one in now.items()}
        course.losses.append(float(total))
        course.norms.append(norm)
        course.rates.append(rate)
        done = step + 1
        if evaluated and (done % evaluated.every == 0 or done in (first_steps, config.train.steps)):
            with torch.no_grad():
                seen = {name: value.clone() for name, value in buffers[0].items()}
                model.eval()
                own = _weights(model)
                model.load_state_dict(average, strict=False)
                course.evaluations.append(float(loss(model, seen, _exact_ones(evaluated.samples))))
                model.load_state_dict(own, strict=False)
                model.train()
    course.weights = average or _weights(model)
    return course


def course_of(runs: list[Trained]) -> Course:
    """What the journals of a run, and of those that resumed it, say, with the weights that the last one left."""
    from safetensors.torch import load_file

    course = Course()
    for run in runs:
        course.losses += run.series("train/loss").values()
        course.norms += run.series("train/grad_norm").values()
        course.rates += run.series("train/lr").values()
        course.evaluations += run.series("eval/loss").values()
    (stored,) = (runs[-1].run_dir / "weights").glob("*.safetensors")
    course.weights = load_file(stored)
    return course


def difference(run: Course, exact: Course) -> str:
    """The first difference that is more than rounding, in words; empty if there is none."""
    for name, mine, theirs, bound in (
        ("lr", run.rates, exact.rates, RATE),
        ("loss", run.losses, exact.losses, LOSS),
        ("grad_norm", run.norms, exact.norms, NORM),
        ("eval/loss", run.evaluations, exact.evaluations, LOSS),
    ):
        if len(mine) != len(theirs):
            return f"{name}: {len(mine)} values for {len(theirs)}"
        for step, (one, other) in enumerate(zip(mine, theirs, strict=True), start=1):
            if not abs(one - other) <= bound * abs(other) + bound * 1e-2:
                return f"{name}, value {step}: {one:.6g} for {other:.6g}"
    stored = {name: value for name, value in exact.weights.items() if name in run.weights}
    if not stored:
        return "no weights to compare"
    for name, value in stored.items():
        moved = float((value - exact.first[name]).norm())
        off = float((run.weights[name].double() - value).norm())
        if not off <= WEIGHTS * moved + 1e-6 * float(value.norm()):
            return f"{name} at the end: off by {off:.3g} after moving by {moved:.3g}"
    return ""


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _exact_ones(batch: Tensors) -> Tensors:
    exact: Tensors = tree_map(lambda one: _exact(one) if isinstance(one, torch.Tensor) else one, batch)
    return exact


def _weights(model: nn.Module) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _optimizers(model: nn.Module, config: Config) -> list[torch.optim.Optimizer]:
    """That of the rest, and those of groups with one of their own. Frozen weights need no gradient any more."""
    cfg: Any = config.optimizer
    normalizing = {
        id(parameter)
        for module in model.modules()
        if "Norm" in type(module).__name__
        for parameter in module.parameters(recurse=False)
    }
    groups: dict[str | None, list[dict[str, Any]]] = {}
    for name, parameter in model.named_parameters():
        own = next((one for one in cfg.groups if fnmatch.fnmatchcase(name, one.match)), None)
        if own is not None and own.frozen:
            parameter.requires_grad_(False)
        if not parameter.requires_grad:
            continue
        is_exempt = parameter.ndim < 2 or name.endswith("bias") or id(parameter) in normalizing
        decay = 0.0 if is_exempt and not cfg.decay_bias_and_norm else cfg.weight_decay
        if own is not None and own.weight_decay is not None:
            decay = own.weight_decay
        group = {"params": [parameter], "weight_decay": decay, "lr_factor": 1.0 if own is None else own.lr_factor}
        groups.setdefault(own.target if own is not None else None, []).append(group)
    return [_optimizer(parts, target, cfg) for target, parts in groups.items()]


def _optimizer(parts: list[dict[str, Any]], target: str | None, cfg: Any) -> torch.optim.Optimizer:
    if cfg.name == "factory" and target is None:
        return getattr(torch.optim, cfg.target.partition(":")[2])(parts, lr=cfg.lr, foreach=False, **cfg.params)
    if target is not None:
        params = next(one.params for one in cfg.groups if one.target == target)
        return getattr(torch.optim, target.partition(":")[2])(parts, lr=cfg.lr, foreach=False, **params)
    if cfg.name == "sgd":
        return torch.optim.SGD(parts, lr=cfg.lr, momentum=cfg.momentum, foreach=False, fused=False)
    betas = (cfg.beta1, cfg.beta2)
    return torch.optim.AdamW(parts, lr=cfg.lr, betas=betas, eps=cfg.eps, foreach=False, fused=False)


def _ratio(config: Config, done: int) -> float:
    """The share of the peak learning rate after `done` steps."""
    cfg: Any = config.scheduler
    if done < cfg.warmup_steps:
        return float((done + 1) / (cfg.warmup_steps + 1))
    progress = min(1.0, (done - cfg.warmup_steps) / max(1, config.train.steps - 1 - cfg.warmup_steps))
    if cfg.name == "constant":
        return 1.0
    falls = (1 + math.cos(math.pi * progress)) / 2 if cfg.name == "cosine" else 1 - progress
    return float(cfg.min_ratio + (1 - cfg.min_ratio) * falls)
