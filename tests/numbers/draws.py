"""Runs drawn from a seed: a model of odd parts, a trainer, a backend and settings of the loop.

No draw has what is refused: see test_used.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from tests.support.referee import Evaluated, Tensors

WIDTH = 16

MODULE = f'''
import os
import random

import torch
from torch import nn
from torch.nn import functional

D = {WIDTH}


class Dense(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.wide, self.back = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.back(torch.tanh(self.wide(x)))


class Gaps(nn.Module):
    """Weights that are parts of larger tensors, as pruning leaves them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(D, 2 * D) / 4)[:, :D])
        self.bias = nn.Parameter(torch.zeros(2 * D)[::2])

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight, self.bias))


class Turned(nn.Module):
    """A weight whose rows lie beside each other in memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(2 * D, D) / 4).t())
        self.back = nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.back(torch.tanh(x @ self.weight))


class Channels(nn.Module):
    """A convolution in channels_last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 2, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        maps = self.conv(x.reshape(-1, 4, 2, 2))[:, :, :2, :2]
        return x + torch.tanh(maps).reshape(x.shape)


class Shared(nn.Module):
    """One weight under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Frozen(nn.Module):
    """A layer that does not learn before one that does."""

    def __init__(self):
        super().__init__()
        self.fixed, self.free = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)

    def forward(self, x):
        return x + self.free(torch.relu(self.fixed(x)))


class Unused(nn.Module):
    """A layer that no step uses."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return torch.tanh(self.used(x))


class Turns(nn.Module):
    """Two branches that steps use in turn; all workers the same one."""

    def __init__(self):
        super().__init__()
        self.even, self.odd = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        branch = self.odd if int(self.calls) % 2 else self.even
        if self.training:
            self.calls += 1
        return torch.tanh(branch(x))


class Normed(nn.Module):
    """Statistics of the batch, and of each sample."""

    def __init__(self):
        super().__init__()
        self.batch, self.layer = nn.BatchNorm1d(D), nn.LayerNorm(D)

    def forward(self, x):
        return self.layer(x) + self.batch(x.reshape(-1, D)).reshape(x.shape)


class Average(nn.Module):
    """A running average of what it saw, which its result depends on, in a part of a larger tensor."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(D, D)
        self.register_buffer("seen", torch.zeros(2 * D)[::2])

    def forward(self, x):
        if self.training:
            self.seen.mul_(0.5).add_(0.5 * x.detach().reshape(-1, D).mean(0))
        return x + torch.tanh(self.scale(x - self.seen.clone()))


class Parts(nn.Module):
    """Buffers that are parts of one tensor."""

    def __init__(self):
        super().__init__()
        both = torch.linspace(-1, 1, 2 * D)
        self.register_buffer("low", both[:D])
        self.register_buffer("high", both[D:])
        self.mix = nn.Linear(D, D)

    def forward(self, x):
        return torch.tanh(self.mix(x * self.low + self.high))


class Expanded(nn.Module):
    """A buffer whose elements are one in memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("same", torch.full((1,), 0.5).expand(D))
        self.mix = nn.Linear(D, D)

    def forward(self, x):
        return torch.tanh(self.mix(x) * self.same)


class OwnGenerator(nn.Module):
    """Weights that each worker draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(os.getpid())
        self.mix = nn.Linear(D, D)
        self.mix.weight = nn.Parameter(torch.randn(D, D, generator=generator) / 4)

    def forward(self, x):
        return torch.tanh(self.mix(x))


class Penalty(nn.Module):
    """A part of the loss that depends on weights alone."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(D, D)

    def forward(self, x):
        return torch.tanh(self.mix(x)) + self.mix.weight.square().mean()


class Net(nn.Module):
    def __init__(self, parts, classes):
        super().__init__()
        torch.manual_seed(random.Random(parts).randrange(2**31))
        self.tokens = nn.Embedding(classes, D) if classes != 10 else None
        self.first = nn.Linear(64, D) if classes == 10 else None
        self.parts = nn.ModuleList(globals()[name]() for name in parts.split("-"))
        self.head = nn.Linear(D, classes)

    def hidden(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x)


class Digits(Net):
    def __init__(self, parts):
        super().__init__(parts, 10)

    def forward(self, pixel_values):
        return self.hidden(self.first(pixel_values.flatten(1)))


class Tokens(Net):
    def __init__(self, parts):
        super().__init__(parts, 24)

    def forward(self, input_ids):
        logits = self.hidden(self.tokens(input_ids))[:, :-1]
        return dict(loss=functional.cross_entropy(logits.reshape(-1, 24), input_ids[:, 1:].reshape(-1)))


class Masked(Net):
    """The loss is a mean over some of the tokens; their number differs between samples."""

    def __init__(self, parts):
        super().__init__(parts, 24)

    def forward(self, input_ids):
        logits = self.hidden(self.tokens(input_ids))[:, :-1]
        labels = torch.where(input_ids[:, 1:] < 6, input_ids[:, 1:], -100)
        return dict(loss=functional.cross_entropy(logits.reshape(-1, 24), labels.reshape(-1)))


