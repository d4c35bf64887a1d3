"""Whole runs on one GPU: they train, ONNX Runtime's are eager's, and memory and precision are what was asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.proof.numbers import STEPS, TRAINERS
from tests.gpu.proof.proof import Training

Train = Callable[..., Training]

_DDP = TRAINERS["DDP"]
_TRAINERS = (_DDP, TRAINERS["DeepSpeed ZeRO 1"], TRAINERS["DeepSpeed ZeRO 2"])


@pytest.mark.parametrize("backend", [(), ("backend=compile",)], ids=["eager", "compile"])
def test_a_run_trains_on_the_gpu_and_tells_its_memory(train_small: Train, backend: tuple[str, ...]) -> None:
    run = train_small(*backend, *_DDP)
    assert run.tags["ortlaunch.device"] == "cuda"
    assert run.losses[STEPS] < run.losses[1]
    assert 0 < run.last("memory/peak_allocated_gib") <= run.last("memory/peak_reserved_gib")
    assert run.last("summary/tokens_per_second_median") > 0


@pytest.mark.parametrize("trainer", _TRAINERS, ids=["ddp", "zero1", "zero2"])
def test_bf16_stays_near_fp32(train_small: Train, trainer: tuple[str, ...]) -> None:
    half = train_small(*trainer, "train.precision=bf16").losses
    full = train_small(*trainer).losses
    assert half[STEPS] == pytest.approx(full[STEPS], rel=0.05)
    assert half != full


@pytest.mark.usefixtures("ort_on_cuda")
@pytest.mark.parametrize("trainer", _TRAINERS, ids=["ddp", "zero1", "zero2"])
def test_onnx_runtime_on_cuda_has_eagers_losses(train_small: Train, trainer: tuple[str, ...]) -> None:
    ort = train_small("backend=ort", *trainer)
    assert ort.tags["ortlaunch.ort_active"] == "true"
    assert ort.losses == pytest.approx(train_small(*trainer).losses, rel=1e-4)


@pytest.mark.usefixtures("ort_on_cuda")
def test_onnx_runtime_in_bf16_stays_near_eager(train_small: Train) -> None:
    ort = train_small("backend=ort", *_DDP, "train.precision=bf16")
    assert ort.tags["ortlaunch.ort_active"] == "true"
    eager = train_small(*_DDP, "train.precision=bf16")
    assert ort.losses[STEPS] == pytest.approx(eager.losses[STEPS], rel=0.05)
