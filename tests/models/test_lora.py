"""An adapter by peft: where it goes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForTokenClassification, GPT2Config, GPT2LMHeadModel

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import LoraConfig
from ortlaunch.export.request import parse
from ortlaunch.models.lora import add_lora, base_digest, merged
from ortlaunch.trainer.checkpoint.resume import Start, check_base
from ortlaunch.trainer.prepare import build_seeded
from ortlaunch.trainer.weights import save_weights


def own() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def bert() -> nn.Module:
    layers = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForTokenClassification(BertConfig(vocab_size=20, **layers))


def trained(model: nn.Module) -> set[str]:
    return {name for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize(
    ("build", "targets", "modules"),
    [
        (own, ["0"], {"0"}),
        (own, ["all-linear"], {"0", "2"}),
        (bert, [], {"bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.0.attention.self.value"}),
    ],
)
def test_only_the_matrices_and_a_new_head_are_trained(build, targets, modules) -> None:
    model = build()
    add_lora(model, LoraConfig(rank=2, targets=targets))
    matrices = {f"{name}.lora_{one}.default.weight" for name in modules for one in "AB"}
    head = {f"classifier.modules_to_save.default.{one}" for one in ("weight", "bias")} if build is bert else set()
    assert trained(model) == matrices | head


def test_a_merged_model_computes_what_both_did(tmp_path) -> None:
    torch.manual_seed(0)
    plain, model = own(), own()
    model.load_state_dict(plain.state_dict())
    add_lora(model, LoraConfig(rank=2, targets=["0", "2"]))
    for name, one in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(one)
    x = torch.randn(3, 4)
    whole = merged(dict(model.state_dict()), model, plain)
    assert whole.state_dict().keys() == own().state_dict().keys()
    torch.testing.assert_close(whole(x), model(x))


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([], "adapter=lora does not suit Sequential: .* name some of these by adapter.targets=.*: 0, 2"),
        (["nope"], r"adapter.targets=\[nope\] does not suit Sequential: .*: 0, 2"),
        (["1"], r"adapter.targets=\[1\] does not suit Sequential: .*Tanh.*: 0, 2"),
    ],
)
def test_what_cannot_be_adapted_is_said_with_what_can(targets, said) -> None:
    with pytest.raises(RequestError, match=said):
        add_lora(own(), LoraConfig(targets=targets))


def test_a_checkpoint_of_an_adapter_fits_the_weights_that_it_was_beside(tmp_path) -> None:
    """They come from `model.weights`, also where a run is resumed."""
    small = [f"model.params.{one}" for one in ("vocab_size=16", "n_positions=8", "n_embd=8", "n_layer=1", "n_head=2")]
    config = to_config(compose(["model=gpt2", *small, "adapter=lora"]))
    other = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    save_weights(dict(other.state_dict()), other, tmp_path / "weights")
    stored = replace(config, model=replace(config.model, weights=str(tmp_path / "weights")))
    first, again, beside = (base_digest(build_seeded(one)) for one in (config, config, stored))
    assert first == again != beside
    torch.testing.assert_close(build_seeded(stored).lm_head.weight, other.lm_head.weight)
    start = Start(tmp_path, {"base": first})
    check_base(start, again)
    with pytest.raises(RequestError, match="holds an adapter alone, and the weights beside it were others"):
        check_base(start, beside)


def test_an_export_takes_the_merged_model(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="by ortlaunch export weights RUN --merged --out FOLDER, then from_weights="):
        parse("onnx", ["model=gpt2_nano", "adapter=lora", "out=net"], ("out",), {})
