"""Measures the cost of a backend: a few training steps of one worker in a separate process.

``python -m ortlaunch.check.cost FOLDER BACKEND`` measures one backend and writes ``FOLDER/cost-BACKEND.json``;
`check_cost` starts one such process after the other. Peak memory of several backends in one process would be the peak
of all of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ortlaunch.base.modules import add_working_folder
from ortlaunch.base.processes import die_with_parent
from ortlaunch.base.programs import module_command
from ortlaunch.check.report import BackendCost, Cost
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import BackendConfig, CompileConfig, Config, EagerConfig, OrtConfig

BACKENDS = ("eager", "compile", "ort")
_WARM_UP = 2
_STEPS = 7
_ENOUGH_SECONDS = 20.0
"""No further step is begun after this, so that a large model does not take minutes."""
_LEAST_STEPS = 3
_LONGEST_SECONDS = 900.0


def check_cost(folder: Path, config: Config, threads: int) -> Cost:
    """Measures all backends one after the other.

    Args:
        folder: contains ``config.yaml``; the logs are written to it.
        config: the configuration of the run.
        threads: number of threads of a worker.
    """
    costs, seconds = {}, None
    for backend in BACKENDS:
        measured = _in_a_process(folder, backend)
        seconds = measured.pop("export_seconds", None) if backend == "ort" else seconds
        measured.pop("export_seconds", None)
        costs[backend] = BackendCost(**measured)
    failed = any(cost.error for cost in costs.values())
    return Cost(
        "warning" if failed else "ok",
        batch_size=config.train.batch_size,
        threads=threads,
        backends=costs,
        export_seconds=seconds,
        pays_off_after_steps=pays_off_after(seconds, costs["eager"].step_seconds, costs["ort"].step_seconds),
    )


def pays_off_after(export: float | None, eager: float | None, ort: float | None) -> int | None:
    """Returns the steps after which the saved time exceeds the export's; None if that is never or not known."""
    if export is None or eager is None or ort is None or ort >= eager:
        return None
    return int(export / (eager - ort)) + 1


def _in_a_process(folder: Path, backend: str) -> dict[str, Any]:
    log = folder / f"cost-{backend}.log"
    with log.open("wb") as output:
        command = [*module_command("ortlaunch.check.cost"), str(folder), backend]
        try:
            code = subprocess.run(
                command, stdout=output, stderr=output, timeout=_LONGEST_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {_LONGEST_SECONDS:.0f} s"}
    result = folder / f"cost-{backend}.json"
    if code == 0 and result.is_file():
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {"error": lines[-1].strip() if lines else f"ended with {code}"}


def measure(config: Config, threads: int) -> dict[str, float | None]:
    """Trains a few steps on the configured backend; `BackendCost` describes the results."""
    import torch

    from ortlaunch.config.devices import resolve_device
    from ortlaunch.metrics.memory import peak_memory_gib
    from ortlaunch.models.task import make_task
    from ortlaunch.trainer.engines.torch_engine import TorchEngine
    from ortlaunch.trainer.prepare import build_seeded, first_batches
    from ortlaunch.trainer.workers import single_worker
    from ortlaunch.trainer.wrapping import wrap_backend

    worker = single_worker(resolve_device(config.device), threads)
    model = build_seeded(config)
    batches = first_batches(config, config.train.batch_size, _WARM_UP, model, worker.device)
    task = make_task(model, batches[0])
    # The model is wrapped as in a run, except that no graphs are saved.
    inner = wrap_backend(model.to(worker.device), config.backend, threads=threads, onnx_dir=None, train=config.train)
    engine = TorchEngine(inner, config, worker, task)
    seconds: list[float] = []
    begun = time.perf_counter()
    while len(seconds) < _WARM_UP + _STEPS:
        since = time.perf_counter()
        if len(seconds) >= _WARM_UP + _LEAST_STEPS and since - begun > _ENOUGH_SECONDS:
            break
        engine.micro_step(batches[len(seconds) % len(batches)], last=True)
        engine.step()
        if worker.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - since)
    step = statistics.median(seconds[_WARM_UP:])
    return {
        "step_seconds": step,
        "start_seconds": max(0.0, seconds[0] - step),
        "peak_memory_gib": peak_memory_gib(worker.device),
        "export_seconds": _export_seconds(inner) if isinstance(config.backend, OrtConfig) else None,
    }


def _export_seconds(inner: Any) -> float | None:
    from ortlaunch.ort import session

    return session.export_seconds(inner)


def _with_backend(config: Config, name: str) -> Config:
    plain: dict[str, BackendConfig] = {"eager": EagerConfig(), "compile": CompileConfig(), "ort": OrtConfig()}
    backend = config.backend if config.backend.name == name else plain[name]
    if isinstance(backend, OrtConfig):
        # The cost of an export is measured, so it must not come from the cache.
        backend = dataclasses.replace(backend, export_cache=False)
    return dataclasses.replace(config, backend=backend)


def main() -> None:
    """Measures one backend and writes the result."""
    die_with_parent()
    add_working_folder()
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    config = _with_backend(load_config(folder / "config.yaml"), backend)
    result = measure(config, int(os.environ["OMP_NUM_THREADS"]))
    (folder / f"cost-{backend}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    # The process ends here without clean-up, as a worker does, because native threads may hang at exit.
    os._exit(0)


if __name__ == "__main__":
    main()
