"""ortlaunch against what people use instead: ``python -m tests.benchmarks.bench_others`` (needs the extra ``bench``).

The same model, bytes, batch, optimizer, clipping, number of workers and threads; whole runs in turns, each round in
another order. ortlaunch runs with everything on: MLflow, checks, watch, evaluation split, weights at the end. For each
contender: tokens/s over the steady steps, the time from the command to the end of the first step, and the resident
memory of the first worker at most; ratios are those of ortlaunch over the contender within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from ortlaunch.tracking.journal import read_events

ROOT = Path(__file__).parents[2]
WORKERS, THREADS = 2, max(1, (os.cpu_count() or 2) // 2)
_WARM = 5
"""Steps before the steady ones."""


@dataclass(frozen=True)
class Work:
    """What is trained."""

    model: str
    steps: int
    batch_size: int
    seq_len: int


WORKS = {
    "gpt2_nano": Work("gpt2_nano", steps=200, batch_size=8, seq_len=128),
    "gpt2": Work("gpt2", steps=12, batch_size=2, seq_len=128),
}


@dataclass(frozen=True)
class Measured:
    """What one run showed."""

    tokens_per_second: float
    first_step_seconds: float
    peak_gib: float


Contender = Callable[[Work, Path, Path], Measured]


def by_script(name: str) -> Contender:
    """A script of `others`, started by torchrun."""

    def run(work: Work, data: Path, folder: Path) -> Measured:
        parameters = yaml.safe_load((ROOT / "conf" / "model" / f"{work.model}.yaml").read_text())["params"]
        request = {
            "steps": work.steps,
            "batch_size": work.batch_size,
            "seq_len": work.seq_len,
            "model": parameters,
            "data": str(data),
            "folder": str(folder),
            "started": time.time(),
        }
        words = ["-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}", "--rdzv-backend=c10d"]
        words += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", f"tests.benchmarks.others.{name}"]
        _run(words, folder, {"BENCH_REQUEST": json.dumps(request)})
        found = json.loads((folder / "measured.json").read_text())
        # The first interval is that of the second step.
        step = statistics.median(found["steps"][_WARM - 1 :])
        return Measured(WORKERS * work.batch_size * work.seq_len / step, found["first_step"], found["peak_gib"])

    return run


def by_ortlaunch(*overrides: str) -> Contender:
    """ortlaunch with everything on."""

    def run(work: Work, data: Path, folder: Path) -> Measured:
        words = [
            *("-m", "ortlaunch", f"model={work.model}", "data=text", f"data.path={data}"),
            *(f"data.seq_len={work.seq_len}", f"train.batch_size={work.batch_size}", f"train.steps={work.steps}"),
            *(f"launcher.workers_per_node={WORKERS}", f"train.steady_after={_WARM}", *overrides),
        ]
        _run(words, folder, {})
        (journal,) = folder.glob("runs/*/*/journal.jsonl")
        values = {}
        for event in read_events(journal, 0)[0]:
            values |= event["values"] if event["event"] == "metrics" else {}
        return Measured(
            values["summary/tokens_per_second_median"],
            values["startup/time_to_first_step_seconds"],
            values["summary/peak_memory_gib"],
        )

    return run


OURS = "ortlaunch eager"
CONTENDERS: dict[str, Contender] = {
    OURS: by_ortlaunch("backend=eager"),
    "ortlaunch (ort)": by_ortlaunch(),
    "script by hand": by_script("script"),
    "transformers Trainer": by_script("trainer"),
    "Lightning": by_script("lightning_fit"),
    "Accelerate": by_script("accelerate_loop"),
}


def _run(words: list[str], folder: Path, variables: dict[str, str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(THREADS), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "TOKENIZERS_PARALLELISM": "false", **variables}
    ran = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    if ran.returncode:
        sys.exit(f"{' '.join(words)}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKS, default="gpt2_nano")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS), help=f"beside {OURS}")
    arguments = parser.parse_args()
    work = WORKS[arguments.model]
    names = [name for name in CONTENDERS if name in (OURS, *arguments.only)]
    found: dict[str, list[Measured]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as root:
        data = Path(root) / "text.txt"
        library = sorted(Path(os.__file__).parent.glob("*.py"))
        data.write_bytes(b"".join(path.read_bytes() for path in library))
        for number in range(arguments.rounds):
            turned = names[number % len(names) :] + names[: number % len(names)]
            for name in turned:
                folder = Path(root) / f"{number}-{names.index(name)}"
                folder.mkdir()
                found[name].append(CONTENDERS[name](work, data, folder))
    print(f"{work}, {WORKERS} workers x {THREADS} threads, {arguments.rounds} rounds; medians, ratios: {OURS} over it")
    print(
        f"{'':<22} {'tokens/s':>9} {'ratio':>6} {'least':>6} {'first step s':>13} {'ratio':>6} {'GiB':>6} {'ratio':>6}"
    )
    for name in names:
        print(_line(name, found[name], found[OURS]))


def _line(name: str, them: list[Measured], us: list[Measured]) -> str:
    pairs = list(zip(us, them, strict=True))
    speed = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]
    start = [ours.first_step_seconds / theirs.first_step_seconds for ours, theirs in pairs]
    memory = [ours.peak_gib / theirs.peak_gib for ours, theirs in pairs]
    tokens, first, peak = (
        statistics.median(getattr(one, field) for one in them)
        for field in ("tokens_per_second", "first_step_seconds", "peak_gib")
    )
    return (
        f"{name:<22} {tokens:>9,.0f} {statistics.median(speed):>6.2f} {min(speed):>6.2f} "
        f"{first:>13.1f} {statistics.median(start):>6.2f} {peak:>6.2f} {statistics.median(memory):>6.2f}"
    )


if __name__ == "__main__":
    main()
