"""Public name of the errors, for programs: see `ortlaunch.base.errors`."""

from ortlaunch.base.errors import (
    RequestError,
    TrainingError,
)

__all__ = [
    "RequestError",
    "TrainingError",
]
