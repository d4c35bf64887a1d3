"""scaled_dot_product_attention trains under ORTModule: every kind of mask, grouped heads, dropout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from ortlaunch.config.schema import ModelConfig
from ortlaunch.models.registry import build_model
from ortlaunch.ort import session

WIDTH, HEADS, SIZE = 16, 4, 4


@pytest.fixture(params=[True, False], ids=["torch_kernels", "ort_kernels"])
def torch_kernels(request: pytest.FixtureRequest) -> bool:
    """Both, for the GPU has ONNX Runtime's alone."""
    return request.param


class Attention(torch.nn.Module):
    def __init__(self, kv_heads: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.query = torch.nn.Linear(WIDTH, HEADS * SIZE)
        self.key = torch.nn.Linear(WIDTH, kv_heads * SIZE)
        self.value = torch.nn.Linear(WIDTH, kv_heads * SIZE)
        self.options = options

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = (
            layer(x).view(*x.shape[:2], -1, SIZE).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.options)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def inputs(batch: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"kv_heads": 2, "enable_gqa": True}, {"kv_heads": 1, "enable_gqa": True}],
    ids=str,
)
def test_without_mask(assert_parity: Any, options: dict[str, Any]) -> None:
    assert_parity(Attention(**options), {"x": inputs()}, {"x": inputs(3, 7)})


def boolean_mask(length: int) -> torch.Tensor:
    """Causal with padding on the left: the first queries of the first row see nothing at all."""
    mask = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    mask[0, :, :, :2] = False
    return mask


def test_boolean_mask_that_hides_every_key_of_a_query(assert_parity: Any) -> None:
    ort = assert_parity(Attention(), *({"x": inputs(2, n), "mask": boolean_mask(n)} for n in (5, 6)))
    assert not ort(x=inputs(), mask=boolean_mask(5))[0, :, :2].any()


def test_added_mask_with_minus_infinity(assert_parity: Any) -> None:
    mask = torch.randn(2, HEADS, 5, 5)
    mask[1, :, 2] = -math.inf
    mask[0, :, :, 3] = -math.inf
    mask[0, :, 4] = -math.inf
    mask[0, :, 4, 1] = torch.finfo(mask.dtype).min
    assert_parity(Attention(), {"x": inputs(), "mask": mask})


def test_the_bias_that_is_added_can_be_learnt(assert_parity: Any) -> None:
    class Biased(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(HEADS, 5, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x, self.bias)

    assert_parity(Biased(), {"x": inputs()})


def test_a_query_of_one_sample_and_keys_of_one_head_are_broadcast(assert_parity: Any) -> None:
    class Latent(Attention):
        def __init__(self) -> None:
            super().__init__(kv_heads=1)
            self.latent = torch.nn.Parameter(torch.randn(1, HEADS, 3, SIZE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            key, value = (layer(x).unsqueeze(1) for layer in (self.key, self.value))
            return (
                functional.scaled_dot_product_attention(self.latent * 1.5, key, value) * self.query(x)[:, :1, None, :4]
            )

    assert_parity(Latent(), {"x": inputs()}, {"x": inputs(3, 7)})


def test_dropout_is_drawn_anew_and_keeps_the_mean(to_ort: Any) -> None:
    eager = Attention(dropout_p=0.0)
    dropping = Attention(dropout_p=0.5)
    dropping.load_state_dict(eager.state_dict())
    ort, x = to_ort(dropping), inputs()
    drawn = torch.stack([ort(x).detach() for _ in range(800)])
    assert (drawn[1:] != drawn[:-1]).flatten(1).any(1).all()
    torch.testing.assert_close(drawn.mean(0), eager(x), rtol=0, atol=0.1)
    assert drawn.std(0).min() > 0.01


def test_gradients_belong_to_the_dropout_that_was_drawn(to_ort: Any) -> None:
    """By finite differences: the same seed draws the same weights again."""
    ort, x = to_ort(Attention(dropout_p=0.3)), inputs()

    def loss(shift: float) -> torch.Tensor:
        torch.manual_seed(7)
        with torch.no_grad():
            direction.copy_(start + shift * change)
        return ort(x).square().sum()

    for direction in (ort.query.weight, ort.value.weight):
        start, change = direction.detach().clone(), torch.randn_like(direction)
        ort.zero_grad()
        loss(0.0).backward()
        slope = (loss(1e-2) - loss(-1e-2)) / 2e-2
        assert slope.item() == pytest.approx(float((direction.grad * change).sum()), rel=2e-2)
        loss(0.0)


@pytest.mark.parametrize("name", ["gpt2_nano", "bert"])
def test_a_transformers_model_with_attention_dropout_trains(to_ort: Any, name: str) -> None:
    # Then the dropout that is left is attention's own.
    params = {
        "gpt2_nano": {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        "bert": {"num_hidden_layers": 1, "vocab_size": 256, "hidden_size": 24, "hidden_dropout_prob": 0.0},
    }
    model = build_model(ModelConfig(name=name, params=params[name]))
    assert model.config._attn_implementation == "sdpa"
    eager_eval = model.eval()
    ort = to_ort(model).train()
    ids = torch.randint(0, 250, (2, 12))
    losses = [ort(input_ids=ids, labels=ids).loss for _ in range(3)]
    assert len({loss.item() for loss in losses}) == 3
    losses[-1].backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in ort.parameters())
    assert session.is_active(ort)
    ort.eval()
    with torch.no_grad():
        expected = eager_eval(input_ids=ids, labels=ids).loss
        for _ in range(2):
            torch.testing.assert_close(ort(input_ids=ids, labels=ids).loss, expected)


TINY = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


def causal_model(family: str, attention: str) -> torch.nn.Module:
    if family == "gpt2":
        config: Any = transformers.GPT2Config(
            **TINY, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None
        )
    else:
        config = transformers.LlamaConfig(**TINY, intermediate_size=64, num_key_value_heads=2)
    config.use_cache, config._attn_implementation = False, attention
    return transformers.AutoModelForCausalLM.from_config(config).train()


def causal_batch(mask: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (batch, length))
    if mask == "none":
        return {"input_ids": ids, "labels": ids}
    attention_mask = torch.ones_like(ids)
    if mask != "ones":
        attention_mask[0, slice(-5, None) if mask == "right" else slice(5)] = 0
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": ids.masked_fill(attention_mask == 0, -100)}


@pytest.mark.parametrize("masks", [["none"], ["ones"], ["right", "left"]], ids=" ".join)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_causal_model_with_and_without_padding(
    assert_parity: Any, family: str, attention: str, masks: list[str]
) -> None:
    batches = [causal_batch(mask, *size) for mask in masks for size in ((2, 16), (3, 24))]
    assert_parity(causal_model(family, attention), *batches)
