"""The loss of a step is the mean over all of its labelled tokens, however its samples are divided."""

from __future__ import annotations

import pytest

SHORT = (
    *("data=synthetic", "data.vocab_size=63", "data.seq_len=12", "train.steps=3", "train.log_every=1", "tracking=none"),
    *("train.eval_every=1", "train.eval_samples=11"),
)
BERT = (
    "model=bert",
    *("model.params.hidden_size=16", "model.params.num_hidden_layers=1", "model.params.num_attention_heads=2"),
    *("model.params.intermediate_size=32", "model.params.vocab_size=64"),
    *("model.params.hidden_dropout_prob=0", "model.params.attention_probs_dropout_prob=0"),
    *SHORT,
)
DIVIDED = {
    "ddp": (2, "trainer=ddp", "train.batch_size=4"),
    "ddp-accumulated": (2, "trainer=ddp", "train.batch_size=1", "train.grad_accumulation=4"),
    "zero1": (2, "trainer=deepspeed", "trainer.zero_stage=1", "train.batch_size=2", "train.grad_accumulation=2"),
    "zero3": (2, "trainer=deepspeed", "trainer.zero_stage=3", "train.batch_size=2", "train.grad_accumulation=2"),
    "fsdp": (2, "trainer=fsdp", "train.batch_size=2", "train.grad_accumulation=2"),
    "ort": (2, "trainer=ddp", "backend=ort", "train.batch_size=2", "train.grad_accumulation=2"),
}
UNEVEN = """
from torch import nn
from torch.nn import functional

class Rare(nn.Module):
    '''Some batches have no label at all.'''

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids):
        labels = input_ids.masked_fill(input_ids > 1, -100)
        return {"loss": functional.cross_entropy(self.head(self.embedding(input_ids)).transpose(1, 2), labels)}

def rare(batch):
    return int((batch["input_ids"] <= 1).sum())
"""
RARE = ("model=factory", "model.target=nets:Rare", *SHORT)


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """Eight samples in one batch of one worker."""
    return train(tmp_path_factory.mktemp("whole"), *BERT, "backend=eager", "trainer=single", "train.batch_size=8")


# Those of them that tests/numbers/test_numbers.py has in CI, with a function that counts.
NIGHTLY = ("ddp", "zero1", "fsdp")
MARKS = {"ort": pytest.mark.ort, **dict.fromkeys(NIGHTLY, pytest.mark.nightly)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in DIVIDED])
def test_hidden_tokens_weigh_the_same_however_samples_are_divided(train, whole, tmp_path, name):
    workers, *words = DIVIDED[name]
    run = train(tmp_path, *BERT, "backend=eager", *words, workers=workers)
    assert run.status == "FINISHED", run.report
    for series in ("train/loss", "train/grad_norm", "eval/loss"):
        assert run.series(series) == pytest.approx(whole.series(series), rel=1e-5), series


@pytest.mark.parametrize("backend", ["eager", pytest.param("ort", marks=pytest.mark.ort)])
def test_a_micro_batch_without_a_label_changes_nothing(train, tmp_path, backend):
    (tmp_path / "nets.py").write_text(UNEVEN)
    words = (*RARE, "train.items=nets:rare", f"backend={backend}")
    one = train(tmp_path, *words, "trainer=single", "train.batch_size=8")
    many = train(tmp_path, *words, "trainer=ddp", "train.batch_size=1", "train.grad_accumulation=4")
    for run in (one, many):
        assert run.status == "FINISHED", run.report
    for series in ("train/loss", "train/grad_norm", "eval/loss"):
        assert many.series(series) == pytest.approx(one.series(series), rel=1e-5), series


def test_a_loss_over_a_number_that_nobody_knows_is_told_once(train, tmp_path):
    (tmp_path / "nets.py").write_text(UNEVEN)
    run = train(tmp_path, *RARE, "backend=eager", "trainer=ddp", "train.batch_size=4", "data.vocab_size=4")
    assert run.status == "FINISHED", run.report
    assert run.stdout.count("train.items=module:function") == 1
    assert run.tags["ortlaunch.loss_items"] == "unknown"
