"""Training scripts: one in the manner of many (argparse, DDP, a checkpoint at SIGTERM), and one that attaches."""

from __future__ import annotations

import textwrap
from pathlib import Path

LOOP = """
    import argparse, os, signal, sys, time
    from pathlib import Path

    import mlflow
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--wait", type=int, nargs="*", default=[])
    args = parser.parse_args()
    asked, attempt = [], int(os.environ["ORTLAUNCH_ATTEMPT"])
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    saved = Path(os.environ["ORTLAUNCH_CHECKPOINTS"], "last.pt")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    first = 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        first = state["step"]
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for step in range(first, args.steps):
        loss = (model(torch.ones(2, 3)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print("step", step, flush=True)
            mlflow.log_metric("loss", loss.item(), step=step)
        stop = torch.tensor(len(asked))
        dist.all_reduce(stop)
        if stop or [step] == args.wait[attempt : attempt + 1]:
            while not asked:
                time.sleep(0.05)
            if dist.get_rank() == 0:
                torch.save({"model": model.module.state_dict(), "step": step + 1}, saved)
            dist.barrier()
            sys.exit(0)
"""


def alone(lr: float, steps: int) -> list[float]:
    """The losses of the same loop by plain torch in one process."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = (model(torch.ones(2, 3)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def write_loop(folder: Path) -> str:
    """Writes ``train.py``, which waits for the signal at the steps of ``--wait``, one for each attempt."""
    text = textwrap.dedent(LOOP)
    (folder / "train.py").write_text(text)
    return text


ATTACHED = """
    import os, signal, sys, time

    import torch
    from torch.optim.swa_utils import AveragedModel
    from torch.utils.data import DataLoader, TensorDataset

    import ortlaunch

    run = ortlaunch.attach("train.steps=14", "train.log_every=1", "train.checkpoint_every=4", *sys.argv[1:])
    torch.manual_seed(run.rank)
    inputs = torch.randn(40, 4, dtype=torch.float64)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), 8, shuffle=True)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    plain = torch.nn.Sequential(*layers).double()
    average = AveragedModel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model, optimizer = run.wrap(plain, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if run.restored:
        average.load_state_dict(run.restored["average"])
        scheduler.load_state_dict(run.restored["scheduler"])
    for step, (x, y) in run.steps(loader):
        loss = (model(x) - y).square().mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(plain)
        weight = next(average.parameters()).sum().item()
        run.log(step, loss=loss, own=weight)
        if run.saves(step):
            run.save(step, average=average.state_dict(), scheduler=scheduler.state_dict())
        print("step", step, flush=True)
        time.sleep(float(os.environ.get("SECONDS_A_STEP", 0)))
        if [str(step), run.restored] == [os.environ.get("KILLED_AT"), {}]:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def attached_alone() -> list[tuple[float, float]]:
    """The losses of `ATTACHED`, and what it logs of its average, by plain torch in one process."""
    import torch
    from torch.optim.swa_utils import AveragedModel
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    inputs = torch.randn(40, 4, dtype=torch.float64)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), 8, shuffle=True)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers).double()
    average = AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    logged: list[tuple[float, float]] = []
    while True:
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average.update_parameters(model)
            logged.append((loss.item(), next(average.parameters()).sum().item()))
            if len(logged) == 14:
                return logged


def write_attached(folder: Path) -> None:
    """Writes ``train.py``, which kills itself at the step ``KILLED_AT``."""
    (folder / "train.py").write_text(textwrap.dedent(ATTACHED))


FAILING = """
    import sys

    import torch

    import ortlaunch

    strength = 1.0

    class Net(torch.nn.Linear):
        def forward(self, x, shift=None):
            return super().forward(x * strength if shift is None else x + shift)

    run = ortlaunch.attach("train.steps=6", *sys.argv[1:])
    torch.manual_seed(0)
    plain = Net(4, 1)
    model, optimizer = run.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for step in run.steps():
        x = torch.randn(8, 4)
        if step == 4:
            {what}
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def write_failing(folder: Path, what: str) -> None:
    """Writes ``train.py``, which does something wrong in its fourth step."""
    (folder / "train.py").write_text(textwrap.dedent(FAILING).format(what=what))
