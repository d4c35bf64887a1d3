"""A training script as one writes it by hand for torchrun: DistributedDataParallel, AdamW, a line every ten steps."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.benchmarks.others.work import CLIP, LEARNING_RATE, LOG_EVERY, WEIGHT_DECAY, Request


def main() -> None:
    asked = Request()
    on_cuda = asked.device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(asked.device)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    model = DistributedDataParallel(asked.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    loader = DataLoader(
        asked.data, asked.batch_size, sampler=DistributedSampler(asked.data), drop_last=True, pin_memory=on_cuda
    )
    model.train()
    for step, batch in enumerate(loader, 1):
        batch = {name: tensor.to(asked.device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(asked.device.type, asked.half, enabled=asked.half is not None):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0 and os.environ["RANK"] == "0":
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        asked.step_done()
        if step == asked.steps:
            break
    asked.report()
    dist.destroy_process_group()


main()
