"""An adapter that learns from conversations, and what it leaves, against peft in a plain loop of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file

from ortlaunch.config.load import load_config
from ortlaunch.config.schema import AdapterConfig
from ortlaunch.export.run_weights import export_weights, weights_in
from ortlaunch.models.registry import build_model
from ortlaunch.trainer.prepare import build_seeded
from tests.support.chat import conversations, write_conversations, write_tokenizer
from tests.support.referee import course_of, difference, replayed

SIZES = {
    "gpt2": (
        *("vocab_size=300", "n_positions=64", "n_embd=32", "n_layer=2", "n_head=2"),
        *("resid_pdrop=0", "embd_pdrop=0", "attn_pdrop=0"),
    ),
    "llama": (
        *("vocab_size=300", "hidden_size=32", "num_hidden_layers=2", "intermediate_size=64"),
        *("num_attention_heads=2", "num_key_value_heads=2"),
    ),
}
WORDS = (
    *("adapter=lora", "adapter.rank=4", "adapter.alpha=8", "data=chat", "data.path=chat.jsonl"),
    *("data.tokenizer=tokenizer", "data.seq_len=64", "data.eval_fraction=0.1"),
    *("train.batch_size=2", "train.log_every=1", "tracking=none", "optimizer.lr=0.01", "optimizer.weight_decay=0.1"),
)
NIGHTLY = pytest.mark.nightly
CASES = {
    "single": ("gpt2", 1, "trainer=single", "backend=eager", "train.grad_accumulation=2"),
    "ddp": ("gpt2", 2, "trainer=ddp", "backend=eager", "adapter.targets=[c_attn,c_fc]"),
    "llama": ("llama", 2, "trainer=ddp", "backend=eager", "train.ema=0.5"),
    "zero0": ("gpt2", 2, "trainer=deepspeed", "trainer.zero_stage=0", "backend=eager"),
    "zero1": ("gpt2", 2, "trainer=deepspeed", "trainer.zero_stage=1", "backend=eager"),
    "zero2": ("gpt2", 2, "trainer=deepspeed", "trainer.zero_stage=2", "backend=eager"),
    "zero3": ("gpt2", 2, "trainer=deepspeed", "trainer.zero_stage=3", "backend=eager"),
    "fsdp": ("gpt2", 2, "trainer=fsdp", "backend=eager"),
    "compile": ("gpt2", 1, "trainer=single", "backend=compile"),
    "ort": ("gpt2", 2, "trainer=ddp", "backend=ort"),
    "ort-llama": ("llama", 2, "trainer=ddp", "backend=ort"),
    "ort-zero2": ("gpt2", 2, "trainer=deepspeed", "trainer.zero_stage=2", "backend=ort"),
    "ort-zero3": ("gpt2", 2, "trainer=deepspeed", "trainer.zero_stage=3", "backend=ort"),
}
IN_CI = ("ddp", "zero2")
"""Under ONNX Runtime CI has an adapter in test_classes.py."""


def marks(name):
    return [*([pytest.mark.ort] if "ort" in name else []), *([] if name in IN_CI else [NIGHTLY])]


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in CASES])
def case(request, train, tmp_path):
    model, workers, *words = CASES[request.param]
    write_tokenizer(tmp_path / "tokenizer")
    write_conversations(tmp_path / "chat.jsonl", conversations(23))
    params = [f"model.params.{word}" for word in SIZES[model]]
    words = (*WORDS, f"model={model}", *params, *words)
    return workers, lambda *more, record=None: train(tmp_path, *words, *more, workers=workers, record=record)


def test_only_the_adapter_is_trained_stored_and_resumed(case, tmp_path):
    workers, run = case
    record = tmp_path / "record"
    record.mkdir()
    whole = run("train.steps=6", record=record)
    assert whole.status == "FINISHED", whole.report
    config = load_config(whole.run_dir / "config.yaml")
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=list(config.adapter.targets) or None)
    model = inject_adapter_in_model(adapter, build_model(config.model))
    exact = replayed(
        model,
        lambda one, _buffers, batch: one(**batch).loss,
        lambda batch: int((batch["labels"][:, 1:] != -100).sum()),
        config,
        [record],
        first_steps=6,
        sends_buffers=False,
        workers=workers,
        evaluated=None,
    )
    exact.weights, exact.first = _as_stored(exact.weights), _as_stored(exact.first)
    assert difference(course_of([whole]), exact) == ""
    first = run("train.steps=3", "train.checkpoint_every=3")
    second = run("train.steps=6", "train.checkpoint_every=3", f"train.resume={first.run_dir}")
    assert second.status == "FINISHED", second.report
    assert first.series("train/loss") | second.series("train/loss") == whole.series("train/loss")
    stored = weights_in(first.run_dir / "checkpoints" / "step-00000003", config, model)
    assert stored.keys() == {name for name, one in model.named_parameters() if one.requires_grad}
    for flags, folder in (([], "adapter"), (["--merged"], "merged")):
        assert export_weights([str(second.run_dir), *flags, "--out", str(tmp_path / folder)]) == 0
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored.keys() == load_file(second.run_dir / "weights" / "adapter_model.safetensors").keys()
    ids = torch.arange(16)[None]
    ours = type(model).from_pretrained(tmp_path / "merged").eval()
    base = build_seeded(replace(config, adapter=AdapterConfig()))
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def _as_stored(weights):
    return {
        f"base_model.model.{name.replace('.default.', '.')}": one for name, one in weights.items() if ".lora_" in name
    }
