"""Pretrained models from a folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import ModelConfig
from ortlaunch.models.masking import hidden_positions
from ortlaunch.models.registry import build_model

TINY: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}


def hf(**params: Any) -> transformers.PreTrainedModel:
    return build_model(ModelConfig(name="hf", params=params))


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved gpt2")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(**TINY, vocab_size=64, intermediate_size=32)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


def test_weights_come_from_the_folder_in_fp32(gpt2_folder: Path) -> None:
    model = hf(pretrained=str(gpt2_folder))
    saved = transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder, dtype=torch.float32)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    for key, value in saved.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)
    assert model.training
    assert model.config.use_cache is False


def test_attention_is_fused_whatever_its_dropout_unless_chosen(gpt2_folder: Path) -> None:
    saved = hf(pretrained=str(gpt2_folder)).config
    assert (saved._attn_implementation, saved.attn_pdrop) == ("sdpa", 0.1)
    chosen = hf(pretrained=str(gpt2_folder), attn_implementation="eager")
    assert chosen.config._attn_implementation == "eager"


def test_masked_lm_hides_tokens(bert_folder: Path) -> None:
    model = hf(pretrained=str(bert_folder), task="masked-lm", mask_token_id=63).eval()
    assert type(model).__name__ == "BertForMaskedLM"
    plain = transformers.BertForMaskedLM.from_pretrained(bert_folder).eval()
    ids = torch.randint(0, 60, (2, 32))
    hidden = hidden_positions(ids)
    logits = plain(input_ids=ids.masked_fill(hidden, 63)).logits
    expected = torch.nn.functional.cross_entropy(logits[hidden], ids[hidden])
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


def test_masked_lm_without_tokenizer_asks_for_the_token(bert_folder: Path) -> None:
    with pytest.raises(RequestError, match=r"model\.params\.mask_token_id"):
        hf(pretrained=str(bert_folder), task="masked-lm")


def test_mask_token_outside_the_vocabulary(bert_folder: Path) -> None:
    with pytest.raises(RequestError, match=r"model\.params\.mask_token_id=64 .* 64 tokens"):
        hf(pretrained=str(bert_folder), task="masked-lm", mask_token_id=64)


def test_masked_lm_takes_the_token_of_the_tokenizer(bert_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bert_folder, tmp_path / "with tokenizer")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "two", "[MASK]", "three"]
    vocab = {word: number for number, word in enumerate(words)}
    transformers.BertTokenizer(vocab=vocab).save_pretrained(folder)
    assert hf(pretrained=str(folder), task="masked-lm").mask_token_id == 6


def test_other_tasks(bert_folder: Path, tmp_path: Path) -> None:
    assert hf(pretrained=str(bert_folder), task="sequence-classification", num_labels=5).config.num_labels == 5
    vit = transformers.ViTConfig(**TINY, intermediate_size=32, image_size=8, patch_size=2, num_channels=1)
    transformers.ViTForImageClassification(vit).save_pretrained(tmp_path / "vit")
    assert type(hf(pretrained=str(tmp_path / "vit"), task="image-classification")).__name__.startswith("ViTFor")
    t5 = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    model = hf(pretrained=str(tmp_path / "t5"), task="seq2seq-lm")
    ids = torch.randint(0, 60, (2, 8))
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        ({}, r"model\.params\.pretrained"),
        ({"pretrained": "./no/such/folder"}, r"model\.params\.pretrained=\./no/such/folder: there is no such folder"),
        ({"pretrained": "a/b/c"}, r"no such folder"),
        ({"pretrained": "X", "task": "causal"}, r"model\.params\.task=causal is unknown.*causal-lm\?"),
    ],
)
def test_requests_that_cannot_work(params: dict[str, Any], pattern: str) -> None:
    with pytest.raises(RequestError, match=pattern):
        hf(**params)


def test_unknown_field_and_wrong_task(gpt2_folder: Path) -> None:
    with pytest.raises(RequestError, match=r"model\.params\.n_layerz.*model\.params\.n_layer\?"):
        hf(pretrained=str(gpt2_folder), n_layerz=3)
    with pytest.raises(RequestError, match=r"model\.params\.pretrained=.* cannot be loaded"):
        hf(pretrained=str(gpt2_folder), task="image-classification")


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be loaded"):
        hf(pretrained=str(tmp_path))


def test_id_out_of_reach(tmp_path: Path) -> None:
    code = (
        "from ortlaunch.models.registry import build_model, ModelConfig\n"
        "from ortlaunch.base.errors import RequestError\n"
        "try:\n    build_model(ModelConfig(name='hf', params={'pretrained': 'nobody/nothing'}))\n"
        "except RequestError as error:\n    print('REFUSED', error)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert "REFUSED model.params.pretrained=nobody/nothing cannot be loaded" in done.stdout, done.stderr


def test_a_models_own_code_runs_only_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "own" / "model").mkdir(parents=True)
    folder = tmp_path / "own" / "model"
    (folder / "nets.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class MineConfig(GPT2Config):\n    model_type = 'mine'\n"
        "class Mine(GPT2LMHeadModel):\n    config_class = MineConfig\n"
    )
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64, "model_type": "mine"}
    code = {"AutoConfig": "nets.MineConfig", "AutoModelForCausalLM": "nets.Mine"}
    (folder / "config.json").write_text(json.dumps({**shape, "auto_map": code}))
    weights = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64))
    save_file(
        {"transformer.wte.weight": weights.transformer.wte.weight.detach()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(RequestError, match=r"brings Python code of its own: .*trust_remote_code=true runs it$"):
        hf(pretrained=str(folder))
    assert type(hf(pretrained=str(folder), trust_remote_code=True)).__name__ == "Mine"
