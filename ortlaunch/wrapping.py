"""Public name of the wrapping order, for programs: see `ortlaunch.trainer.wrapping`."""

from ortlaunch.trainer.wrapping import (
    wrap,
    wrap_backend,
    wrap_trainer,
)

__all__ = [
    "wrap",
    "wrap_backend",
    "wrap_trainer",
]
