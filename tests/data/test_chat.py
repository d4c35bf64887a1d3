"""Conversations: which tokens are learnt, that samples keep them apart, and that each comes once."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ortlaunch.base.errors import RequestError
from ortlaunch.data.chat import IGNORED, Renderer, packed
from ortlaunch.data.sources.chat import ChatConfig
from ortlaunch.models.apart import check_apart
from ortlaunch.models.task import make_task
from tests.support.chat import MARKED, TEMPLATE, conversations, write_conversations, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    for name, template in (("plain", TEMPLATE), ("marked", MARKED), ("none", None)):
        write_tokenizer(folder / name, template)
    write_tokenizer(folder / "changing", TEMPLATE.replace("{{ one.content }}", "{{ one.content }}{{ loop.revindex }}"))
    write_tokenizer(folder / "strict", TEMPLATE + "{{ raise_exception('only users') if messages[0].role != 'user' }}")
    write_conversations(folder / "chat.jsonl", conversations(20))
    return folder


@pytest.mark.parametrize("tokenizer", ["plain", "marked"])
def test_the_answers_are_learnt_with_their_end_token_and_nothing_else(folder, tokenizer):
    renderer = Renderer(str(folder / tokenizer))
    messages = [
        {"role": role, "content": text}
        for role, text in (("system", "be"), ("user", "hé"), ("assistant", "yes é"), ("user", "?"), ("assistant", ""))
    ]
    ids, learnt = renderer.render(messages, "here")
    assert renderer._tokenizer.decode(ids) == renderer._text(messages)
    assert renderer._tokenizer.decode(ids[learnt]) == "yes é<|end|><|end|>"


def test_each_conversation_is_in_one_sample_and_samples_are_full(folder, load):
    lengths = [3, 9, 1, 5, 5, 10, 4, 2]
    bins = packed(lengths, 10)
    assert sorted(number for one in bins for number in one) == list(range(len(lengths)))
    assert max(sum(lengths[number] for number in one) for one in bins) <= 10
    assert len(bins) == 4
    cfg = ChatConfig(path=str(folder / "chat.jsonl"), tokenizer=str(folder / "plain"), seq_len=128)
    loader = load(cfg, eval_fraction=0.25)
    trained = [next(loader) for _ in range(loader.batches_per_epoch)]
    held_out = [one.batch for one in loader.held_out(100)]
    renderer = Renderer(cfg.tokenizer)
    texts = [renderer._text(one) for one in conversations(20)]
    assert _conversations(trained, renderer) == sorted(texts[:15])
    assert _conversations(held_out, renderer) == sorted(texts[15:])


def _conversations(batches, renderer):
    found = []
    for batch in batches:
        for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            parts = [ids[begin:end] for begin, end in pairwise(starts)]
            found += [renderer._tokenizer.decode(one) for one in parts if one[0] != renderer.pad]
    return sorted(found)


MODELS = {
    "gpt2": lambda **more: GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_positions=128, n_embd=32, n_layer=2, n_head=2, **more)
    ),
    "llama": lambda **more: LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    ),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_losses_are_those_of_each_conversation_alone(folder, load, kind, attention):
    torch.manual_seed(0)
    model = MODELS[kind]().double().eval()
    model.set_attn_implementation(attention)
    words = {"path": str(folder / "chat.jsonl"), "tokenizer": str(folder / "plain"), "seq_len": 128}
    sums = []
    for packing in (True, False):
        loader = load(ChatConfig(**words, packing=packing), batch_size=3)
        total, items = 0.0, 0
        for _ in range(loader.batches_per_epoch):
            batch = next(loader)
            batch = {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}
            total += _sum(model, **batch)
            items += int((batch["labels"] != IGNORED).sum())
        sums.append((total, items))
    renderer = Renderer(words["tokenizer"])
    total, items = 0.0, 0
    for messages in conversations(20):
        ids, learnt = (torch.from_numpy(one)[None] for one in renderer.render(messages, ""))
        total += _sum(model, torch.where(learnt, ids, IGNORED), input_ids=ids)
        items += int(learnt.sum())
    assert sums == [(pytest.approx(total, rel=1e-12), items)] * 2


def _sum(model, labels, **inputs):
    with torch.no_grad():
        logits = model(**inputs).logits[:, :-1]
    return float(functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"))


def test_a_model_that_lets_conversations_see_each_other_is_refused(folder, load):
    batch = next(load(ChatConfig(path=str(folder / "chat.jsonl"), tokenizer=str(folder / "plain"), seq_len=128)))
    model = MODELS["gpt2"]()
    check_apart(model, make_task(model, batch), batch)
    for left_out in ("attention_mask", "position_ids"):
        given = model.forward
        model.forward = lambda *, left_out=left_out, given=given, **named: given(**{**named, left_out: None})
        with pytest.raises(RequestError, match=r"does not keep them apart .* set data.packing=false"):
            check_apart(model, make_task(model, batch), batch)
        model.forward = given


def test_long_and_silent_conversations_are_told(folder, load, tmp_path):
    rows = [*conversations(4), [{"role": "user", "content": "nobody"}], [{"role": "user", "content": "x" * 200}] * 2]
    rows[-1] = [rows[-1][0], {"role": "assistant", "content": "late"}]
    write_conversations(tmp_path / "chat.jsonl", rows)
    loader = load(ChatConfig(path=str(tmp_path), tokenizer=str(folder / "plain"), seq_len=96))
    assert loader.notes == (
        "1 of 6 conversations are cut at data.seq_len=96 tokens",
        "2 of 6 conversations have no answer to learn and are left out",
    )


def test_other_forms_of_conversations(folder, load, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = conversations(6)
    datasets.DatasetDict({"sft": datasets.Dataset.from_list([{"messages": one} for one in rows])}).save_to_disk(
        str(tmp_path / "saved")
    )
    roles = {"user": "human", "assistant": "gpt"}
    shared = [{"conversations": [{"from": roles[m["role"]], "value": m["content"]} for m in one]} for one in rows]
    (tmp_path / "shared.jsonl").write_text("\n".join(map(json.dumps, shared)))
    write_conversations(tmp_path / "chat.jsonl", rows)
    words = {"tokenizer": str(folder / "plain"), "seq_len": 128}
    prints = {
        load(ChatConfig(path=str(tmp_path / name), split="sft", **words)).fingerprint
        for name in ("saved", "shared.jsonl", "chat.jsonl")
    }
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("tokenizer", "line", "said"),
    [
        ("none", "", "has no chat template: put one into the folder as chat_template.jinja"),
        ("plain", '{"text": "a"}', r'chat.jsonl:1: has no messages: give \{"messages"'),
        ("plain", "{", "chat.jsonl:1: no JSON on this line"),
        ("changing", "", "writes a message otherwise when others follow"),
        ("strict", '{"messages": [{"role": "assistant", "content": "a"}]}', "does not take it: only users"),
        ("plain", '{"messages": [{"role": "user", "content": "a"}]}', "no conversation has an answer within"),
    ],
)
def test_what_cannot_be_learnt_is_said(folder, load, tmp_path, tokenizer, line, said):
    path = tmp_path / "chat.jsonl"
    write_conversations(path, conversations(3))
    if line:
        path.write_text(line)
    with pytest.raises(RequestError, match=said):
        load(ChatConfig(path=str(path), tokenizer=str(folder / tokenizer), seq_len=128))
