"""The checking process of ``ortlaunch check``: ``python -m ortlaunch.check.process FOLDER [--no-cost]``.

It reads ``FOLDER/config.yaml``. It writes ``FOLDER/report.json``, or ``FOLDER/refused.txt`` if the request is wrong.
``FOLDER/begun.json`` is the report before anything is computed, for the case that a signal ends the process.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import sys
from pathlib import Path

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import add_working_folder
from ortlaunch.base.own_code import report_deaths
from ortlaunch.base.processes import die_with_parent
from ortlaunch.check.cost import check_cost
from ortlaunch.check.export import Setting, check_export
from ortlaunch.check.parity import STEPS, check_parity
from ortlaunch.check.randomness import check_randomness
from ortlaunch.check.report import BEGUN, Cost, Export, Parity, Randomness, Report, Structure, to_json
from ortlaunch.check.structure import check_calls, check_structure
from ortlaunch.check.verdict import verdict
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import Config, Fallback, OrtConfig
from ortlaunch.config.trainers import trainer_of
from ortlaunch.launch.report_process import REFUSED, REPORT
from ortlaunch.ort.find_blocks import find_blocks
from ortlaunch.trainer.engines.torch_engine import TorchEngine
from ortlaunch.trainer.prepare import construct_seeded, first_batches, task_of
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.workers import Workers, single_worker

_BATCH = 4
"""Samples in each batch of all parts except cost; BatchNorm needs more than one."""

_PACKAGES = ("torch", "transformers", "onnx", "onnxruntime-training", "onnxruntime-training-cpu")


def check(config: Config, folder: Path, threads: int, *, with_cost: bool) -> Report:
    """Runs all parts of the check.

    Args:
        config: the configuration of the run, with an OrtConfig as its backend.
        folder: contains ``config.yaml``; logs are written to it.
        threads: number of threads of a worker.
        with_cost: whether to measure the backends, too.

    Raises:
        RequestError: the model or the data cannot be loaded.
    """
    worker = single_worker(resolve_device(config.device), threads)
    model = construct_seeded(config)
    structure = check_structure(model)
    (folder / BEGUN).write_text(json.dumps(to_json(_report(config, worker, structure))))
    # This comes before ORTModule gets the model. A run under ZeRO 3 without such blocks would be refused.
    blocks = _zero3_blocks(config, model) if structure.status != "failed" else None
    parts: tuple[Export | None, Parity | None, Randomness | None] = (None, None, None)
    cost = None
    if structure.status != "failed":
        parts = _compared(config, model, worker, structure)
    if with_cost and structure.status != "failed":
        cost = check_cost(folder, config, threads)
    fit, line = verdict(structure, *parts, cost)
    if blocks is not None and fit:
        line += f"; here as a whole, and under ZeRO 3 {blocks}, which the run checks when it starts"
    if not with_cost:
        cost = Cost("skipped")
    report = _report(config, worker, structure)
    report.fit, report.verdict, report.cost = fit, line, cost
    report.export, report.parity, report.randomness = parts
    return report


def _report(config: Config, worker: Workers, structure: Structure) -> Report:
    """A report of what is known before anything is computed."""
    return Report(
        False,
        "",
        model=config.model.target or config.model.name,
        data=config.data.name,
        device=_device_name(worker),
        precision=config.train.precision.value,
        versions=_versions(),
        structure=structure,
    )


def _zero3_blocks(config: Config, model: torch.nn.Module) -> str | None:
    """Describes the blocks that ONNX Runtime would run under ZeRO 3; None under another trainer.

    Raises:
        RequestError: the model has no repeated blocks, or none that ``backend.blocks`` names.
    """
    if trainer_of(config.trainer).zero_stage(config.trainer) != 3:
        return None
    assert isinstance(config.backend, OrtConfig)
    found = find_blocks(model, config.backend.blocks)
    return f"block by block ({len(found)} of {', '.join(sorted({type(block).__name__ for block in found.values()}))})"


def _compared(
    config: Config, model: torch.nn.Module, worker: Workers, structure: Structure
) -> tuple[Export | None, Parity | None, Randomness | None]:
    size = max(2, min(_BATCH, config.train.batch_size))
    batches = first_batches(config, size, STEPS + 1, model, worker.device)
    model.to(worker.device)
    task = task_of(config, model, batches[0])
    engine = TorchEngine(model, config, worker, task)
    check_calls(model, batches[0], structure, config)
    if structure.status == "failed":
        return None, None, None
    seed_everything(config.seed + 1)
    assert isinstance(config.backend, OrtConfig)
    # The export cache is off, because the export itself is checked and timed.
    backend = dataclasses.replace(config.backend, fallback=Fallback.error, export_cache=False)
    setting = Setting(task, engine.precision_context, backend, worker.threads, config.seed)
    export, wrapped = check_export(model, batches, setting)
    if not export.succeeded:
        return export, Parity("skipped"), Randomness("skipped")
    parity = check_parity(model, batches[:STEPS], setting) if export.comparable else Parity("skipped")
    return export, parity, check_randomness(wrapped, batches[0], setting)


def _device_name(worker: Workers) -> str:
    return torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu"


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Checks the configuration in the folder."""
    die_with_parent()
    report_deaths()
    add_working_folder()
    folder = Path(sys.argv[1])
    try:
        config, threads = load_config(folder / "config.yaml"), int(os.environ["OMP_NUM_THREADS"])
        report = check(config, folder, threads, with_cost="--no-cost" not in sys.argv[2:])
    except RequestError as error:
        (folder / REFUSED).write_text(str(error))
    else:
        (folder / REPORT).write_text(json.dumps(to_json(report), indent=2))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
