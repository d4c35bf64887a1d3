"""Tasks as their users write them, one file each: 50 steps are those of a plain loop of one process in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from ortlaunch.config.load import load_config
from tests.support.referee import course_of, replayed

PAIRS = '''
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

class Pairs(Dataset):
    """Two views of the same thing."""

    def __init__(self, n=90):
        draw = torch.Generator().manual_seed(1)
        things = torch.randn(n, 12, generator=draw)
        self.views = [things + 0.3 * torch.randn(n, 12, generator=draw) for _ in range(2)]

    def __len__(self):
        return len(self.views[0])

    def __getitem__(self, index):
        return {"left": self.views[0][index], "right": self.views[1][index]}

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 8))

    def forward(self, x):
        return functional.normalize(self.layers(x), dim=-1)

def step(model, batch):
    left, right = model(batch["left"]), model(batch["right"])
    alike = left @ right.T / 0.5
    target = torch.arange(len(left), device=left.device)
    loss = (functional.cross_entropy(alike, target) + functional.cross_entropy(alike.T, target)) / 2
    return loss, {"found": (alike.argmax(1) == target).float().mean()}

def data():
    return Pairs()

model = Encoder
'''
SERIES = '''
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

class Series(Dataset):
    """Noisy sines, each with what comes next."""

    def __init__(self, n=100):
        draw = torch.Generator().manual_seed(2)
        time = torch.linspace(0, 6, 33)
        phase, speed = torch.rand(n, 1, generator=draw) * 6, 1 + torch.rand(n, 1, generator=draw)
        self.values = torch.sin(phase + speed * time) + 0.05 * torch.randn(n, 33, generator=draw)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index, :32], self.values[index, 32]

class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 5, padding=2)
        self.head = nn.Linear(8 * 8, 1)

    def forward(self, past):
        seen = functional.avg_pool1d(torch.tanh(self.conv(past[:, None])), 4)
        return self.head(seen.flatten(1))[:, 0]

def step(model, batch):
    past, coming = batch
    return functional.huber_loss(model(past), coming, delta=0.5)

def data():
    return Series()

model = Forecast
'''
TASKS = {"pairs": PAIRS, "series": SERIES}
HOW = {
    "one worker": (1, "trainer=single", "backend=eager", "train.grad_accumulation=2"),
    "two workers": (2, "trainer=ddp", "backend=eager"),
    "three workers": (3, "trainer=ddp", "backend=eager", "train.grad_accumulation=2"),
    "compile": (2, "trainer=ddp", "backend=compile"),
    "ort": (2, "trainer=ddp", "backend=ort", "train.grad_accumulation=2"),
}
BOUND = 1e-5
"""The largest relative difference of a loss that fp32 makes in 50 steps; plain torch in fp32 has some 3e-6."""
IN_CI = {("pairs", "three workers"), ("series", "ort")}
CASES = [
    pytest.param(
        task,
        how,
        marks=[*([] if (task, how) in IN_CI else [pytest.mark.nightly]), *([pytest.mark.ort] if how == "ort" else [])],
    )
    for task in TASKS
    for how in HOW
]


@pytest.mark.parametrize(("task", "how"), CASES)
def test_a_task_is_a_plain_loop(train, tmp_path, task, how):
    (tmp_path / "mine.py").write_text(TASKS[task])
    workers, *words = HOW[how]
    record = tmp_path / "record"
    record.mkdir()
    run = train(
        tmp_path,
        *("model=factory", "model.target=mine:model", "data=factory", "data.target=mine:data", "train.step=mine:step"),
        *("train.batch_size=4", "train.steps=50", "train.log_every=1", "tracking=none", "optimizer.lr=0.003"),
        *("data.eval_fraction=0", *words),
        workers=workers,
        record=record,
    )
    assert run.status == "FINISHED", run.report
    names = {"__name__": "mine"}
    exec(TASKS[task], names)

    def loss(model, _buffers, batch):
        found = names["step"](model, batch)
        return found[0] if isinstance(found, tuple) else found

    exact = replayed(
        names["model"](),
        loss,
        lambda batch: len(batch["left"] if isinstance(batch, dict) else batch[0]),
        load_config(run.run_dir / "config.yaml"),
        [record],
        first_steps=50,
        sends_buffers=False,
        workers=workers,
        evaluated=None,
    )
    losses = course_of([run]).losses
    assert len(losses) == 50
    off = max(abs(one - other) / abs(other) for one, other in zip(losses, exact.losses, strict=True))
    print(f"{task}, {how}: {off:.1e}")
    assert off <= BOUND, f"{off:.2e}"
    assert math.isfinite(off) and torch.tensor(exact.losses[-5:]).mean() < torch.tensor(exact.losses[:5]).mean()
