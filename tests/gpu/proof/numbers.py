"""Every trainer and precision on the device: what it computes, against fp32 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tests.gpu.proof.proof import Check, Failed, Proof, Training
from tests.gpu.proof.report import Row

STEPS = 20
SMALL = (
    *("model=gpt2_nano", "model.params.n_layer=2", "data.seq_len=64", "backend=eager", "tracking=none"),
    *(f"model.params.{kind}_pdrop=0" for kind in ("resid", "embd", "attn")),
    *(f"train.steps={STEPS}", "train.log_every=1", "train.save_weights=false", "train.checkpoint_every=null"),
)
"""A small model without dropout, so that all trainers compute the same numbers."""
TRAINERS = {
    "DDP": ("trainer=ddp",),
    **{f"DeepSpeed ZeRO {stage}": ("trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4)},
    "FSDP2": ("trainer=fsdp",),
}
NEAR, HALF_NEAR = 1e-3, 0.05
"""Largest relative difference of a loss in fp32, and of the last loss in half precision."""
HALF = {
    "bf16": ("DDP", "DeepSpeed ZeRO 1", "DeepSpeed ZeRO 2", "FSDP2"),
    "fp16": ("DDP", "DeepSpeed ZeRO 2", "FSDP2"),
}
OFFLOADED = (*TRAINERS["DeepSpeed ZeRO 2"], "trainer.offload_optimizer=true")
_COMPILED = ("backend=compile", *TRAINERS["DDP"])


def rows(proof: Proof) -> Iterator[Row]:
    """One row for each trainer, for compile, and for trainers in half precision."""
    # The longest run, and the one that all rows in fp32 are compared with.
    proof.ahead(*SMALL, *_COMPILED, long=True)
    proof.ahead(*SMALL, *TRAINERS["DDP"], device="cpu")
    near = f"{STEPS} losses, each within {NEAR:.1%} of the CPU's under DDP"
    checks = [
        Check(f"{name}, fp32", near, lambda words=words: _same(proof, *words)) for name, words in TRAINERS.items()
    ]
    checks[0] = Check(f"DDP over {backend(proof)}, fp32", near + ", falling", lambda: _ddp(proof))
    checks.append(Check("DeepSpeed ZeRO 2 with its optimizer on the host, fp32", near, lambda: _offloaded(proof)))
    for precision, names in HALF.items():
        expected = f"the last loss within {HALF_NEAR:.0%} of fp32's, and not the same"
        checks += [
            Check(
                f"{name}, {precision}", expected, lambda name=name, precision=precision: _half(proof, name, precision)
            )
            for name in names
        ]
    # It comes last, so that it takes no other row's time where one runs at a time.
    checks.append(Check("torch.compile under DDP, fp32", near, lambda: _same(proof, *_COMPILED, long=True)))
    yield from proof.judge(checks, together=True)


def backend(proof: Proof) -> str:
    """The library by which workers talk."""
    return "NCCL" if proof.is_cuda else "gloo"


def _ddp(proof: Proof) -> str:
    mine = proof.train(*SMALL, *TRAINERS["DDP"])
    if mine.tags.get("ortlaunch.device") != proof.device:
        raise Failed(f"it ran on {mine.tags.get('ortlaunch.device')}")
    if mine.losses[STEPS] >= mine.losses[1]:
        raise Failed(f"the loss went from {mine.losses[1]:.4f} to {mine.losses[STEPS]:.4f}")
    seen = f"{proof.workers} worker(s), loss {mine.losses[1]:.4f} to {mine.losses[STEPS]:.4f}; "
    if not proof.is_cuda:
        return seen + "the other rows are compared with it"
    # NCCL_DEBUG=VERSION makes it say so when a communicator is made.
    lines = [line.strip() for line in mine.log(0).splitlines() if "NCCL version" in line]
    seen += (lines[0] if lines else "NCCL left no line in the log") + "; "
    if proof.workers == 1:
        seen += "nothing was exchanged between GPUs; "
    return seen + furthest(mine.losses, _reference(proof))


def _same(proof: Proof, *words: str, long: bool = False) -> str:
    return furthest(proof.train(*SMALL, *words, long=long).losses, _reference(proof))


def _offloaded(proof: Proof) -> str:
    proof.needs_cuda("on the CPU the optimizer is on the host anyway")
    return _same(proof, *OFFLOADED)


def _reference(proof: Proof) -> dict[int, float]:
    return proof.train(*SMALL, *TRAINERS["DDP"], device="cpu").losses


def furthest(mine: dict[int, float], theirs: dict[int, float], near: float = NEAR) -> str:
    """Says how far two runs' losses are from each other.

    Raises:
        Failed: other steps, or further than `near`.
    """
    if not theirs or mine.keys() != theirs.keys():
        raise Failed(f"losses of {len(mine)} steps against {len(theirs)}")
    distances = {step: abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in theirs}
    # A loss that is not a number is infinitely far.
    step = max(distances, key=lambda step: math.inf if math.isnan(distances[step]) else distances[step])
    far = distances[step]
    text = f"furthest {far:.1e} at step {step}" if far else f"the same {len(mine)} losses to the bit"
    if not far <= near:
        raise Failed(f"{text}: {mine[step]} against {theirs[step]}")
    return text


def _half(proof: Proof, name: str, precision: str) -> str:
    if precision == "fp16":
        proof.needs_cuda("fp16 needs CUDA")
    half = proof.train(*SMALL, *TRAINERS[name], f"train.precision={precision}")
    full = proof.train(*SMALL, *TRAINERS[name])
    far = abs(half.losses[STEPS] - full.losses[STEPS]) / full.losses[STEPS]
    text = f"last loss {half.losses[STEPS]:.4f}, {full.losses[STEPS]:.4f} in fp32 ({far:.2%})"
    if not far <= HALF_NEAR or half.losses == full.losses:
        raise Failed(text)
    return text + _scale(half)


def _scale(run: Training) -> str:
    scales = run.series("train/loss_scale")
    return f"; loss scale {scales[max(scales)]:.0f}" if scales else ""
