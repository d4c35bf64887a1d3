"""Engines on two real workers: no exchange before the last micro-batch, no step with numbers that are not finite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ortlaunch


def _case(trainer: str, stage: int | None, precision: str, *more: str) -> str:
    zero = [] if stage is None else [f"trainer.zero_stage={stage}"]
    return ",".join([f"trainer={trainer}", *zero, f"train.precision={precision}", "train.grad_accumulation=3", *more])


_FP16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()
CASES = {
    **{f"ddp-{p}": _case("ddp", None, p, "backend=eager") for p in ("fp32", "bf16", "fp16")},
    "ddp-ort": _case("ddp", None, "fp32", "backend=ort"),
    "ddp-sgd": _case("ddp", None, "fp32", "backend=eager", "optimizer=sgd"),
    "ddp-adafactor": _case("ddp", None, "fp32", "backend=eager", "optimizer=adafactor"),
    "ddp-unclipped": _case("ddp", None, "fp32", "backend=eager", "train.clip_grad_norm=null"),
    **{
        f"zero{stage}-{p}": _case("deepspeed", stage, p, "backend=eager")
        for stage in range(4)
        for p in ("fp32", "bf16", "fp16")
        # DeepSpeed runs fp16 only on processors with instructions for it, and not at stage 0.
        if p != "fp16" or (_FP16 and stage > 0)
    },
    # Refused on the CPU, where there is nothing to move; the way through DeepSpeed is the same as from a GPU.
    **{
        f"zero{stage}-offload": _case("deepspeed", stage, "fp32", "backend=eager", "trainer.offload_optimizer=true")
        for stage in (1, 2, 3)
    },
    "zero2-ort": _case("deepspeed", 2, "fp32", "backend=ort"),
}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw, by case."""
    out = tmp_path_factory.mktemp("probe") / "seen.pt"
    script = Path(__file__).with_name("engine_probe.py")
    cases = [f"{name}:{overrides}" for name, overrides in CASES.items()]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=1"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            *(str(script), str(out), *cases),
        ],
        env=os.environ
        | {"PYTHONPATH": str(Path(ortlaunch.__file__).parents[1]), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        | {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    ranks = [torch.load(f"{out}.{rank}") for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_exchanged_before_the_last_micro_batch(probed: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank in probed[name]:
        *before, last = rank["collectives"]
        assert last > 0
        if name.startswith(("zero2", "zero3")):
            # Where gradients are sharded, no worker could keep the sum: they are reduced at each micro-batch.
            assert min(before) > 0
        else:
            assert before == [0, 0]


@pytest.mark.parametrize("name", CASES)
def test_a_bad_loss_on_one_worker_changes_the_weights_of_none(
    probed: dict[str, list[dict[str, Any]]], name: str
) -> None:
    for rank in probed[name]:
        assert rank["finite"]
        assert rank["kept"]
        assert rank["kept afterwards"]


@pytest.mark.parametrize("name", CASES)
def test_every_worker_knows_of_it_and_the_right_one_is_to_blame(
    probed: dict[str, list[dict[str, Any]]], name: str
) -> None:
    good, bad = (rank["read"] for rank in probed[name])
    if name.endswith("fp16"):
        # An overflow is no failure there: the others go on, and do not step, until the next log step.
        assert (good, bad) == ((0, 0), (5, 0))
        assert [rank["tripped"] for rank in probed[name]] == [False, False]
    else:
        assert (good, bad) == ((0, 5), (5, 5))
        assert [rank["tripped"] for rank in probed[name]] == [True, True]
