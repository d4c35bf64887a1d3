"""Loops in the manner of users' scripts, attached: python attach_probe.py OUT TRAINER [KEY=VALUE ...] [NAME ...].

torchrun starts it too. `plain` kills itself after the step ``KILLED_AT``, unless it has gone on from a checkpoint.
Each worker computes the same loop in plain torch, in one process and with the whole batches, and compares the weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ortlaunch
from ortlaunch.trainer.attached import Attached

STEPS, BATCH = 6, 8
KEYS = (f"train.steps={STEPS}", "train.log_every=2", "train.checkpoint_every=4")
Backward = Callable[[Tensor], None]


def net(seed: int, inputs: int = 4, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).to(DTYPE)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def data() -> TensorDataset:
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(7)).to(DTYPE)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def batches(rank: int, workers: int) -> DataLoader[tuple[Tensor, ...]]:
    """A worker's share of each batch; the workers' shares together are the batch of a single worker."""
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data(), workers, rank, seed=3)
    return DataLoader(data(), batch_size=BATCH // workers, sampler=sampler, drop_last=True)


def whole() -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a single worker, epoch after epoch."""
    loader, epoch = batches(0, 1), 0
    assert isinstance(loader.sampler, DistributedSampler)
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def drawn(step: int, size: int, *more: int) -> Tensor:
    return torch.randn(size, *more, generator=torch.Generator().manual_seed(1000 + step)).to(DTYPE)


def share(batch: Tensor, run: Attached) -> Tensor:
    """This worker's part of what all workers draw alike."""
    return batch.chunk(run.world_size)[run.rank]


