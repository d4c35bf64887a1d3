"""What the guards of ``backend=ort`` cost, in steps of training, in one process: ``make bench-guards``.

- the check at the start, without the export;
- decisions that are compared at every step: a model with some places where a value decides, over the same without them;
- a comparison while training (``backend.recheck_every``), and its share of a run with the default spacing.

Two models take their steps in turns, so that a machine whose speed drifts slows both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import OrtConfig
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import Batch, Task, make_task
from ortlaunch.ort import session
from ortlaunch.ort.mends import decisions
from ortlaunch.ort.verify.start import QuickCheck, gradient_error
from ortlaunch.trainer.backend_run import _is_due
from tests.benchmarks.figures import with_interval

RUN_STEPS = 100_000
"""Length of the run whose share is computed."""


class Deciding(nn.Module):
    """A block of a model that decides something by a value; always the same way here."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor, *arguments: object, **named: object) -> object:
        if bool(hidden.abs().max() < 1e9):
            return self.block(hidden, *arguments, **named)
        raise ValueError("the values are too large")


class Trained:
    """A model under ONNX Runtime that takes steps."""

    def __init__(self, batches: list[Batch], *, decides: bool) -> None:
        torch.manual_seed(0)
        self.model = build_model(to_config(compose(["model=gpt2_nano"])).model)
        if decides:
            blocks = self.model.transformer.h
            for number, block in enumerate(blocks):
                blocks[number] = Deciding(block)
        self.task: Task = make_task(self.model, batches[0])
        threads = len(os.sched_getaffinity(0))
        self.wrapped = session.wrap(self.model, OrtConfig(export_cache=False), threads=threads, onnx_dir=None)
        self.batch = batches[0]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def step(self) -> None:
        """One forward, backward and optimizer step."""
        self.optimizer.zero_grad()
        self.task.loss(self.wrapped, self.batch).backward()
        self.optimizer.step()


def seconds(action: Callable[[], object]) -> float:
    """How long an action takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main() -> None:
    """Prints the three costs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=150)
    pairs = parser.parse_args().pairs
    batches = [{"input_ids": torch.randint(0, 256, (8, 128)), "labels": torch.randint(0, 256, (8, 128))} for _ in "123"]
    plain, deciding = Trained(batches, decides=False), Trained(batches, decides=True)
    places = len(deciding.model.transformer.h)
    check = 0.0
    for one in (plain, deciding):
        one.step()  # The export.
        check = seconds(lambda one=one: QuickCheck(one.wrapped, one.task, contextlib.nullcontext).findings(batches))
    decisions.enforce()
    for one in (plain, deciding) * 5:
        one.step()
    steps, ratios, rechecks = [], [], []
    for number in range(pairs):
        order = (plain, deciding) if number % 2 else (deciding, plain)
        took = {one: seconds(one.step) for one in order}
        steps.append(took[plain])
        ratios.append(took[deciding] / took[plain])
        if number % 10 == 0:
            again = seconds(lambda: gradient_error(plain.wrapped, plain.task, contextlib.nullcontext, batches[1]))
            rechecks.append(again / took[plain])
    step = statistics.median(steps)
    due = sum(_is_due(number, None) for number in range(1, RUN_STEPS + 1))
    print(f"gpt2_nano, batch 8x128, {len(os.sched_getaffinity(0))} threads; a step takes {step * 1000:.0f} ms")
    print(f"the check at the start: {check / step:.1f} steps ({check:.2f} s)")
    print(f"{places} decisions compared at each step: {with_interval(ratios)} of a step without")
    print(f"a comparison while training: {with_interval(rechecks)} steps")
    share = due * statistics.median(rechecks) / RUN_STEPS
    print(f"{due} of them in {RUN_STEPS} steps: {share:.4%} of the time")


if __name__ == "__main__":
    main()
