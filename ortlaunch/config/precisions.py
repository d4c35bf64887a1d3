"""Which precision goes with which backend, trainer and device: the rules, and the table that is made of them."""

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
"""Every trainer by name; DeepSpeed with each stage behind it."""


@dataclass(frozen=True)
class Cell:
    """One way to run."""

    backend: str
    trainer: str
    """Name of the trainer; for DeepSpeed with the stage behind it."""
    precision: Precision
    device: Device
    """`cpu` or `cuda`."""

    @property
    def refusal(self) -> str | None:
        """Why it cannot be run and what can be instead, None where it can."""
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
    """What a configured trainer is called in a cell."""
    variant = trainers.trainer_of(cfg).variant(cfg)
    return cfg.name if variant is None else f"{cfg.name} {variant}"


def cells(device: Device) -> list[Cell]:
    """Every combination on a device."""
    return [
        Cell(backend, trainer, precision, device)
        for backend in BACKENDS
        for trainer in TRAINERS
        for precision in Precision
    ]
