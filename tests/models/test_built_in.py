"""Every built-in model builds, has the size it claims and takes a training step."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, GPT2Config

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import ModelConfig
from ortlaunch.models.feed_forward import FeedForward
from ortlaunch.models.registry import available, build_model

SIZES = {
    "mlp": 19_210,
    "resnet": 78_570,
    "vit": 202_186,
    "gpt2_nano": 957_184,
    "gpt2": 124_439_808,
    "bert": 109_514_298,
    "llama": 14_358_912,
}


DEFAULTS = {"gpt2": GPT2Config, "bert": BertConfig}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def batch_for(inputs: str, size: int = 8) -> dict[str, torch.Tensor]:
    """A batch in the form that data sources give."""
    if inputs == "images":
        return {"pixel_values": torch.randn(4, 1, size, size), "labels": torch.tensor([0, 3, 9, 3])}
    ids = torch.randint(0, 256, (2, 16))
    return {"input_ids": ids, "labels": ids}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss, by the rule that the trainer follows."""
    names = inspect.signature(model.forward).parameters
    named = {key: value for key, value in batch.items() if key in names}
    first = next(iter(batch))
    output = model(**named) if first in named else model(batch[first])
    if getattr(output, "loss", None) is not None:
        return output.loss
    return nn.functional.cross_entropy(output, batch["labels"])


@pytest.mark.parametrize("name", SIZES)
def test_builds_and_takes_a_step(name: str) -> None:
    entry = available()[name]
    model = build_model(ModelConfig(name=name)).train()
    assert parameters(model) == SIZES[name]
    assert f"{SIZES[name]:,}" in entry.summary or f"{SIZES[name] / 1e6:.0f}M" in entry.summary
    loss = loss_of(model, batch_for(entry.inputs))
    loss.backward()
    assert torch.isfinite(loss)
    without = [key for key, weight in model.named_parameters() if weight.grad is None]
    assert without == []


def test_no_built_in_is_left_out_here() -> None:
    built_in = {entry.name for entry in available().values() if entry.target.startswith("ortlaunch.models.")}
    assert built_in == set(SIZES) | {"hf", "timm", "torchvision"}


@pytest.mark.parametrize("name", ["gpt2_nano", "llama", "vit", "bert"])
def test_attention_is_fused_and_caches_nothing(name: str) -> None:
    layers = "n_layer" if name == "gpt2_nano" else "num_hidden_layers"
    config = build_model(ModelConfig(name=name, params={layers: 1})).config
    assert config._attn_implementation == "sdpa"
    assert not getattr(config, "use_cache", False)


def test_unfused_attention_can_be_chosen() -> None:
    params: dict[str, Any] = {"attn_implementation": "eager", "n_layer": 1}
    assert build_model(ModelConfig(name="gpt2_nano", params=params)).config._attn_implementation == "eager"


def test_dropout_is_the_published_one() -> None:
    for name in ("gpt2", "gpt2_nano"):
        config = build_model(ModelConfig(name=name, params={"n_layer": 1, "n_embd": 8, "n_head": 2})).config
        assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.1, 0.1, 0.1)
    bert = build_model(ModelConfig(name="bert", params={"num_hidden_layers": 1})).config
    assert (bert.hidden_dropout_prob, bert.attention_probs_dropout_prob) == (0.1, 0.1)


def test_the_configuration_files_say_the_same_dropout_as_the_models() -> None:
    for name in ("gpt2", "gpt2_nano", "bert"):
        params = dict(to_config(compose([f"model={name}"])).model.params)
        config = build_model(ModelConfig(name=name)).config if name == "gpt2_nano" else DEFAULTS[name]()
        dropouts = {key: value for key, value in params.items() if "drop" in key}
        assert len(dropouts) >= 2
        assert dropouts == {key: getattr(config, key) for key in dropouts}


@pytest.mark.parametrize("size", [8, 16, 32])
def test_resnet_takes_small_images(size: int) -> None:
    assert torch.isfinite(loss_of(build_model(ModelConfig(name="resnet")), batch_for("images", size)))


def test_mlp_is_the_feed_forward_of_three_parts() -> None:
    params = {"input_dim": 12, "hidden_dim": 5, "output_dim": 3}
    model = build_model(ModelConfig(name="mlp", params=params))
    assert isinstance(model, FeedForward)
    assert list(model.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    x = torch.randn(2, 3, 4)
    expected = model.fc2(torch.relu(model.fc1(x.reshape(2, 12))))
    torch.testing.assert_close(model(x), expected)


def test_fields_and_their_aliases_reach_the_config() -> None:
    model = build_model(ModelConfig(name="gpt2_nano", params={"num_hidden_layers": 2, "n_inner": 64}))
    assert len(model.transformer.h) == 2
    assert model.transformer.h[0].mlp.c_fc.weight.shape == (128, 64)


def test_small_vocabulary_keeps_no_token_outside_it() -> None:
    config = build_model(ModelConfig(name="gpt2_nano", params={"n_layer": 1})).config
    assert (config.bos_token_id, config.eos_token_id) == (None, None)


@pytest.mark.parametrize(
    ("name", "params", "pattern"),
    [
        ("gpt2", {"n_layers": 2}, r"model\.params\.n_layers: GPT2LMHeadModel.*Did you mean model\.params\.n_layer\?"),
        ("bert", {"hiden_size": 2}, r"model\.params\.hiden_size.*Did you mean model\.params\.hidden_size\?"),
        ("mlp", {"hidden": 2}, r"model\.params\.hidden: model mlp.*hidden_dim\?.*hidden_dim, input_dim, output_dim"),
        ("llama", {"use_cache": True}, r"model\.params\.use_cache"),
        ("gpt2_nano", {"n_head": 3}, r"model\.params: GPT2LMHeadModel.*divisible"),
        ("gpt2_nano", {"n_head": 0}, r"model\.params: GPT2LMHeadModel.*zero"),
        ("gpt2_nano", {"activation_function": "gelu2"}, r"model\.params: GPT2LMHeadModel.*no 'gelu2'"),
        ("gpt2_nano", {"n_layer": "many"}, r"model\.params: GPT2LMHeadModel.*n_layer"),
        ("bert", {"mask_token_id": 30522, "num_hidden_layers": 1}, r"model\.params\.mask_token_id=30522.*30522 tokens"),
    ],
)
def test_wrong_params_are_refused(name: str, params: dict[str, Any], pattern: str) -> None:
    with pytest.raises(RequestError, match=f"(?s){pattern}"):
        build_model(ModelConfig(name=name, params=params))
