"""What settings of glibc's allocator cost or gain in steps of training: ``make bench-malloc``.

By itself the threshold from which on a block is a mapping of its own rises to at most 32 MiB while tensors are freed.

- *pinned*: a threshold of 64 KiB gives every larger tensor a mapping, which leaves no holes in the heap, so that
  `ortlaunch estimate` would be within 3 %.
- *keep*: no block is a mapping, and the heap keeps what is freed, as with ``launcher.allocator=keep``.

Each is set in one process in turns with the usual one, each for some steps, so that a machine whose speed drifts slows
both. Printed are the medians of the ratios of neighbouring turns, of the time and of the processor time, with the
smallest and the largest.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import make_task

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of ``mallopt``."""
_MANY = 65536
USUAL = {_MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20, _MMAP_MAX: _MANY}
"""What glibc comes to by itself with large tensors."""
SETTINGS = {
    "pinned": {_MMAP_THRESHOLD: 64 * 2**10, _TRIM_THRESHOLD: 128 * 2**10, _MMAP_MAX: _MANY},
    "keep": {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1},
}
CASES = {
    "mlp batch 4": ("mlp", 4, 400),
    "mlp batch 1024": ("mlp", 1024, 40),
    "gpt2_nano batch 4": ("gpt2_nano", 4, 4),
    "gpt2_nano batch 16": ("gpt2_nano", 16, 2),
    "gpt2 batch 2": ("gpt2", 2, 1),
    "bert batch 2": ("bert", 2, 1),
}
"""Model, micro-batch, and steps of a turn."""
_TURNS = int(os.environ.get("ORTLAUNCH_MALLOC_TURNS", "10"))


def main() -> None:
    """Measures each setting in each case and prints a line."""
    torch.set_num_threads(1)
    for name, (model, size, steps) in CASES.items():
        step = _step(model, size)
        for setting, values in SETTINGS.items():
            wall, cpu = zip(*_ratios(step, steps, values), strict=True)
            print(f"{name:<20} {setting:<7} time {_spread(wall)}, processor time {_spread(cpu)}", flush=True)


def _ratios(step: Callable[[], None], steps: int, values: Mapping[int, int]) -> list[tuple[float, float]]:
    """The time and the processor time of each turn with a setting, over those with the usual one beside it."""
    libc = ctypes.CDLL(None)
    found = []
    for turn in range(_TURNS + 1):
        figures = {}
        for is_usual in (False, True) if turn % 2 else (True, False):
            for parameter, value in (USUAL if is_usual else values).items():
                libc.mallopt(parameter, value)
            step()  # Blocks of the turn before are freed.
            figures[is_usual] = _seconds(step, steps)
        if turn:
            found.append((figures[False][0] / figures[True][0], figures[False][1] / figures[True][1]))
    return found


def _spread(ratios: tuple[float, ...]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _seconds(step: Callable[[], None], count: int) -> tuple[float, float]:
    began, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return time.perf_counter() - began, time.process_time() - used


def _step(name: str, size: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = build_model(to_config(compose([f"model={name}"])).model)
    optimizer = torch.optim.AdamW(model.parameters())
    if name == "mlp":
        batch = {"pixel_values": torch.randn(size, 1, 8, 8), "labels": torch.randint(10, (size,))}
    else:
        ids = torch.randint(256, (size, 128))
        batch = {"input_ids": ids, "labels": ids}

    task = make_task(model, batch)

    def step() -> None:
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
