"""The same by transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.benchmarks.others.work import CLIP, LEARNING_RATE, LOG_EVERY, WEIGHT_DECAY, Request


class _Clock(TrainerCallback):
    def __init__(self, asked: Request) -> None:
        self._asked = asked

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self._asked.step_done()


def main() -> None:
    asked = Request()
    arguments = TrainingArguments(
        output_dir=str(asked.folder / "out"),
        use_cpu=True,
        max_steps=asked.steps,
        per_device_train_batch_size=asked.batch_size,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(asked.model, arguments, train_dataset=asked.data, callbacks=[_Clock(asked)]).train()
    asked.report()


main()
