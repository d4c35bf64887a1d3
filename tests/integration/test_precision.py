"""Every backend, trainer and precision that the CPU is said to have trains on two real workers."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from ortlaunch.config.precisions import Cell, cells
from ortlaunch.config.schema import Device, Precision
from tests.support.torchrun import run_probe

TOLERANCE = {Precision.fp32: 1e-5, Precision.bf16: 3e-2, Precision.fp16: 5e-3}


def _name(cell: Cell) -> str:
    return f"{cell.backend}-{cell.trainer.replace(' ', '')}-{cell.precision.value}"


def _overrides(cell: Cell) -> str:
    trainer, _, stage = cell.trainer.partition(" ")
    zero = [f"trainer.zero_stage={stage}"] if stage else []
    # A small first scale, so that no step overflows and all can be compared.
    scale = ["+trainer.config.fp16.initial_scale_power=8"] if stage and cell.precision is Precision.fp16 else []
    # ONNX Runtime takes a model under ZeRO 3 block by block, and this one has no repeated ones to be found.
    blocks = ["backend.blocks=Linear"] if cell.backend == "ort" and stage == "3" else []
    words = [f"backend={cell.backend}", *blocks, f"trainer={trainer}", *zero, *scale]
    return ",".join([*words, f"train.precision={cell.precision.value}"])


def _has_instructions(cell: Cell) -> bool:
    is_half = cell.precision is Precision.fp16 and cell.trainer.startswith("deepspeed")
    return not is_half or torch.ops.mkldnn._is_mkldnn_fp16_supported()


RUNNING = {_name(cell): cell for cell in cells(Device.cpu) if cell.refusal is None}
NIGHTLY = {
    name
    for name, cell in RUNNING.items()
    if cell.backend == "compile" or cell.trainer in ("deepspeed 0", "deepspeed 1")
}
"""torch.compile takes its time for each cell; a ready job trains with it under ddp in fp32."""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, list[float]]:
    """The loss of each step by cell, of those that are tested now."""
    out = tmp_path_factory.mktemp("precision") / "losses.pt"
    wanted = {item.callspec.params["name"] for item in request.session.items if item.module is request.module}
    running = {name: cell for name, cell in RUNNING.items() if name in wanted | {"eager-single-fp32"}}
    cases = [f"{name}:{_overrides(cell)}" for name, cell in running.items() if _has_instructions(cell)]
    run_probe(Path(__file__).with_name("precision_probe.py"), out, *cases)
    return torch.load(out)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in RUNNING]
)
def test_it_trains_to_what_one_eager_worker_in_fp32_trains_to(losses: dict[str, list[float]], name: str) -> None:
    cell = RUNNING[name]
    if not _has_instructions(cell):
        pytest.skip("DeepSpeed runs fp16 on processors with instructions for it, and this one has none")
    expected = losses["eager-single-fp32"]
    assert statistics.mean(losses[name][-5:]) < 0.9 * statistics.mean(losses[name][:5])
    assert losses[name] == pytest.approx(expected, abs=TOLERANCE[cell.precision])
    if cell.precision is not Precision.fp32:
        assert losses[name] != pytest.approx(expected, abs=1e-6), "the precision had no effect"
