"""What a loss is a mean over, found by calling the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from ortlaunch.models.items import RULES, fitting_rules, labelled, predicted
from ortlaunch.models.task import make_task

IDS = torch.arange(36).reshape(3, 12) ** 2 % 17
TOKENS = {"input_ids": IDS, "labels": IDS.clone()}
IMAGES = {"pixel_values": torch.rand(3, 1, 8, 8), "labels": torch.tensor([1, 0, 2])}
SERIES = {"values": torch.rand(3, 4), "labels": torch.rand(3, 2)}


class Ours(nn.Module):
    """Returns logits; the loss is computed by ortlaunch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 17)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids)


class Padded(Ours):
    """Leaves out tokens by their value."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(input_ids).transpose(1, 2)
        return {"loss": functional.cross_entropy(logits, input_ids.masked_fill(input_ids > 6, -100))}


class Contrastive(nn.Module):
    """Each sample's loss depends on the other ones; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found = self.flat(pixel_values)
        return functional.cross_entropy(found @ found.t(), torch.arange(len(found)))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=12, n_embd=8, n_layer=1, n_head=2))


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(vocab_size=17, **sizes))


CASES = {
    "gpt2": (gpt2, TOKENS, "next labels"),
    "bert": (bert, TOKENS, "labels"),
    "logits": (Ours, TOKENS, "labels"),
    "images": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), IMAGES, "samples"),
    "series": (lambda: nn.Linear(4, 2), SERIES, "samples"),
    "padded": (Padded, TOKENS, None),
    "contrastive": (Contrastive, IMAGES, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rule_of_a_loss_is_found_and_the_model_stays_as_it_is(name: str) -> None:
    torch.manual_seed(0)
    build, batch, expected = CASES[name]
    model = build().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fitting = fitting_rules(model, make_task(model, batch), batch, labels_vary=True)
    assert next((rule for rule in RULES if rule in fitting), None) == expected
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_samples_with_few_labels_tell_the_rule() -> None:
    """As prompts and parts of words have none."""
    labels = IDS.clone()
    labels[0, :-1] = labels[1, :-2] = labels[2, :-1] = -100
    batch = {"input_ids": IDS, "labels": labels}
    assert "labels" in fitting_rules(bert(), make_task(bert(), batch), batch, labels_vary=True)
    assert "samples" not in fitting_rules(bert(), make_task(bert(), batch), batch, labels_vary=True)


def test_ignored_labels_do_not_count() -> None:
    labels = torch.tensor([[-100, 1, 2], [3, -100, -100]])
    assert (labelled({"labels": labels}), predicted({"labels": labels})) == (3, 2)