def count(batch):
    return int((batch["input_ids"][:, 1:] < 6).sum())


class Rows(torch.utils.data.Dataset):
    """Nested samples of different lengths, collated here."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        rows = torch.randn(1 + index % 3, 64, generator=generator)
        return dict(pair=(rows, dict(keep=index % 4 != 0)), label=index % 10)

    def collate(self, samples):
        rows = [sample["pair"][0] for sample in samples]
        mask = [torch.ones(len(row)) for row in rows]
        return dict(
            pair=(
                nn.utils.rnn.pad_sequence(rows, batch_first=True),
                dict(
                    mask=nn.utils.rnn.pad_sequence(mask, batch_first=True),
                    keep=torch.tensor([sample["pair"][1]["keep"] for sample in samples]),
                ),
            ),
            labels=torch.tensor([sample["label"] for sample in samples]),
        )


class Own(Net):
    def __init__(self, parts):
        super().__init__(parts, 10)

    def loss(self, pair, labels):
        rows, more = pair
        mask = more["mask"].to(rows.dtype).unsqueeze(-1)
        mean = (rows * mask).sum(1) / mask.sum(1)
        return dict(loss=functional.cross_entropy(self.hidden(self.first(mean)), labels))

    def forward(self, pair, labels):
        return self.loss(pair, labels)


class OwnMasked(Own):
    """The loss is a mean over some of the samples."""

    def forward(self, pair, labels):
        return self.loss(pair, torch.where(pair[1]["keep"], labels, -100))


def kept(batch):
    return int(batch["pair"][1]["keep"].sum())
'''

PARTS = (
    "Dense",
    "Gaps",
    "Turned",
    "Channels",
    "Shared",
    "Frozen",
    "Unused",
    "Turns",
    "Normed",
    "Average",
    "Parts",
    "Expanded",
    "OwnGenerator",
    "Penalty",
)
_TRAINERS = {
    "single": ("trainer=single",),
    "ddp": ("trainer=ddp",),
    **{f"zero{stage}": ("trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4)},
    "fsdp": ("trainer=fsdp",),
}
# ONNX Runtime refuses Python that reads a value of a buffer. Its ZeRO 3 takes models of blocks, and it has no FSDP.
_WITHOUT_ORT = ("Turns",)
_ITEMS = {"Masked": "count", "OwnMasked": "kept"}
_EVALUATED = 13
_ORT_TRAINERS = ("single", "ddp", "zero0", "zero1", "zero2")


@dataclass(frozen=True)
class Draw:
    """A run, and where it is interrupted."""

    seed: int
    trainer: str
    backend: str
    workers: int
    parts: tuple[str, ...]
    kind: str
    """The class of the model: Digits, Tokens or Masked; Own and OwnMasked have nested data of their own."""
    words: tuple[str, ...]
    steps: int
    resumed_at: int | None
    """The steps of a first run, which a second one goes on from; None for one run."""

    def __str__(self) -> str:
        return f"{self.seed}-{self.trainer}-{self.backend}-{self.workers}"

    @property
    def sends_buffers(self) -> bool:
        """Whether each step begins with the first worker's buffers."""
        return self.trainer == "ddp"


KINDS = ("Digits", "Tokens", "Masked")
OWN = ("Own", "OwnMasked")
# A worker without a sample of its own repeats one, which these count or remember, and a norm takes no single sample.
_WITHOUT_OWN = ("Turns", "Normed", "Average")


def draw(seed: int, backends: tuple[str, ...] = ("eager",), kinds: tuple[str, ...] = KINDS) -> Draw:
    """The run of a seed, under one of `backends`, of a model of one of `kinds`."""
    dice = random.Random(seed)
    backend = dice.choice(backends)
    trainer = dice.choice(_ORT_TRAINERS if backend == "ort" else tuple(_TRAINERS))
    workers = 1 if trainer == "single" else dice.choice((1, 2, 2, 3))
    decay = dice.choice((0.0, 0.1))
    momentum = dice.choice((None, None, 0, 0.9))
    banned = set(_WITHOUT_ORT if backend != "eager" else ())
    banned |= set(_WITHOUT_OWN if kinds is OWN else ())
    # Refused.
    banned |= {"Turns"} if trainer.startswith("zero") else set()
    if trainer.startswith("zero") and decay:
        banned.add("Unused")
    parts = tuple(dice.sample([part for part in PARTS if part not in banned], dice.choice((1, 2, 3))))
    kind = dice.choice(kinds)
    steps = dice.randint(4, 8)
    resumed_at = dice.choice((None, None, dice.randint(1, steps - 1)))
    scheduler = "constant" if resumed_at else dice.choice(("constant", "linear", "cosine"))
    words = [
        *_TRAINERS[trainer],
        f"backend={backend}",
        "model=factory",
        f"model.target=nets:{kind}",
        f"model.params.parts={'-'.join(parts)}",
        *_data_of(kind, dice),
        f"scheduler={scheduler}",
        f"scheduler.warmup_steps={dice.choice((0, 2))}",
        f"train.batch_size={dice.randint(2, 4)}",
        f"train.grad_accumulation={dice.choice((1, 1, 2, 3))}",
        f"train.clip_grad_norm={dice.choice(('null', '0.2', '1.0'))}",
        f"seed={seed}",
    ]
    if momentum is None:
        words += ["optimizer=adamw", "optimizer.lr=0.01", "optimizer.eps=1e-4"]
    else:
        words += ["optimizer=sgd", "optimizer.lr=0.1", f"optimizer.momentum={momentum}"]
    words += _further(random.Random(f"{seed} further"), words, trainer, kind, can_decay="Unused" not in parts)
    words += [f"optimizer.weight_decay={decay}", f"optimizer.decay_bias_and_norm={dice.choice(('true', 'false'))}"]
    if kind in _ITEMS:
        words.append(f"train.items=nets:{_ITEMS[kind]}")
    if dice.random() < 0.4:
        words += ["data.eval_fraction=0.1", "train.eval_every=2", f"train.eval_samples={_EVALUATED}"]
    if trainer == "ddp" and {"Unused", "Turns"} & set(parts):
        words.append("trainer.find_unused_parameters=true")
    return Draw(seed, trainer, backend, workers, parts, kind, tuple(words), steps, resumed_at)


