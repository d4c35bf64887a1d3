"""The loop on two workers: evaluation, bad losses, the same bits twice, activation checkpointing, optimizers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

_GPT = ("model=gpt2_nano", "model.params.n_layer=2", "data.seq_len=64", "train.log_every=1", "train.batch_size=2")
_RUN = (*_GPT, "train.steps=8", "tracking=none")
# Dropout on: what evaluation, recomputation and determinism could disturb.
_EVAL = ("train.eval_every=3", "train.eval_samples=32")
_AGAIN = ("train.activation_checkpointing=true",)
_SAME = ("train.deterministic=true",)
_ZERO2 = ("trainer=deepspeed", "trainer.zero_stage=2")
# DeepSpeed's buffers of 2 GB would be filled with NaN where torch is deterministic.
_SMALL_BUFFERS = ("+trainer.config.zero_optimization.reduce_bucket_size=1000000",)
_ZERO3 = ("trainer=deepspeed", "trainer.zero_stage=3")
# Attention draws its masks in the precision that it computes in.
_NO_DROPOUT = tuple(f"model.params.{kind}_pdrop=0" for kind in ("resid", "embd", "attn"))

TABLE: dict[str, tuple[str, ...]] = {
    "eager-ddp": ("backend=eager", *_RUN),
    "eager-ddp-eval": ("backend=eager", *_RUN, *_EVAL),
    "eager-single-eval": ("backend=eager", "trainer=single", *_RUN, *_EVAL, "train.batch_size=4"),
    "eager-zero3-eval": ("backend=eager", *_ZERO3, *_RUN, *_EVAL),
    "ort-ddp": ("backend=ort", *_RUN),
    "ort-ddp-eval": ("backend=ort", *_RUN, *_EVAL),
    "ort-zero3-eval": ("backend=ort", *_ZERO3, *_RUN, *_EVAL),
    "eager-ddp-recompute": ("backend=eager", *_RUN, *_AGAIN),
    "eager-zero3": ("backend=eager", *_ZERO3, *_RUN),
    "eager-zero3-recompute": ("backend=eager", *_ZERO3, *_RUN, *_AGAIN),
    "eager-fsdp": ("backend=eager", "trainer=fsdp", *_RUN),
    # The blocks' parameters are gathered once more, within the backward.
    "eager-fsdp-recompute": ("backend=eager", "trainer=fsdp", *_RUN, *_AGAIN),
    "ort-ddp-recompute": ("backend=ort", *_RUN, *_AGAIN),
    "eager-ddp-same": ("backend=eager", *_RUN, *_SAME),
    "eager-ddp-same-again": ("backend=eager", *_RUN, *_SAME),
    "eager-zero2-same": ("backend=eager", *_ZERO2, *_SMALL_BUFFERS, *_RUN, *_SAME),
    "eager-zero2-same-again": ("backend=eager", *_ZERO2, *_SMALL_BUFFERS, *_RUN, *_SAME),
    "ort-ddp-same": ("backend=ort", *_RUN, *_SAME),
    "ort-ddp-same-again": ("backend=ort", *_RUN, *_SAME),
    "adafactor": ("backend=eager", "optimizer=adafactor", *_RUN),
    "sgd-decayed": ("backend=eager", *_ZERO2, "optimizer=sgd", "optimizer.weight_decay=0.1", *_RUN),
    "bf16": ("backend=eager", *_RUN, *_EVAL, "train.precision=bf16", "scheduler=cosine", "scheduler.warmup_steps=2"),
    "fp16": ("backend=eager", *_RUN, *_NO_DROPOUT, "train.precision=fp16"),
    "fp32": ("backend=eager", *_RUN, *_NO_DROPOUT),
    "loaders": ("backend=eager", *_RUN, "data.workers=1"),
}

# Which tests/numbers holds against fp64 in CI, or which another row has under another trainer.
NIGHTLY = ("eager-single-eval", "ort-zero3-eval", "eager-zero3", "eager-zero3-recompute", "adafactor", "sgd-decayed")
NIGHTLY += ("eager-ddp-same", "eager-ddp-same-again", "eager-zero2-same", "eager-zero2-same-again")
# Which test_precision.py compares with fp32 on one worker.
NIGHTLY += ("bf16", "fp16", "fp32")


def cases(names):
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in names]


@pytest.fixture(scope="module")
def runs(table_of, tmp_path_factory: pytest.TempPathFactory):
    return table_of(tmp_path_factory.mktemp("loop"), TABLE)


@pytest.mark.parametrize("name", cases(TABLE))
def test_it_trains(runs, name):
    result = runs[name]
    assert result.status == "FINISHED", result.report
    losses = result.losses
    assert list(losses) == list(range(1, 9))
    assert all(math.isfinite(loss) for loss in losses.values())
    assert losses[8] < losses[1] - 0.1
    assert set(result.series("train/grad_norm")) == set(losses)


@pytest.mark.parametrize("name", ["eager-ddp", "ort-ddp"])
def test_evaluating_changes_nothing_in_training(runs, name):
    """Neither the data nor the random numbers of dropout; of the steady steps none but those that compare gradients."""
    result, plain = runs[f"{name}-eval"], runs[name]
    assert list(result.series("eval/loss")) == [3, 6, 8]
    assert plain.series("eval/loss") == {}
    assert result.losses == plain.losses
    assert result.series("train/grad_norm") == plain.series("train/grad_norm")
    assert plain.series("summary/steady_steps") == {8: 5.0}
    # Under ORT, the first steps after the first and the second evaluation compare their gradients with PyTorch's.
    compared = 2.0 if name == "ort-ddp" else 0.0
    assert result.series("summary/steady_steps") == {8: 5.0 - compared}


@pytest.mark.parametrize("name", cases(["eager-single-eval", "eager-zero3-eval", "ort-ddp-eval", "ort-zero3-eval"]))
def test_an_evaluation_is_that_of_the_whole_model_without_dropout(runs, name):
    """Eager, ORT, one worker, two, and sharded weights agree, while their dropout in training does not."""
    expected = runs["eager-ddp-eval"].series("eval/loss")
    # After the first steps weights differ by their dropout masks, a little.
    tolerance = 1e-4 if name == "eager-zero3-eval" else 0.05
    assert runs[name].series("eval/loss") == pytest.approx(expected, abs=tolerance)


def test_evaluation_takes_time_from_no_step(runs):
    result = runs["eager-ddp-eval"]
    begun = {event["step"]: event["t"] for event in result.events if "train/loss" in event.get("values", {})}
    ended = {event["step"]: event["t"] for event in result.events if "eval/loss" in event.get("values", {})}
    seconds = result.series("throughput/step_seconds")
    for step in (4, 7):  # Those after an evaluation.
        # Journal times are whole milliseconds.
        assert seconds[step] <= (begun[step] - ended[step - 1]) / 1000 + 0.01


@pytest.mark.parametrize("name", cases(["eager-ddp", "eager-fsdp", "eager-zero3", "ort-ddp"]))
def test_recomputed_activations_are_the_same_dropout_included(runs, name):
    assert runs[f"{name}-recompute"].losses == pytest.approx(runs[name].losses, abs=1e-5)


@pytest.mark.parametrize("name", cases(["eager-ddp-same", "eager-zero2-same", "ort-ddp-same"]))
def test_two_deterministic_runs_are_equal_bit_by_bit(runs, name):
    for series in ("train/loss", "train/grad_norm"):
        assert runs[name].series(series) == runs[f"{name}-again"].series(series), series


def test_loader_processes_change_no_loss(runs):
    assert runs["loaders"].losses == runs["eager-ddp"].losses


@pytest.mark.nightly
def test_half_precision_follows_full_precision(runs):
    # A step whose scaled gradients overflow is left out and the scale halved: the weights are then a step behind.
    assert runs["fp16"].losses == pytest.approx(runs["fp32"].losses, abs=0.3)
    scales = list(runs["fp16"].series("train/loss_scale").values())
    assert scales == sorted(scales, reverse=True)
    assert set(scales) <= {65536.0, 32768.0, 16384.0}
    if len(set(scales)) == 1:
        assert runs["fp16"].losses == pytest.approx(runs["fp32"].losses, abs=0.05)
    assert runs["fp32"].series("train/loss_scale") == {}


BAD_MODEL = '''
import os
import torch

class Bad(torch.nn.Module):
    """Its loss is NaN from the fifth training batch on, on the second worker."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 10)
        self.batches = 0

    def forward(self, pixel_values):
        logits = self.inner(pixel_values.flatten(1))
        if self.training and torch.is_grad_enabled():
            self.batches += 1
            if self.batches == 5 and os.environ["RANK"] == "1":
                logits = logits * float("nan")
        return logits
