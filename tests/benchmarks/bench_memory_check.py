"""What the memory check before a run costs: ``make bench-memory-check``.

Whole runs take turns, so that a machine whose speed drifts slows all variants. Printed are the medians of each
variant, and their ratio to the first one: the time and the processor time of a whole command with all its processes,
and the time of a step.

- ``off``: ``train.memory_check=off``;
- ``plain``: the check as it is by default, for models that fit plainly;
- ``estimated``: with nothing in the cache, and a parameter (``n_inner``) by which the bound does not know the size, so
  that each run is estimated beside it.

``ORTLAUNCH_CHECK_ROUNDS`` (3), ``ORTLAUNCH_CHECK_VARIANTS`` (off,plain,estimated) and
``ORTLAUNCH_CHECK_MODELS`` (mlp,gpt2_nano) choose what is run.
"""

from __future__ import annotations

import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

RUN = (
    *("backend=eager", "trainer=single", "device=cpu", "tracking=none"),
    *("train.log_every=5", "train.checkpoint_every=null", "train.save_weights=false"),
)
STEPS = {"mlp": 400, "gpt2_nano": 60}


def main() -> None:
    """Runs all variants in turns and prints the table."""
    rounds = int(os.environ.get("ORTLAUNCH_CHECK_ROUNDS", "3"))
    variants = os.environ.get("ORTLAUNCH_CHECK_VARIANTS", "off,plain,estimated").split(",")
    for model in os.environ.get("ORTLAUNCH_CHECK_MODELS", "mlp,gpt2_nano").split(","):
        found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        for turn in range(rounds):
            for variant in variants if turn % 2 == 0 else reversed(variants):
                if variant != "estimated" or model == "gpt2_nano":
                    found[variant].append(_run(model, variant))
        first = _medians(found[variants[0]])
        for variant in variants:
            if variant not in found:
                continue
            print(f"{model:<10} {variant:<10} {_compared(found[variant], first)}", flush=True)


def _medians(figures: list[tuple[float, ...]]) -> list[float]:
    return [statistics.median(column) for column in zip(*figures, strict=True)]


def _compared(figures: list[tuple[float, ...]], first: list[float]) -> str:
    whole, cpu, step = _medians(figures)
    return (
        f"command {whole:>6.2f} s ({whole / first[0]:.3f}), processor {cpu:>6.2f} s ({cpu / first[1]:.3f}), "
        f"step ({step / first[2]:.3f})   [{' '.join(f'{one[0]:.1f}' for one in figures)}]"
    )


def _run(model: str, variant: str) -> tuple[float, ...]:
    """Seconds of a command, of its processors, and of a sample or token in its median step."""
    check = "warn" if variant in ("plain", "estimated") else "off"
    words = [f"model={model}", *RUN, f"train.steps={STEPS[model]}", f"train.memory_check={check}"]
    if model == "gpt2_nano":
        words.append("+model.params.n_inner=512")
    with tempfile.TemporaryDirectory() as folder:
        if variant == "plain" and model == "gpt2_nano":
            words.pop()
        variables = {**os.environ, "ORTLAUNCH_CACHE": f"{folder}/cache"}
        began, used = time.perf_counter(), _processor_seconds()
        said = subprocess.run(
            [sys.executable, "-m", "ortlaunch", *words],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        whole, cpu = time.perf_counter() - began, _processor_seconds() - used
    speed = re.search(r"([\d,.]+) (?:tokens|samples)/s \(median\)", said)
    assert speed is not None, said
    return whole, cpu, 1.0 / float(speed[1].replace(",", ""))


def _processor_seconds() -> float:
    """Processor seconds of all processes so far that this one has started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
