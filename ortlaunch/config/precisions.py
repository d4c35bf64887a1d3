"""Which precisions a backend, trainer and device support: the rules, and the table that is made from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ortlaunch.config import trainers
from ortlaunch.config.schema import Device, Precision
from ortlaunch.config.trainers.base import TrainerConfig


def _trainer_names() -> Iterator[str]:
    for name, trainer in trainers.TRAINERS.items():
        if trainer.variants is None:
            yield name
        else:
            yield from (f"{name} {variant}" for variant in trainer.variants.values)


BACKENDS = ("eager", "compile", "ort")
TRAINERS = tuple(_trainer_names())
"""The names of all trainers. A trainer with variants appears once for each of them: ``deepspeed 1`` is ZeRO stage 1."""


@dataclass(frozen=True)
class Cell:
    """One combination of backend, trainer, precision and device."""

    backend: str
    trainer: str
    """A name of `TRAINERS`."""
    precision: Precision
    device: Device
    """`cpu` or `cuda`."""

    @property
    def refusal(self) -> str | None:
        """Why the combination cannot run and what to use instead; None if it can run."""
        name, _, text = self.trainer.partition(" ")
        variant = int(text) if text else None
        if reason := trainers.TRAINERS[name].refusal(self.backend, self.precision, variant):
            return reason
        if self.precision is not Precision.fp32 and self.backend == "ort" and self.device is Device.cpu:
            return (
                f"train.precision={self.precision.value} does not run with backend=ort on the CPU: ONNX Runtime has no "
                "such kernels there. Use train.precision=fp32, or backend=eager"
            )
        return None


def cell_name(cfg: TrainerConfig) -> str:
    """The name of a configured trainer in `TRAINERS`."""
    variant = trainers.trainer_of(cfg).variant(cfg)
    return cfg.name if variant is None else f"{cfg.name} {variant}"


def cells(device: Device) -> list[Cell]:
    """All combinations on a device."""
    return [
        Cell(backend, trainer, precision, device)
        for backend in BACKENDS
        for trainer in TRAINERS
        for precision in Precision
    ]
