"""Imports what a worker needs for its trainer and its backend, before it connects to the others."""

from __future__ import annotations

from typing import Any

from ortlaunch.base import output
from ortlaunch.base.programs import add_to_path
from ortlaunch.config.trainers.base import Trainer
from ortlaunch.trainer.garbage import left_out


def import_stack(trainer: Trainer[Any], backend: str) -> None:
    """Imports torch, the trainer's packages and the backend's.

    Args:
        trainer: the configured trainer.
        backend: the backend's name.
    """
    with left_out():
        import torch  # noqa: F401

        if trainer.packages:
            add_to_path()  # DeepSpeed compiles its own optimizers when they are first used.
        trainer.import_packages()
        if backend == "ort":
            from ortlaunch.ort import session

            session.import_ortmodule()
    output.quiet_library_logs()
