"""Operations of models whose count is known by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ortlaunch.config.schema import ModelConfig
from ortlaunch.metrics.flops import flops_per_sample
from ortlaunch.models.recompute import recompute_activations
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import Batch, make_task

LAYERS, WIDTH, VOCABULARY, LENGTH = 2, 64, 256, 32
TEXT = torch.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY
TOKENS = {"input_ids": TEXT, "labels": TEXT}
PIXELS = {"pixel_values": torch.rand(5, 1, 8, 8), "labels": torch.zeros(5, dtype=torch.long)}


def counted(model: nn.Module, batch: Batch) -> float:
    return flops_per_sample(model, make_task(model, batch), batch)


def gpt2(**params: object) -> nn.Module:
    params = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 2, "vocab_size": VOCABULARY, **params}
    return build_model(ModelConfig(name="gpt2_nano", params=params))


def transformer_flops() -> float:
    # Six operations per weight of the matrix products and token, and attention's two products (Kaplan et al., 2020).
    weights = 12 * LAYERS * WIDTH**2 + WIDTH * VOCABULARY
    return 6 * weights * LENGTH + 12 * LAYERS * LENGTH**2 * WIDTH


class Stack(nn.Module):
    """Two linear layers: 64 -> 32 -> 10."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.second = nn.Linear(32, 10)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(pixel_values.flatten(1))))


def test_a_feed_forward_network_counts_two_per_weight_and_three_passes() -> None:
    model = build_model(ModelConfig(name="mlp", params={"input_dim": 64, "hidden_dim": 32, "output_dim": 10}))
    assert counted(model, PIXELS) == 3 * 2 * (64 * 32 + 32 * 10)


def test_a_convolution_counts_its_kernel_at_every_place() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, kernel_size=3, padding=1, bias=False)
            self.out = nn.Linear(4 * 8 * 8, 10)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.out(self.conv(pixel_values).flatten(1))

    assert counted(Net(), PIXELS) == 3 * 2 * (8 * 8 * 4 * 3 * 3 * 1 + 256 * 10)


def test_a_transformer_is_near_the_usual_formula() -> None:
    assert counted(gpt2(), TOKENS) == pytest.approx(transformer_flops(), rel=0.02)


def test_tied_and_untied_embeddings_count_the_same() -> None:
    """Looking a vector up costs no operation; the product with the vocabulary does, whoever owns its weights."""
    tied, untied = gpt2(), gpt2(tie_word_embeddings=False)
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
    assert counted(tied, TOKENS) == counted(untied, TOKENS)


def test_activations_that_are_computed_again_do_not_count() -> None:
    model = gpt2()
    recompute_activations(model)
    model.train()
    assert counted(model, TOKENS) == counted(gpt2(), TOKENS)


def test_a_frozen_layer_at_the_input_costs_its_forward_only() -> None:
    model = Stack()
    for parameter in model.first.parameters():
        parameter.requires_grad = False
    # Both layers forward; backward only the gradient of the second one's weight: nothing before it is trained.
    assert counted(model, PIXELS) == 2 * (64 * 32 + 32 * 10) + 2 * 32 * 10


def test_a_frozen_layer_at_the_output_passes_gradients_on() -> None:
    model = Stack()
    for parameter in model.second.parameters():
        parameter.requires_grad = False
    # Backward: the second one's gradient of its input, the first one's of its weight; the data need none.
    assert counted(model, PIXELS) == 2 * (64 * 32 + 32 * 10) + 2 * 32 * 10 + 2 * 64 * 32
    assert all(parameter.grad is None for parameter in model.parameters())


def test_counting_leaves_each_module_in_its_mode() -> None:
    model = Stack()
    model.second.eval()
    counted(model, PIXELS)
    assert [module.training for module in model.modules()] == [True, True, False]


class Counting(Stack):
    """Counts its calls in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += pixel_values.flatten(1).mean(0)
        return super().forward(pixel_values)


def test_counting_is_no_call_that_counts() -> None:
    model = Counting()
    seen = model.seen
    counted(model, PIXELS)
    assert model.calls == 0
    assert model.seen is seen
    assert not seen.any()


def test_counting_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = build_model(ModelConfig(name="resnet"))
    batch = {"pixel_values": torch.rand(2, 1, 8, 8), "labels": torch.zeros(2, dtype=torch.long)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    frozen = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).eval()
    counted(model, batch)
    assert [module for module in model.modules() if not module.training] == [frozen]
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