def _further(dice: random.Random, words: list[str], trainer: str, kind: str, *, can_decay: bool) -> list[str]:
    """Keys of other optimizers, of groups and of the average, for some of the draws."""
    more = []
    classes = ("NAdam", "RAdam", "Adamax")
    if "optimizer=adamw" in words and dice.random() < 0.4:
        words[words.index("optimizer=adamw")] = "optimizer=factory"
        words[words.index("optimizer.eps=1e-4")] = "optimizer.params.eps=1e-4"
        more.append(f"optimizer.target=torch.optim:{dice.choice(classes)}")
    if dice.random() < 0.3:
        first = "first" if kind == "Digits" or kind in OWN else "tokens"
        groups = [
            "{match: head.weight, lr_factor: 0.3}",
            f"{{match: '{first}.*', frozen: true}}",
            f"{{match: 'head.*', target: 'torch.optim:{dice.choice(classes)}', lr_factor: 0.1, params: {{eps: 1e-4}}}}",
            *(["{match: '*.bias', weight_decay: 0.2}"] if can_decay else []),
        ]
        more.append(f"optimizer.groups=[{', '.join(dice.sample(groups, 2))}]")
    if not trainer.startswith("zero") and dice.random() < 0.4:
        more.append(f"train.ema={dice.choice((0.5, 0.9))}")
    return more


def _data_of(kind: str, dice: random.Random) -> tuple[str, ...]:
    if kind in OWN:
        return ("data=factory", "data.target=nets:Rows", f"data.params.n={dice.randint(20, 60)}", "data.workers=1")
    return ("data=digits",) if kind == "Digits" else ("data=synthetic", "data.vocab_size=24", "data.seq_len=12")


def loss(model: nn.Module, buffers: Tensors, batch: Tensors) -> torch.Tensor:
    """The loss of a micro-batch, by plain torch.

    Args:
        model: a `Digits` or `Tokens`.
        buffers: the worker's, which the forward may change.
        batch: what the worker took.
    """
    for name, value in buffers.items():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, value)
    outputs = model(**{name: tensor for name, tensor in batch.items() if name != "labels" or "pair" in batch})
    # A forward changes a buffer in place, or puts another tensor into its place.
    buffers.update(model.named_buffers())
    return outputs["loss"] if isinstance(outputs, dict) else functional.cross_entropy(outputs, batch["labels"])


def items(kind: str, batch: Tensors) -> int:
    """What the loss of a batch is a mean over."""
    if kind == "OwnMasked":
        return int(batch["pair"][1]["keep"].sum())
    if kind == "Own":
        return len(batch["labels"])
    return int((batch["input_ids"][:, 1:] < 6).sum()) if kind == "Masked" else len(next(iter(batch.values())))


def evaluated(one: Draw) -> Evaluated | None:
    """The held-out samples of a draw, read without ortlaunch; None if nothing is evaluated."""
    if f"train.eval_samples={_EVALUATED}" not in one.words:
        return None
    if one.kind == "Digits":
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1)
        images = (images - images.mean()) / images.std()
        first = len(images) - int(len(images) * 0.1)
        chosen = slice(first, first + _EVALUATED)
        return Evaluated({"pixel_values": images[chosen], "labels": torch.from_numpy(digits.target[chosen])}, every=2)
    if one.kind in OWN:
        names: dict[str, Any] = {"__name__": "nets"}
        exec(MODULE, names)
        number = next(int(word.partition("n=")[2]) for word in one.words if word.startswith("data.params.n="))
        rows = names["Rows"](number)
        kept = [rows[index] for index in range(number - int(number * 0.1), number)]
        return Evaluated(rows.collate(kept[:_EVALUATED]), every=2)
    first = 4096 - int(4096 * 0.1)
    drawn = [
        np.random.default_rng((one.seed, index)).integers(24, size=12) for index in range(first, first + _EVALUATED)
    ]
    return Evaluated({"input_ids": torch.from_numpy(np.stack(drawn))}, every=2)
