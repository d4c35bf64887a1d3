"""Which precisions a backend, trainer and device support: the rules, and the table that is made from them."""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.config import trainers
from ortlaunch.config.schema import Device, Precision
from ortlaunch.config.trainers.base import TrainerConfig

BACKENDS = ("eager", "compile", "ort")
TRAINERS = tuple(
    name if trainer.variants is None else f"{name} {value}"
    for name, trainer in trainers.TRAINERS.items()
    for value in (trainer.variants.values if trainer.variants else (0,))
)
"""The names of all trainers. DeepSpeed appears once for each ZeRO stage, as ``deepspeed 1``."""


@dataclass(frozen=True)
class Cell:
    """One combination of backend, trainer, precision and device."""

    backend: str
    trainer: str
    """The trainer's name; for DeepSpeed the ZeRO stage follows it."""
    precision: Precision
    device: Device
    """`cpu` or `cuda`."""

    @property
    def refusal(self) -> str | None:
        """Why the combination cannot run and what to use instead; None if it can run."""
        name, _, variant = self.trainer.partition(" ")
        of_trainer = trainers.TRAINERS[name].refusal(self.backend, self.precision, int(variant) if variant else None)
        if of_trainer is not None:
            return of_trainer
        if self.precision is not Precision.fp32 and self.backend == "ort" and self.device is Device.cpu:
            return (
                f"train.precision={self.precision.value} does not run with backend=ort on the CPU: ONNX Runtime has no "
                "such kernels there. Use train.precision=fp32, or backend=eager"
            )
        return None


def cell_name(cfg: TrainerConfig) -> str:
    """The name of a configured trainer, as `Cell.trainer` has it."""
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
