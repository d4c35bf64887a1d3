"""Whole runs of ortlaunch for benchmarks: what a run has journalled, and the order of turns."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.estimate_draws import MODELS, make_models

WORKERS = 2
STEPS = {"gpt2_nano": 80, "gpt2": 8, "bert": 8, "llama": 10, "hf": 10, "mlp": 1000}
STEPS |= dict.fromkeys(("resnet", "vit", "own"), 400)
"""The model families, and how many steps a run of each takes.

They take some seconds: the medians of 40 steps of a few milliseconds differed by a factor of two between runs.
"""
_WORDS = {
    "hf": ("model=hf", f"model.params.pretrained={MODELS}/gpt_neox", "model.params.task=causal-lm", "data.seq_len=128"),
    "own": (
        *("model=factory", "model.target=tests.benchmarks.estimate_draws:frozen_below", "data=digits"),
        *("+model.params.width=512", "+model.params.layers=4", "+model.params.frozen=1"),
    ),
}
"""The keys of the families that are no option of ``model``: one that transformers reads from a folder, and a user's."""


@dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    tags: dict[str, str]
    values: dict[str, float]
    """The last value of each metric, by MLflow metric name."""

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return float(self.values["summary/step_seconds_p50"])

    @property
    def rate(self) -> float:
        """Tokens per second of all workers at the median step; images where the data has no tokens."""
        samples = self.values["summary/samples_per_second_median"]
        return float(self.values.get("summary/tokens_per_second_median", samples))

    @property
    def flops_per_step(self) -> float:
        """Operations of one worker's forward and backward, by the run's own count."""
        # The same in each window: the operations per second times the seconds of the window.
        return 1e12 * self.values["throughput/tflops_per_device"] * self.values["throughput/step_seconds"]


def run(
    *overrides: str,
    backend: str,
    folder: Path,
    within: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Ran:
    """Runs ``ortlaunch`` to the end of the run.

    Args:
        overrides: keys as on the command line; ``model=`` may name any family of `STEPS`.
        backend: what must really have run the steps.
        folder: for the run folder.
        within: words before the command, such as taskset's.
        environment: the command's variables; None for those of this process.

    Raises:
        AssertionError: another backend has run than the one that was asked for.
        subprocess.CalledProcessError: the run has failed.
    """
    words = [f"backend={backend}", "tracking=none", f"run_root={folder / backend}"]
    for word in overrides:
        key, _, value = word.partition("=")
        words += words_of(value, folder) if key == "model" else [word]
    command = [*within, sys.executable, "-m", "ortlaunch", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1200, env=environment)
    journal = max((folder / backend).glob("*/*/journal.jsonl"), key=lambda path: path.stat().st_mtime)
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    ran = Ran(_last(events, "tags"), _last(events, "metrics"))
    assert ran.tags["ortlaunch.ort_active"] == str(backend == "ort").lower(), ran.tags
    return ran


def words_of(family: str, folder: Path) -> list[str]:
    """The keys that choose a family of `STEPS`.

    Args:
        family: its name.
        folder: where the models that are read from a folder are written, unless they are there.
    """
    words = _WORDS.get(family, (f"model={family}",))
    if any(MODELS in word for word in words):
        make_models(folder / "models")
    return [word.replace(MODELS, str(folder / "models")) for word in words]


def leave_nothing_running() -> None:
    """Lets SIGTERM end this program as an error does, so that it ends the run that it has started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _last(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return {name: value for event in events if event["event"] == kind for name, value in event["values"].items()}


def turns(names: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    """The order in each round: every other one goes the other way round, so that no place in it is better."""
    for number in range(rounds):
        yield names if number % 2 == 0 else names[::-1]
