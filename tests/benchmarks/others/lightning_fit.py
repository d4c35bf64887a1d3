"""The same by Lightning with its MLflow logger."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import MLFlowLogger
from torch.utils.data import DataLoader

from tests.benchmarks.others.work import CLIP, LEARNING_RATE, LOG_EVERY, WEIGHT_DECAY, Request


class _Module(lightning.LightningModule):
    def __init__(self, asked: Request) -> None:
        super().__init__()
        self.model = asked.model
        self._asked = asked

    def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train/loss", loss)
        return loss

    def on_train_batch_end(self, *_args: Any) -> None:
        self._asked.step_done()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def main() -> None:
    asked = Request()
    is_first = os.environ["RANK"] == "0"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=asked.steps,
        gradient_clip_val=CLIP,
        log_every_n_steps=LOG_EVERY,
        # With one on each worker two of them make the database at once, and break it.
        logger=is_first and MLFlowLogger("bench", tracking_uri=f"sqlite:///{asked.folder}/mlflow.db"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=asked.folder,
    )
    loader = DataLoader(asked.data, asked.batch_size, shuffle=True, drop_last=True)
    module = _Module(asked)
    module.train()
    trainer.fit(module, loader)
    asked.report()


main()
