"""The same by a loop with Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from tests.benchmarks.others.work import CLIP, LEARNING_RATE, LOG_EVERY, WEIGHT_DECAY, Request


def main() -> None:
    accelerator = Accelerator(cpu=True)
    asked = Request()
    optimizer = torch.optim.AdamW(asked.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    loader = DataLoader(asked.data, asked.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(asked.model, optimizer, loader)
    model.train()
    for step, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            accelerator.print(f"step {step} loss {loss.item():.4f}")
        asked.step_done()
        if step == asked.steps:
            break
    asked.report()
    accelerator.end_training()


main()
