"""Hiding tokens for masked language modelling."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.export import exporting
from ortlaunch.models.built_in.bert import build
from ortlaunch.models.masked_bert import BertForMaskedLM
from ortlaunch.models.masking import hidden_positions

SMALL = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
}


def tokens(*shape: int, top: int = 100) -> torch.Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(3))


def test_about_fifteen_percent_spread_over_positions() -> None:
    hidden = hidden_positions(tokens(2000, 128)).double()
    assert abs(hidden.mean().item() - 0.15) < 0.005
    assert hidden.mean(0).min() > 0.1 and hidden.mean(0).max() < 0.2
    neighbours = (hidden[:, 1:] * hidden[:, :-1]).mean().item()
    assert abs(neighbours - 0.15**2) < 0.005


def test_every_row_hides_something() -> None:
    for length in (1, 2, 5):
        assert hidden_positions(tokens(300, length, top=50000)).any(1).all()


def test_depends_on_the_row_alone_and_on_all_of_it() -> None:
    ids = tokens(4, 64)
    hidden = hidden_positions(ids)
    assert torch.equal(hidden_positions(ids[2:3]), hidden[2:3])
    changed = ids.clone()
    changed[:, 63] += 1
    assert not torch.equal(hidden_positions(changed), hidden)


def test_loss_is_that_of_the_hidden_tokens() -> None:
    model = build(**SMALL).eval()
    ids = tokens(3, 40)
    hidden = hidden_positions(ids)
    logits = model(input_ids=ids.masked_fill(hidden, 99)).logits
    expected = nn.functional.cross_entropy(logits[hidden], ids[hidden])
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


def test_labels_left_out_stay_out() -> None:
    model = build(**SMALL).eval()
    ids = tokens(2, 40)
    labels = ids.clone()
    labels[1] = -100
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, model(input_ids=ids[:1], labels=ids[:1]).loss)


def test_keys_are_the_transformers_classs() -> None:
    import transformers

    model = build(**SMALL)
    assert isinstance(model, BertForMaskedLM)
    assert model.state_dict().keys() == transformers.BertForMaskedLM(model.config).state_dict().keys()


@pytest.mark.ort
def test_exported_choice_equals_eager() -> None:
    import onnxruntime

    class Choice(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return hidden_positions(ids)

    file = io.BytesIO()
    axes: dict[str, Any] = {"ids": {0: "batch", 1: "length"}}
    # Another test of this process may have wrapped a model for training.
    with exporting.standard_symbolics():
        torch.onnx.export(
            Choice(), (tokens(2, 16),), file, opset_version=17, dynamo=False, input_names=["ids"], dynamic_axes=axes
        )
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    for shape in ((5, 128), (3, 1), (1, 1024)):
        ids = tokens(*shape, top=50000)
        assert (session.run(None, {"ids": ids.numpy()})[0] == hidden_positions(ids).numpy()).all()
