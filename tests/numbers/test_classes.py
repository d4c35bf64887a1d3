"""Classes of texts and of words, against transformers in a plain loop of one process."""

from __future__ import annotations

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, BertConfig

from ortlaunch.config.load import load_config
from ortlaunch.data.loader import build_loader
from tests.support.chat import write_tokenizer
from tests.support.referee import course_of, difference, replayed

KINDS = {
    "texts": (
        AutoModelForSequenceClassification,
        "sequence-classification",
        "data.column=text data.label_column=label",
    ),
    "words": (AutoModelForTokenClassification, "token-classification", "data.column=words data.label_column=tags"),
}
WORDS = (
    *("model=hf", "model.params.pretrained=net", "data=hf", "data.path=rows", "data.tokenizer=tokenizer"),
    *("data.seq_len=32", "data.drop_last=false", "data.eval_split=test", "train.batch_size=3", "train.eval_every=3"),
    *("train.steps=6", "train.log_every=1", "tracking=none", "optimizer.lr=0.01"),
)
NIGHTLY = pytest.mark.nightly
CASES = {
    "texts-ddp": (2, "trainer=ddp", "backend=eager"),
    "texts-single": (1, "trainer=single", "backend=eager", "train.grad_accumulation=2"),
    "texts-ort": (2, "trainer=ddp", "backend=ort"),
    "texts-compile": (1, "trainer=single", "backend=compile"),
    "texts-zero2-lora": (2, "trainer=deepspeed", "trainer.zero_stage=2", "backend=eager", "adapter=lora"),
    "texts-fsdp-lora": (2, "trainer=fsdp", "backend=eager", "adapter=lora"),
    "texts-ort-lora": (2, "trainer=ddp", "backend=ort", "adapter=lora"),
    "words-ddp": (2, "trainer=ddp", "backend=eager"),
    "words-single": (1, "trainer=single", "backend=eager", "train.grad_accumulation=2"),
    "words-ort": (1, "trainer=single", "backend=ort", "train.grad_accumulation=2"),
}
IN_CI = ("texts-ort-lora", "words-ddp")


def marks(name):
    return [*([pytest.mark.ort] if "ort" in name else []), *([] if name in IN_CI else [NIGHTLY])]


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in CASES])
def case(request, train, tmp_path):
    workers, *words = CASES[request.param]
    made_by, task, columns = KINDS[request.param.partition("-")[0]]
    torch.manual_seed(0)
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made_by.from_config(BertConfig(vocab_size=300, num_labels=3, **layers, **dropout)).save_pretrained(tmp_path / "net")
    write_tokenizer(tmp_path / "tokenizer")
    numbers = range(20)
    rows = datasets.Dataset.from_dict(
        {
            "text": [f"text {number}" * (1 + number % 3) for number in numbers],
            "label": [number % 3 for number in numbers],
            "words": [["one", "two", "three"][: 1 + number % 3] for number in numbers],
            "tags": [["A", "O", "B"][: 1 + number % 3] for number in numbers],
        }
    )
    datasets.DatasetDict({"train": rows, "test": rows.select(range(7))}).save_to_disk(str(tmp_path / "rows"))
    words = (*WORDS, f"model.params.task={task}", *columns.split(), *words)
    return made_by, workers, lambda *more, record=None: train(tmp_path, *words, *more, workers=workers, record=record)


def test_classes_are_learnt_and_counted_as_in_a_plain_loop(case, tmp_path):
    made_by, workers, run = case
    record = tmp_path / "record"
    record.mkdir()
    whole = run(record=record)
    assert whole.status == "FINISHED", whole.report
    config = load_config(whole.run_dir / "config.yaml")
    plain = model = made_by.from_pretrained(tmp_path / "net")
    is_adapter = config.adapter.name == "lora"
    if is_adapter:
        adapter = LoraConfig(r=8, lora_alpha=16, task_type="SEQ_CLS", modules_to_save=["classifier"])
        model = inject_adapter_in_model(adapter, model)
    exact = replayed(
        model,
        lambda one, _buffers, batch: one(**batch).loss,
        lambda batch: int((batch["labels"] != -100).sum()),
        config,
        [record],
        first_steps=6,
        sends_buffers=False,
        workers=workers,
        evaluated=None,
    )
    course = course_of([whole])
    course.evaluations = []
    if is_adapter:
        exact.weights, exact.first = _as_stored(exact.weights), _as_stored(exact.first)
        assert exact.weights.keys() == course.weights.keys()
        plain = PeftModel.from_pretrained(made_by.from_pretrained(tmp_path / "net"), whole.run_dir / "weights")
    else:
        # Attention does not depend on a key's bias: rounding alone moves it.
        exact.weights = {name: one for name, one in exact.weights.items() if not name.endswith("key.bias")}
        plain = made_by.from_pretrained(whole.run_dir / "weights")
    assert difference(course, exact) == ""
    loader = build_loader(_at(config.data, tmp_path), batch_size=7, rank=0, world_size=1, seed=0)
    (batch,) = (one.batch for one in loader.held_out(7))
    with torch.no_grad():
        found = plain.eval()(**batch)
    counts = batch["labels"] != -100
    accuracy = float((found.logits.argmax(-1) == batch["labels"])[counts].double().mean())
    last = {name: whole.series(f"eval/{name}")[6] for name in ("loss", "accuracy")}
    assert last == pytest.approx({"loss": float(found.loss), "accuracy": accuracy}, rel=1e-5)
    if made_by is AutoModelForTokenClassification:
        return  # The same rows are resumed with classes of texts.
    first = run("train.steps=3", "train.checkpoint_every=3")
    second = run("train.checkpoint_every=3", f"train.resume={first.run_dir}")
    losses = first.series("train/loss") | second.series("train/loss")
    if config.backend.name == "compile":
        # What is compiled for batches of any length depends on the first one's.
        assert losses == pytest.approx(whole.series("train/loss"), rel=1e-6)
    else:
        assert losses == whole.series("train/loss")


def _at(data, folder):
    data.path, data.tokenizer = str(folder / "rows"), str(folder / "tokenizer")
    return data


def _as_stored(weights):
    def stored(name):
        return f"base_model.model.{name.replace('.modules_to_save', '').replace('.default.', '.')}"

    return {stored(name): one for name, one in weights.items() if ".default." in name}
