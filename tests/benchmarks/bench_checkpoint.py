"""How long training stands still for a checkpoint: ``python -m tests.benchmarks.bench_checkpoint``.

Two runs of each kind, taken in turns, differ in ``train.checkpoint_async`` alone. Stalls are what the runs themselves
journal as ``checkpoint/stall_seconds``. Of each run the first one is left out, for it pays for memory that later
ones use, and so is the last one, beside which no step goes on.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = {
    "ddp": ("trainer=ddp",),
    "fsdp": ("trainer=fsdp",),
    "zero 1": ("trainer=deepspeed", "trainer.zero_stage=1"),
    "zero 3": ("trainer=deepspeed", "trainer.zero_stage=3"),
}
# 25 million parameters: a checkpoint of 300 MB.
WORDS = (
    "model=gpt2_nano",
    "model.params.n_embd=512",
    "model.params.n_layer=8",
    "model.params.n_head=8",
    "backend=eager",
    "data.seq_len=64",
    "train.batch_size=1",
    "train.steps=30",
    "train.checkpoint_every=6",
    "train.save_weights=false",
    "tracking=none",
)
ROUNDS = 2


def main() -> None:
    """Measures and prints."""
    print(f"{'':<8} {'synchronous':>12} {'asynchronous':>13} {'ratio':>7}   step   (seconds, medians)")
    for kind, words in KINDS.items():
        stalls: dict[bool, list[float]] = {False: [], True: []}
        steps: list[float] = []
        for _ in range(ROUNDS):
            for is_async in (False, True):
                found, step = _measure(*words, f"train.checkpoint_async={str(is_async).lower()}")
                stalls[is_async] += found
                steps.append(step)
        sync, later = (statistics.median(stalls[is_async]) for is_async in (False, True))
        step = statistics.median(steps)
        print(f"{kind:<8} {sync:>12.3f} {later:>13.3f} {later / sync:>7.2f}   {step:.3f}", flush=True)


def _measure(*words: str) -> tuple[list[float], float]:
    """Stalls of one run's checkpoints but the first, and its median step."""
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, "-m", "ortlaunch", *WORDS, *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=False,
        )
        match = re.search(r"^run folder: (.*)$", ran.stdout, re.MULTILINE)
        if ran.returncode or match is None:
            sys.exit(ran.stdout + ran.stderr)
        lines = (Path(match[1]) / "journal.jsonl").read_text().splitlines()
    values = [event["values"] for event in map(json.loads, lines) if event["event"] == "metrics"]
    stalls = [value["checkpoint/stall_seconds"] for value in values if "checkpoint/stall_seconds" in value]
    return stalls[1:-1], next(v["summary/step_seconds_p50"] for v in values if "summary/step_seconds_p50" in v)


if __name__ == "__main__":
    main()
