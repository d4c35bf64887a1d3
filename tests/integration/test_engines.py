"""Engines on two real workers: no exchange before the last micro-batch, no step with numbers that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ort import runnable
from tests.support.torchrun import run_probe


def _case(trainer: str, stage: int | None, precision: str, *more: str) -> str:
    zero = [] if stage is None else [f"trainer.zero_stage={stage}"]
    return ",".join([f"trainer={trainer}", *zero, f"train.precision={precision}", "train.grad_accumulation=3", *more])


# With several buckets, DeepSpeed copies gradients as it does by itself; the model has 19,210 weights.
_OWN = (
    *("+trainer.config.zero_optimization.reduce_scatter=true", "+trainer.config.prescale_gradients=false"),
    "+trainer.config.zero_optimization.reduce_bucket_size=17000",
)
_GLOO = "trainer.shared_memory=false"
_FP16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()
# Two of them in the model.
_BLOCKS = ("backend=eager", "trainer.blocks=Linear")
_OF_FSDP = {
    # Two blocks are gathered for the first forward and for each backward; their gradients are reduced at the last.
    "fsdp": [4, 2, 4],
    "fsdp-kept": [2, 0, 2],
    "fsdp-reduced": [6, 6, 6],
}
CASES = runnable(
    {
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
        "zero1-own": _case("deepspeed", 1, "fp32", "backend=eager", *_OWN),
        **{f"zero{stage}-gloo": _case("deepspeed", stage, "fp32", "backend=eager", _GLOO) for stage in (0, 1)},
        "ddp-gloo": _case("ddp", None, "fp32", "backend=eager", _GLOO),
        # Refused on the CPU, where there is nothing to move; the way through DeepSpeed is the same as from a GPU.
        **{
            f"zero{stage}-offload": _case("deepspeed", stage, "fp32", "backend=eager", "trainer.offload_optimizer=true")
            for stage in (1, 2, 3)
        },
        **{f"fsdp-{p}": _case("fsdp", None, p, *_BLOCKS) for p in ("fp32", "bf16", "fp16")},
        "fsdp-sgd": _case("fsdp", None, "fp32", *_BLOCKS, "optimizer=sgd"),
        "fsdp-kept": _case("fsdp", None, "fp32", *_BLOCKS, "trainer.reshard_after_forward=false"),
        "fsdp-reduced": _case("fsdp", None, "fp32", *_BLOCKS, "trainer.accumulate_sharded=true"),
        "zero2-ort": _case("deepspeed", 2, "fp32", "backend=ort"),
    }
)


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw, by case."""
    out = tmp_path_factory.mktemp("probe") / "seen.pt"
    cases = [f"{name}:{overrides}" for name, overrides in CASES.items()]
    run_probe(Path(__file__).with_name("engine_probe.py"), out, *cases)
    ranks = [torch.load(f"{out}.{rank}") for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_exchanged_before_the_last_micro_batch(probed: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank in probed[name]:
        if name.startswith("fsdp"):
            assert rank["collectives"] == _OF_FSDP.get(name, _OF_FSDP["fsdp"])
            continue
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
        assert [rank["known_discarded"] for rank in probed[name]] == [False, False]
    else:
        assert (good, bad) == ((0, 5), (5, 5))
        assert [rank["known_discarded"] for rank in probed[name]] == [True, True]


# Of a GPU without the optimizer, which is beside the model here.
@pytest.mark.parametrize("name", [name for name in CASES if "offload" not in name])
def test_what_the_start_sums_up_is_held(probed: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank in probed[name]:
        least, held, largest = rank["bytes"]
        # Where gradients are cut, DeepSpeed keeps the whole gradient of each weight of which the worker has a part.
        is_cut = name in ("zero1-bf16", "zero1-own") or name.startswith("zero2")
        assert abs(held - least) <= (largest if is_cut else 0.001 * least)


def test_zero_1_on_the_cpu_takes_the_steps_of_deepspeeds_own_way(probed: dict[str, list[dict[str, Any]]]) -> None:
    for ours, own in zip(probed["zero1-fp32"], probed["zero1-own"], strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours["moved"], own["moved"], strict=True))


@pytest.mark.parametrize("name", ["ddp", "zero0", "zero1"])
def test_shared_memory_gives_the_weights_that_gloo_gives(probed: dict[str, list[dict[str, Any]]], name: str) -> None:
    for ours, by_gloo in zip(probed[f"{name}-fp32"], probed[f"{name}-gloo"], strict=True):
        assert ours["through memory"] > 0
        assert by_gloo["through memory"] == 0
        assert all(torch.equal(*pair) for pair in zip(ours["moved"], by_gloo["moved"], strict=True))
