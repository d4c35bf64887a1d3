"""Weights that a step does not use, on all workers or on some: as in plain torch, or refused before they are saved."""

from __future__ import annotations

import pytest

from tests.support.nightly import first_in_ci

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    '''What a batch holds decides which of two layers of one size it uses.'''

    def __init__(self, by):
        super().__init__()
        self.by = by
        self.first, self.even, self.odd = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, pixel_values):
        hidden = self.first(pixel_values.flatten(1))
        if self.training:
            self.calls += 1
        is_odd = {
            "never": 0,
            "steps": int(self.calls) % 2,
            "batches": int(pixel_values[0, 0, 0, 3] > -0.5),
            "one worker": int(torch.distributed.get_rank() == 1 and int(self.calls) >= 3),
        }[self.by]
        return self.head((self.odd if is_odd else self.even)(hidden))
"""
WORDS = (
    *("model=factory", "model.target=nets:Net", "data=digits", "backend=eager", "train.batch_size=2"),
    *("train.steps=8", "train.log_every=4", "train.checkpoint_every=100", "tracking=none"),
)
ZERO = {stage: ("trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4)}


@pytest.fixture
def trained(train, tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    return lambda by, *words: train(tmp_path, *WORDS, f"model.params.by='{by}'", *words)


# Under ZeRO 3 workers that use other weights wait for each other in DeepSpeed's gathering, until the watch ends them.
@pytest.mark.parametrize(
    ("by", "stage"),
    [
        ("steps", 3),
        *(pytest.param("steps", stage, marks=pytest.mark.nightly) for stage in (0, 1, 2)),
        *(pytest.param("batches", stage, marks=pytest.mark.nightly) for stage in (0, 1, 2)),
    ],
)
def test_deepspeed_refuses_weights_that_are_used_in_turn(trained, by, stage):
    run = trained(by, *ZERO[stage], "optimizer.weight_decay=0")
    assert run.is_request
    assert "a batch decides" in run.error
    assert "trainer.find_unused_parameters=true" in run.error


@pytest.mark.parametrize("stage", first_in_ci((1, 3, 0, 2), 1))
def test_deepspeed_refuses_to_decay_what_the_loss_does_not_use(trained, stage):
    run = trained("never", *ZERO[stage])
    assert run.is_request
    assert "the loss does not depend on odd.bias, odd.weight" in run.error
    assert trained("never", *ZERO[stage], "optimizer.weight_decay=0").status == "FINISHED"


def test_fsdp_refuses_batches_that_decide_and_trains_with_turns_of_all_workers(trained):
    run = trained("batches", "trainer=fsdp")
    assert run.is_request
    assert "batches have decided which weights their worker uses" in run.error
    assert not list(run.run_dir.glob("checkpoints/step-*"))
    assert trained("steps", "trainer=fsdp").status == "FINISHED"


@pytest.mark.parametrize("by", first_in_ci(["never", "one worker", "steps", "batches"], 2))
def test_ddp_names_what_a_worker_does_not_use_at_once(trained, by):
    """Where the other workers use it, they would wait for ever."""
    run = trained(by, "trainer=ddp", "train.log_every=1")
    assert run.is_request
    assert "does not depend on" in run.error
    assert trained(by, "trainer=ddp", "trainer.find_unused_parameters=true").status == "FINISHED"
