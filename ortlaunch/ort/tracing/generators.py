"""Refuses models that draw random numbers from a generator of their own, or that seed torch's generator in forward.

A graph has torch's default generator alone. It repeats no seeding, so that numbers which are the same in each step of
eager training would be new ones in each step of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ortlaunch.ort.refusal import refusal
from ortlaunch.ort.source import asking_place, location, statement_at
from ortlaunch.ort.tracing.untraceable import Except


class RefusesOwnGenerators(TorchFunctionMode):
    """Raises at a draw from a generator that is not torch's default one.

    Raises:
        RequestError: names the statement.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is None:
            return func(*args, **(kwargs or {}))
        if generator is not torch.default_generator:
            place = asking_place()
            raise refusal(
                f"`{statement_at(*place)}` at {location(place)} draws random numbers from a generator of its own, "
                "which ONNX Runtime's graph cannot: draw from torch's default generator (without generator=), or use "
                "backend=eager or backend=compile"
            )
        return func(*args, **{**kwargs, "generator": None})


@contextlib.contextmanager
def seeding_refused() -> Iterator[None]:
    """Raises until its end where torch's generator is seeded; the message names the statement."""
    module: Any = torch.random
    original = module.default_generator
    module.default_generator = Except(original, manual_seed=_refuse_seeding, seed=_refuse_seeding)
    try:
        yield
    finally:
        module.default_generator = original


def _refuse_seeding(*_seed: Any) -> Any:
    place = asking_place()
    raise refusal(
        f"`{statement_at(*place)}` at {location(place)} seeds torch's generator in forward, which would happen once "
        "under ONNX Runtime, while the model is traced, and never again: keep numbers that stay the same in a buffer, "
        "or use backend=eager or backend=compile"
    )
