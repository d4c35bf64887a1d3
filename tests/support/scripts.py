"""A training script in the manner of many: argparse, a plain loop under DDP, a checkpoint at SIGTERM."""

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