'''


@pytest.mark.parametrize(
    "words",
    [("trainer=ddp",), ("trainer=deepspeed", "trainer.zero_stage=1"), ("trainer=ddp", "train.precision=fp16")],
)
def test_a_loss_that_is_not_finite_ends_the_run_and_names_step_and_rank(train, tmp_path: Path, words):
    (tmp_path / "bad.py").write_text(BAD_MODEL)
    model = ("model=factory", "model.target=bad:Bad", "data=digits", "backend=eager", "tracking=none")
    result = train(tmp_path, *model, *words, "train.steps=40", "train.log_every=10", "train.checkpoint_every=4")
    assert result.status == "FAILED" and not result.is_request
    assert "the loss is not finite at step 5 on rank 1; the weights are those before it" in result.error
    # At once where it costs nothing to know, at the next log step in fp16.
    logged = [step for step in result.losses if step > 3]
    assert logged == []
    # The checkpoint that was being written meanwhile is complete.
    assert list(result.series("checkpoint/write_seconds")) == [4]
    assert (result.run_dir / "checkpoints" / "step-00000004" / "run.json").is_file()


def test_a_model_that_cannot_recompute_is_refused_with_the_way_out(train, tmp_path: Path):
    result = train(tmp_path, "model=mlp", "backend=eager", "train.activation_checkpointing=true", "tracking=none")
    assert result.is_request
    assert "train.activation_checkpointing: FeedForward has no method gradient_checkpointing_enable" in result.error