def plain(run: Attached | None) -> list[nn.Module]:
    model = net(1)
    optimizer = adam(model)
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def loss_of(called: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = (called(inputs) - target).square().mean()
        return loss

    if run is None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for _, (inputs, target) in zip(range(STEPS), whole(), strict=False):
            loss_of(model, inputs, target).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return [model]
    wrapped, wrapped_optimizer = run.wrap(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped_optimizer, 2, 0.5)
    scheduler.load_state_dict(run.restored.get("scheduler", scheduler.state_dict()))
    for step, (inputs, target) in run.steps(batches(run.rank, run.world_size)):
        loss = loss_of(wrapped, inputs, target)
        run.backward(loss)
        wrapped_optimizer.step()
        scheduler.step()
        wrapped_optimizer.zero_grad()
        run.log(step, loss=loss, own=2 * loss)
        if not run.restored and str(step) == os.environ.get("KILLED_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        if run.saves(step):
            run.save(step, scheduler=scheduler.state_dict())
    return [model]


def gan(run: Attached | None, *, penalty: float = 0.0) -> list[nn.Module]:
    g, d = net(1, 3, 4), net(2)
    g_step, d_step = adam(g), adam(d)
    real = whole()
    back_g: Backward = Tensor.backward
    back_d: Backward = Tensor.backward
    steps: Iterator[int] = iter(range(1, STEPS + 1))
    made, judge = g, d
    if run is not None:
        made, g_step = run.wrap(g, g_step)
        judge, d_step = run.wrap(d, d_step)
        back_g, back_d = (lambda loss: run.backward(loss, of=made)), (lambda loss: run.backward(loss, of=judge))
        steps = run.steps()
    for step in steps:
        images, noise = next(real)[0], drawn(step, BATCH, 3)
        if run is not None:
            images, noise = share(images, run), share(noise, run)
        fake = made(noise)
        d_step.zero_grad()
        loss = judge(fake.detach()).mean() - judge(images).mean()
        if penalty:
            between = ((images + fake.detach()) / 2).requires_grad_(True)
            (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
            loss = loss + penalty * (slope.norm(dim=1) - 1).square().mean()
        back_d(loss)
        d_step.step()
        g_step.zero_grad()
        of_g = -judge(made(noise)).mean()
        back_g(of_g)
        g_step.step()
        if run is not None:
            run.log(step, d=loss, g=of_g)
    return [g, d]


def gradient_penalty(run: Attached | None) -> list[nn.Module]:
    return gan(run, penalty=0.5)


def distillation(run: Attached | None) -> list[nn.Module]:
    student, teacher = net(1), net(2).requires_grad_(False)
    optimizer = adam(student)
    if run is None:
        for _, (inputs, target) in zip(range(STEPS), whole(), strict=False):
            found = student(inputs)
            ((found - target).square().mean() + (found - teacher(inputs)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [student]
    teacher = run.wrap(teacher)
    model, optimizer = run.wrap(student, optimizer)
    for _, (inputs, target) in run.steps(batches(run.rank, run.world_size)):
        found = model(inputs)
        run.backward((found - target).square().mean() + (found - teacher(inputs)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [student]


def reinforcement(run: Attached | None) -> list[nn.Module]:
    """Batches whose size changes, made by the policy itself."""
    policy = net(1, 4, 2)
    optimizer = adam(policy)
    model: nn.Module = policy
    back: Backward = Tensor.backward
    steps: Iterator[int] = iter(range(1, STEPS + 1))
    if run is not None:
        model, optimizer = run.wrap(policy, optimizer)
        back, steps = run.backward, run.steps()
    for step in steps:
        states = drawn(step, 4 * (1 + step % 3), 4)
        if run is not None:
            states = share(states, run)
        with torch.no_grad():
            actions = model(states).argmax(1)
        back(-(model(states).log_softmax(1).gather(1, actions[:, None])[:, 0] * states[:, 0]).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [policy]


def own_accumulation(run: Attached | None) -> list[nn.Module]:
    model = net(1)
    optimizer = adam(model)
    if run is None:
        for _, (inputs, target) in zip(range(STEPS), whole(), strict=False):
            (model(inputs) - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [model]
    called, optimizer = run.wrap(model, optimizer)
    for _, (inputs, target) in run.steps(batches(run.rank, run.world_size)):
        first, second = inputs.chunk(2), target.chunk(2)
        with run.accumulating(called):
            run.backward((called(first[0]) - second[0]).square().mean() / 2)
        run.backward((called(first[1]) - second[1]).square().mean() / 2)
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def by_key(run: Attached | None) -> list[nn.Module]:
    """Two micro-batches to a step; both together are two batches of a single worker."""
    model = net(1)
    optimizer = adam(model)
    if run is None:
        given = whole()
        for _ in range(STEPS):
            for _ in range(2):
                inputs, target = next(given)
                ((model(inputs) - target).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [model]
    called, optimizer = run.wrap(model, optimizer)
    for step, (inputs, target) in run.steps(batches(run.rank, run.world_size)):
        optimizer.zero_grad()
        loss = (called(inputs) - target).square().mean()
        run.backward(loss)
        optimizer.step()
        run.log(step, loss=loss)
    return [model]


LOOPS: dict[str, tuple[Callable[[Attached | None], list[nn.Module]], tuple[str, ...]]] = {
    "plain": (plain, ()),
    "gan": (gan, ()),
    "gradient_penalty": (gradient_penalty, ()),
    "distillation": (distillation, ()),
    "reinforcement": (reinforcement, ()),
    "own_accumulation": (own_accumulation, ()),
    "by_key": (by_key, ("train.grad_accumulation=2",)),
}


def difference(name: str, out: Path) -> float:
    """The largest difference of a weight between an attached loop and the same one in plain torch."""
    global DTYPE
    loop, keys = LOOPS[name]
    DTYPE = torch.float32 if is_fp32 else torch.float64
    run = ortlaunch.attach(
        *KEYS, f"trainer={TRAINER}", *MORE, *keys, f"run_root={out.parent}/runs", f"experiment={name}"
    )
    found = [_whole(one) for model in loop(run) for one in model.parameters()]
    DTYPE = torch.float64
    expected = [one.detach() for model in loop(None) for one in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def _whole(weight: Tensor) -> Tensor:
    if hasattr(weight, "ds_id"):
        from deepspeed import zero

        with zero.GatheredParameters([weight]):
            return weight.detach().clone()
    return weight.detach().full_tensor() if isinstance(weight, DTensor) else weight.detach().clone()


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    OUT, TRAINER, *words = Path(sys.argv[1]), *sys.argv[2:]
    MORE = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    # DeepSpeed and ONNX Runtime have no kernels for fp64, and bf16 is a precision of fp32; what is expected is.
    is_fp32 = TRAINER == "deepspeed" or not {"backend=ort", "train.precision=bf16"}.isdisjoint(MORE)
    DTYPE = torch.float64
    results = {name: difference(name, OUT) for name in names or LOOPS}
    if int(os.environ.get("RANK", "0")) == 0:
        OUT.write_text(json.dumps(results))
        print(results)
