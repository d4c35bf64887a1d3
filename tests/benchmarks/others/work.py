"""The work that all contenders do: the same model, the same bytes, the same optimizer, and how it is timed."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

LEARNING_RATE, WEIGHT_DECAY, CLIP = 3e-4, 0.01, 1.0
LOG_EVERY = 10


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of a file's bytes, each a sample."""

    def __init__(self, path: Path, length: int) -> None:
        content = np.memmap(path, dtype=np.uint8, mode="r")
        self._blocks = content[: len(content) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self._blocks[index].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


class Request:
    """What a contender is asked for, by the variable ``BENCH_REQUEST``."""

    def __init__(self) -> None:
        asked: dict[str, Any] = json.loads(os.environ["BENCH_REQUEST"])
        self.steps: int = asked["steps"]
        self.batch_size: int = asked["batch_size"]
        """Of each worker."""
        self.folder = Path(asked["folder"])
        on_cuda = asked.get("device") == "cuda"
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda else torch.device("cpu")
        self.half = torch.bfloat16 if asked.get("precision") == "bf16" else None
        """The type of autocast; None for fp32."""
        self.model = GPT2LMHeadModel(GPT2Config(**asked["model"])).to(self.device)
        self.data = Blocks(Path(asked["data"]), asked["seq_len"])
        self._started: float = asked["started"]
        self._ends: list[float] = []
        self._marks: list[torch.cuda.Event] = []
        self._first = 0.0

    def step_done(self) -> None:
        """An optimizer step has ended."""
        self._first = self._first or time.time()
        self._ends.append(time.perf_counter())
        if self.device.type == "cuda":
            # The host runs ahead of the device, and its clock says nothing of a step.
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()

    def report(self) -> None:
        """The first worker writes what was measured."""
        if os.environ.get("RANK", "0") != "0":
            return
        steps = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        if self._marks:
            torch.cuda.synchronize()
            pairs = zip(self._marks, self._marks[1:], strict=False)
            steps = [before.elapsed_time(after) / 1000 for before, after in pairs]
            peak = torch.cuda.max_memory_allocated() / 1024**3
        found = {"first_step": self._first - self._started, "steps": steps, "peak_gib": peak}
        (self.folder / "measured.json").write_text(json.dumps(found))
        sys.stdout.flush()
