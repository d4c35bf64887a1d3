"""Which precision goes with which backend, trainer and device: the rules, and the table that is made of them."""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.config.schema import Device, Precision

BACKENDS = ("eager", "compile", "ort")
TRAINERS = ("single", "ddp", "deepspeed 0", "deepspeed 1", "deepspeed 2", "deepspeed 3")


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
        if self.precision is Precision.fp16 and self.trainer == "deepspeed 0":
            return (
                "train.precision=fp16 does not go with trainer.zero_stage=0: there DeepSpeed divides the gradients by "
                "a loss scale that it never multiplied the loss with. Use trainer.zero_stage=1, or trainer=ddp"
            )
        if self.precision is not Precision.fp32 and self.backend == "ort" and self.device is Device.cpu:
            return (
                f"train.precision={self.precision.value} does not run with backend=ort on the CPU: ONNX Runtime has no "
                "such kernels there. Use train.precision=fp32, or backend=eager"
            )
        return None


def cells(device: Device) -> list[Cell]:
    """Every combination on a device."""
    return [
        Cell(backend, trainer, precision, device)
        for backend in BACKENDS
        for trainer in TRAINERS
        for precision in Precision
    ]
