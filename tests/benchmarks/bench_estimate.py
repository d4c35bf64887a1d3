"""How near `ortlaunch estimate` is to the memory of real runs: ``python -m tests.benchmarks.bench_estimate``.

Small models of random sizes are drawn by a seed, estimated, and then trained on two workers (one for ``single``).
What was measured is the largest resident memory of each worker, as the kernel counts it (``VmHWM``), summed over the
workers. A run above the high figure would have got a false "fits" under some limit, one below the low figure a false
"does not fit". ``ORTLAUNCH_ESTIMATE_COUNT`` (24), ``ORTLAUNCH_ESTIMATE_SEED`` (0) and ``ORTLAUNCH_ESTIMATE_BACKENDS``
(eager,ort) choose what is drawn; ``ORTLAUNCH_ESTIMATE_RECORD=FILE`` writes each result as a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

_MIB = 2**20
_SECONDS = 0.02
TRAINERS = (
    ("trainer=single",),
    ("trainer=ddp",),
    ("trainer=fsdp",),
    *(("trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4)),
)


def main() -> None:
    """Draws, estimates, measures and prints."""
    count = int(os.environ.get("ORTLAUNCH_ESTIMATE_COUNT", "24"))
    seed = int(os.environ.get("ORTLAUNCH_ESTIMATE_SEED", "0"))
    backends = os.environ.get("ORTLAUNCH_ESTIMATE_BACKENDS", "eager,ort").split(",")
    print(f"{'low':>6} {'likely':>6} {'high':>6} {'real':>6} {'error':>7}  configuration   (MiB, all workers)")
    results = [_result(draw(seed + number, backends)) for number in range(count)]
    done = [one for one in results if one is not None]
    errors = sorted(abs(one["peak"] / one["measured"] - 1) for one in done)
    above = sum(one["measured"] > one["high"] for one in done)
    below = sum(one["measured"] < one["low"] for one in done)
    print(f"{len(done)} runs: median error {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}")
    print(f'above the band (a false "fits"): {above}; below it (a false "does not fit"): {below}')


def draw(seed: int, backends: list[str]) -> tuple[str, ...]:
    """The words of a configuration, a function of the seed."""
    choice = random.Random(seed)
    trainer = choice.choice(TRAINERS)
    backend = choice.choice(backends)
    if backend == "ort" and trainer[0] == "trainer=fsdp":
        trainer = TRAINERS[1]
    words = [*choice.choice(_FAMILIES)(choice), *trainer, f"backend={backend}"]
    if "train.precision=bf16" not in words and choice.random() < 0.25:
        words.append("train.grad_accumulation=2")
    if choice.random() < 0.3:
        words.append("train.eval_every=2")
    words.append(f"train.checkpoint_every={choice.choice(['null', '2', '4'])}")
    return tuple(words)


def _gpt2(choice: random.Random) -> list[str]:
    heads = choice.choice((4, 8))
    return [
        "model=gpt2_nano",
        f"model.params.n_embd={64 * heads}",
        f"model.params.n_head={heads}",
        f"model.params.n_layer={choice.randint(2, 8)}",
        f"train.batch_size={choice.choice((2, 4, 8, 16))}",
        f"data.seq_len={choice.choice((64, 128, 256))}",
        *choice.choice(([], [], ["train.precision=bf16"], ["train.activation_checkpointing=true"])),
    ]


def _llama(choice: random.Random) -> list[str]:
    return [
        "model=llama",
        f"model.params.num_hidden_layers={choice.randint(2, 8)}",
        f"train.batch_size={choice.choice((2, 4, 8))}",
        f"data.seq_len={choice.choice((64, 128, 256))}",
        *choice.choice(([], ["train.precision=bf16"])),
    ]


def _bert(choice: random.Random) -> list[str]:
    return ["model=bert", f"train.batch_size={choice.choice((2, 4, 8))}", f"data.seq_len={choice.choice((64, 128))}"]


def _images(choice: random.Random) -> list[str]:
    return [f"model={choice.choice(('resnet', 'vit', 'mlp'))}", f"train.batch_size={choice.choice((4, 16, 64))}"]


_FAMILIES = (_gpt2, _gpt2, _llama, _bert, _images)


def _result(words: tuple[str, ...]) -> dict[str, Any] | None:
    """Estimates and measures one configuration, and prints its line."""
    text = " ".join(words)
    words = (*words, "device=cpu", "tracking=none", "train.steps=4", "train.log_every=2", "train.memory_check=off")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        said = _command("estimate", *words, "--format=json", "--quick", folder=folder)
        seconds = time.perf_counter() - began
        if not said.stdout.startswith("{"):
            print(f"  refused: {text}: {said.stderr.strip().splitlines()[-1:]}", flush=True)
            return None
        report = json.loads(said.stdout)
        peaks = measured(words, Path(folder))
    if peaks is None:
        print(f"  the run failed: {text}", flush=True)
        return None
    machine = report["machine"]
    found = {
        "words": text,
        "low": machine["low_bytes"],
        "peak": machine["peak_bytes"],
        "high": machine["high_bytes"],
        "measured": sum(peaks.values()),
    }
    if record := os.environ.get("ORTLAUNCH_ESTIMATE_RECORD"):
        line = {**found, "peaks": peaks, "seconds": seconds, "report": report}
        with open(record, "a") as file:
            file.write(json.dumps(line) + "\n")
    figures = " ".join(f"{found[name] / _MIB:>6.0f}" for name in ("low", "peak", "high", "measured"))
    print(f"{figures} {found['peak'] / found['measured'] - 1:>+7.1%}  {text}", flush=True)
    return found


def measured(words: tuple[str, ...], folder: Path) -> dict[str, int] | None:
    """Trains, and returns the largest resident memory of each worker in bytes by its rank; None if the run fails."""
    command = [sys.executable, "-m", "ortlaunch", *words, f"run_root={folder}/runs"]
    ranks: dict[psutil.Process, str] = {}
    peaks: dict[str, int] = {}
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None:
            for rank, peak in _peaks(run.pid, ranks):
                peaks[rank] = max(peak, peaks.get(rank, 0))
            time.sleep(_SECONDS)
    return peaks if run.returncode == 0 else None


def _peaks(root: int, ranks: dict[psutil.Process, str]) -> Iterator[tuple[str, int]]:
    """The rank and the peak of each worker below a process; `ranks` remembers which process is a worker."""
    try:
        children = psutil.Process(root).children(recursive=True)
    except psutil.Error:
        return
    for process in children:
        try:
            # A process that was just forked has the command of torchrun for a moment.
            if process not in ranks and process.cmdline()[1:4] == ["-u", "-m", "ortlaunch.worker"]:
                ranks[process] = process.environ()["RANK"]
            if process in ranks:
                yield ranks[process], _high_water(process.pid)
        except (psutil.Error, OSError, KeyError):
            continue


def _high_water(pid: int) -> int:
    """The largest resident memory of a process so far, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _command(*words: str, folder: str) -> subprocess.CompletedProcess[str]:
    # With a cache of its own an estimate is not calibrated by other runs.
    return subprocess.run(
        [sys.executable, "-m", "ortlaunch", *words],
        cwd=folder,
        env={**os.environ, "ORTLAUNCH_CACHE": f"{folder}/cache"},
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    main()
