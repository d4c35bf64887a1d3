"""The process in which ``ortlaunch check`` looks: ``python -m ortlaunch.check.process FOLDER [--no-cost]``.

Reads ``FOLDER/config.yaml``; leaves ``FOLDER/report.json``, or ``FOLDER/refused.txt`` where the request is wrong.
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
from ortlaunch.base.processes import die_with_parent
from ortlaunch.check.cost import check_cost
from ortlaunch.check.export import Setting, check_export
from ortlaunch.check.parity import STEPS, check_parity
from ortlaunch.check.prepare import Place, built, first_batches, place
from ortlaunch.check.randomness import check_randomness
from ortlaunch.check.report import Cost, Export, Parity, Randomness, Report, Structure, to_json
from ortlaunch.check.structure import check_calls, check_structure
from ortlaunch.check.verdict import verdict
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import Config, Fallback, OrtConfig
from ortlaunch.config.trainers import trainer_of
from ortlaunch.models.task import make_task
from ortlaunch.ort.find_blocks import find_blocks
from ortlaunch.trainer.engines.torch_engine import TorchEngine
from ortlaunch.trainer.seeds import seed_everything

_BATCH = 4
"""Samples in the small batches that everything but cost is looked at with; BatchNorm needs more than one."""

_PACKAGES = ("torch", "transformers", "onnx", "onnxruntime-training", "onnxruntime-training-cpu")


def check(config: Config, folder: Path, threads: int, *, with_cost: bool) -> Report:
    """Looks at everything.

    Args:
        config: the run's, with an OrtConfig for backend.
        folder: holds it as ``config.yaml``; takes logs.
        threads: of a worker.
        with_cost: measure the backends, too.

    Raises:
        RequestError: the model or the data cannot be had at all.
    """
    here = place(config, threads)
    model = built(config)
    structure = check_structure(model)
    # Before ORTModule has the model: a run under ZeRO 3 would be refused without them.
    blocks = _zero3_blocks(config, model) if structure.status != "failed" else None
    parts: tuple[Export | None, Parity | None, Randomness | None] = (None, None, None)
    cost = None
    if structure.status != "failed":
        parts = _compared(config, model, here, structure)
    if with_cost and structure.status != "failed":
        cost = check_cost(folder, config, threads)
    fit, line = verdict(structure, *parts, cost)
    if blocks is not None and fit:
        line += f"; here as a whole, and under ZeRO 3 {blocks}, which the run checks when it starts"
    if not with_cost:
        cost = Cost("skipped")
    return Report(
        fit,
        line,
        model=config.model.target or config.model.name,
        data=config.data.name,
        device=_device_name(here),
        precision=config.train.precision.value,
        versions=_versions(),
        structure=structure,
        export=parts[0],
        parity=parts[1],
        randomness=parts[2],
        cost=cost,
    )


def _zero3_blocks(config: Config, model: torch.nn.Module) -> str | None:
    """What ONNX Runtime would run of the model under ZeRO 3, in words; None under another trainer.

    Raises:
        RequestError: the model has no repeated blocks, or none that ``backend.blocks`` names.
    """
    if trainer_of(config.trainer).zero_stage(config.trainer) != 3:
        return None
    assert isinstance(config.backend, OrtConfig)
    found = find_blocks(model, config.backend.blocks)
    return f"block by block ({len(found)} of {', '.join(sorted({type(block).__name__ for block in found.values()}))})"


def _compared(
    config: Config, model: torch.nn.Module, here: Place, structure: Structure
) -> tuple[Export | None, Parity | None, Randomness | None]:
    size = max(2, min(_BATCH, config.train.batch_size))
    batches = first_batches(config, size, STEPS + 1, model, here.device)
    model.to(here.device)
    engine = TorchEngine(model, config, here.worker, make_task(model, batches[0]))
    check_calls(model, batches[0], structure)
    if structure.status == "failed":
        return None, None, None
    seed_everything(config.seed + 1)
    assert isinstance(config.backend, OrtConfig)
    # An export of its own: that is what is looked at, and timed.
    backend = dataclasses.replace(config.backend, fallback=Fallback.error, export_cache=False)
    setting = Setting(make_task(model, batches[0]), engine.precision_context, backend, here.threads, config.seed)
    export, wrapped = check_export(model, batches, setting)
    if not export.succeeded:
        return export, Parity("skipped"), Randomness("skipped")
    parity = check_parity(model, batches[:STEPS], setting) if export.comparable else Parity("skipped")
    return export, parity, check_randomness(wrapped, batches[0], setting)


def _device_name(here: Place) -> str:
    return torch.cuda.get_device_name(here.device) if here.device.type == "cuda" else "cpu"


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Looks at what the folder's configuration says."""
    die_with_parent()
    folder = Path(sys.argv[1])
    try:
        config, threads = load_config(folder / "config.yaml"), int(os.environ["OMP_NUM_THREADS"])
        report = check(config, folder, threads, with_cost="--no-cost" not in sys.argv[2:])
    except RequestError as error:
        (folder / "refused.txt").write_text(str(error))
    else:
        (folder / "report.json").write_text(json.dumps(to_json(report), indent=2))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
