"""Operations of models whose count is known."""

from __future__ import annotations

import pytest
import torch

from ortlaunch.config.schema import ModelConfig
from ortlaunch.metrics.flops import flops_per_sample
from ortlaunch.registry import build_model
from ortlaunch.trainer.task import make_task


def test_a_feed_forward_network_counts_two_per_weight_and_three_passes() -> None:
    model = build_model(ModelConfig(name="mlp", params={"input_dim": 64, "hidden_dim": 32, "output_dim": 10}))
    batch = {"pixel_values": torch.rand(5, 1, 8, 8), "labels": torch.zeros(5, dtype=torch.long)}
    assert flops_per_sample(model, make_task(model, batch), batch) == 3 * 2 * (64 * 32 + 32 * 10)


def test_a_transformer_is_near_the_usual_formula() -> None:
    layers, width, vocabulary, length = 2, 64, 256, 32
    params = {"n_layer": layers, "n_embd": width, "n_head": 2, "vocab_size": vocabulary}
    model = build_model(ModelConfig(name="gpt2_nano", params=params))
    ids = torch.randint(0, vocabulary, (2, length))
    batch = {"input_ids": ids, "labels": ids}
    # Six operations per weight of the matrix products and token, and attention's two products (Kaplan et al., 2020).
    weights = 12 * layers * width**2 + width * vocabulary
    expected = 6 * weights * length + 12 * layers * length**2 * width
    assert flops_per_sample(model, make_task(model, batch), batch) == pytest.approx(expected, rel=0.02)


def test_counting_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = build_model(ModelConfig(name="resnet"))
    batch = {"pixel_values": torch.rand(2, 1, 8, 8), "labels": torch.zeros(2, dtype=torch.long)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    flops_per_sample(model, make_task(model, batch), batch)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
