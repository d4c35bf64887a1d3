"""Whole runs on one GPU: they train, ONNX Runtime's are eager's, and memory and precision are what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Train = Callable[..., dict[str, Any]]

_TRAINERS = (
    ("trainer=ddp",),
    ("trainer=deepspeed", "trainer.zero_stage=1"),
    ("trainer=deepspeed", "trainer.zero_stage=2"),
)


@pytest.mark.parametrize("backend", ["eager", "compile"])
def test_a_run_trains_on_the_gpu_and_tells_its_memory(train: Train, backend: str) -> None:
    run = train(f"backend={backend}", "trainer=ddp")
    assert run["ortlaunch.device"] == "cuda"
    assert run["losses"][20] < run["losses"][1]
    assert 0 < run["memory/peak_allocated_gib"] <= run["memory/peak_reserved_gib"]
    assert run["summary/tokens_per_second_median"] > 0


@pytest.mark.parametrize("trainer", _TRAINERS, ids=["ddp", "zero1", "zero2"])
def test_bf16_stays_near_fp32(train: Train, trainer: tuple[str, ...]) -> None:
    half = train("backend=eager", "train.precision=bf16", *trainer)["losses"]
    full = train("backend=eager", *trainer)["losses"]
    assert half[20] == pytest.approx(full[20], rel=0.05)
    assert half != full


@pytest.mark.usefixtures("ort_on_cuda")
@pytest.mark.parametrize("trainer", _TRAINERS, ids=["ddp", "zero1", "zero2"])
def test_onnx_runtime_on_cuda_has_eagers_losses(train: Train, trainer: tuple[str, ...]) -> None:
    ort = train("backend=ort", *trainer)
    assert ort["ortlaunch.ort_active"] == "true"
    assert ort["losses"] == pytest.approx(train("backend=eager", *trainer)["losses"], rel=1e-4)


@pytest.mark.usefixtures("ort_on_cuda")
def test_onnx_runtime_in_bf16_stays_near_eager(train: Train) -> None:
    ort = train("backend=ort", "train.precision=bf16", "trainer=ddp")
    assert ort["ortlaunch.ort_active"] == "true"
    eager = train("backend=eager", "train.precision=bf16", "trainer=ddp")
    assert ort["losses"][20] == pytest.approx(eager["losses"][20], rel=0.05)
