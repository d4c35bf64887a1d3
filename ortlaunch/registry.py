"""Public name of the model registry, for programs: see `ortlaunch.models.registry`."""

from ortlaunch.models.registry import (
    ModelEntry,
    available,
    build_model,
    check_request,
    register_model,
)

__all__ = [
    "ModelEntry",
    "available",
    "build_model",
    "check_request",
    "register_model",
]
