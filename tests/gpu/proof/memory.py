"""The memory of the GPU, beside what ``ortlaunch estimate`` says without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests.gpu.proof.proof import Check, Failed, Proof, Training
from tests.gpu.proof.report import Row

FAR = 0.1
"""Largest relative distance between what is reserved and what was estimated."""
_SMALL_GIB = 0.5
"""Below this, kernels' workspaces decide, and only the band is looked at."""
_GPT2 = ("model=gpt2", "data.seq_len=1024", "train.batch_size=8")
_LLAMA = (
    *("model=llama", "model.params.hidden_size=1024", "model.params.intermediate_size=2816", "data.seq_len=1024"),
    *("model.params.num_attention_heads=16", "model.params.num_key_value_heads=4", "train.batch_size=8"),
)
_VIT = (
    *("model=vit", "model.params.hidden_size=768", "model.params.num_hidden_layers=12", "train.batch_size=256"),
    *("model.params.num_attention_heads=12", "model.params.intermediate_size=3072"),
)
CASES: dict[str, tuple[str, ...]] = {
    "GPT-2, DDP, bf16": (*_GPT2, "trainer=ddp", "train.precision=bf16"),
    "GPT-2, DDP, fp32, evaluation": (*_GPT2, "train.batch_size=4", "trainer=ddp", "train.eval_every=3"),
    "GPT-2, FSDP2, bf16, checkpointing": (
        *(*_GPT2, "trainer=fsdp", "train.precision=bf16", "train.activation_checkpointing=true"),
    ),
    "GPT-2, ZeRO 3, fp16": (*_GPT2, "trainer=deepspeed", "trainer.zero_stage=3", "train.precision=fp16"),
    "GPT-2, ZeRO 2, bf16, offload": (
        *(*_GPT2, "trainer=deepspeed", "trainer.zero_stage=2", "trainer.offload_optimizer=true"),
        "train.precision=bf16",
    ),
    "Llama with grouped heads, ZeRO 1, bf16": (
        *(*_LLAMA, "trainer=deepspeed", "trainer.zero_stage=1", "train.precision=bf16"),
    ),
    "ViT base, DDP, bf16, SGD": (*_VIT, "trainer=ddp", "train.precision=bf16", "optimizer=sgd"),
    "BERT base, DDP, fp32, torch.compile": (
        *("model=bert", "data.seq_len=512", "train.batch_size=8", "trainer=ddp", "backend=compile"),
    ),
}
"""The keys of each run. A key that comes twice has its last value."""
_COMMON = (
    *("backend=eager", "tracking=none", "train.steps=6", "train.log_every=1", "train.checkpoint_every=null"),
    "train.save_weights=false",
)


def rows(proof: Proof) -> Iterator[Row]:
    """One row for each run."""
    expected = f"reserved within {FAR:.0%} of the estimate, and at most its high figure"
    checks = [Check(name, expected, lambda words=words: _look(proof, words)) for name, words in CASES.items()]
    yield from proof.judge(checks, together=True)


def _look(proof: Proof, words: tuple[str, ...]) -> str:
    proof.needs_cuda("the memory of a GPU")
    keys = once((*_COMMON, *words))
    run = proof.train(*keys)
    ended = proof.command(
        ["-m", "ortlaunch", "estimate", *proof.keys(), *keys, "--quick", "--format=json"], proof.new_folder()
    )
    if ended.code not in (0, 1):
        raise Failed(ended.tail)
    return compared(run, json.loads(ended.output[ended.output.index("{") :]))


def compared(run: Training, report: dict[str, Any]) -> str:
    """Says how far a run's memory is from a report of ``ortlaunch estimate``.

    Raises:
        Failed: too far.
    """
    worker = report["workers"][0]
    mib = 2**20
    reserved = run.last("memory/peak_reserved_gib") * 1024
    allocated = run.last("memory/peak_allocated_gib") * 1024
    tensors, estimated = peaks(report)
    low, high = worker["low_bytes"] / mib, worker["high_bytes"] / mib
    far = estimated / reserved - 1
    text = (
        f"reserved {reserved:,.0f} MiB, estimated {estimated:,.0f} ({far:+.1%}); allocated {allocated:,.0f}, "
        f"estimated {tensors:,.0f} ({tensors / allocated - 1:+.1%}); band {low:,.0f} to {high:,.0f}"
    )
    is_eager = report["backend"] == "eager"
    # What CUDA and NCCL hold beside it is not known of one process alone.
    if not reserved <= high or (is_eager and reserved > _SMALL_GIB * 1024 and abs(far) > FAR):
        raise Failed(text)
    return text


def peaks(report: dict[str, Any]) -> tuple[float, float]:
    """MiB that the first worker allocates and reserves at most, by a report."""
    phases = report["workers"][0]["phases"].values()
    tensors, reserved = (max(phase[name] for phase in phases) for name in ("tensors_bytes", "process_bytes"))
    return tensors / 2**20, reserved / 2**20


def once(words: Iterable[str]) -> tuple[str, ...]:
    """The keys, each with its last value alone."""
    return tuple(f"{key}={value}" for key, value in dict(word.split("=", 1) for word in words).items())
