"""What pinning glibc's threshold for mappings costs in steps of training: ``make bench-malloc``.

A pinned threshold of 64 KiB gives every larger tensor a mapping of its own, which leaves no holes in the heap, so that
`ortlaunch estimate` would be within 3 %. By itself the threshold rises to at most 32 MiB while tensors are freed. Both
are set in one process in turns, each for some steps, so that a machine whose speed drifts slows both. Printed are the
medians of the ratios of neighbouring turns, of the time and of the processor time, with the smallest and the largest.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable

import torch

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import make_task

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
PINNED, RISEN = 64 * 2**10, 32 * 2**20
CASES = {
    "mlp batch 4": ("mlp", 4, 400),
    "mlp batch 1024": ("mlp", 1024, 40),
    "gpt2_nano batch 4": ("gpt2_nano", 4, 4),
    "gpt2_nano batch 16": ("gpt2_nano", 16, 2),
}
"""Model, micro-batch, and steps of a turn."""
_TURNS = int(os.environ.get("ORTLAUNCH_MALLOC_TURNS", "12"))


def main() -> None:
    """Measures each case and prints a line."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)

    def use(threshold: int) -> None:
        libc.mallopt(_MMAP_THRESHOLD, threshold)
        libc.mallopt(_TRIM_THRESHOLD, max(2 * threshold, 128 * 2**10))

    for name, (model, size, steps) in CASES.items():
        step = _step(model, size)
        found = []
        for turn in range(_TURNS + 1):
            order = (PINNED, RISEN) if turn % 2 else (RISEN, PINNED)
            figures = {}
            for threshold in order:
                use(threshold)
                step()  # Blocks of the turn before are freed.
                figures[threshold] = _seconds(step, steps)
            if turn:
                found.append([pinned / risen for pinned, risen in zip(figures[PINNED], figures[RISEN], strict=True)])
        wall, cpu = zip(*found, strict=True)
        print(f"{name:<20} time {_spread(wall)}, processor time {_spread(cpu)}", flush=True)


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
