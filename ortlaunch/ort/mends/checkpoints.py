"""Replaces checkpoints that enter autograd again (``use_reentrant=True``), which can neither be traced nor compared.

torch's tracer fails in their ``autograd.Function``, and they refuse ``torch.autograd.grad``. What is computed again is
no matter of the graph. DeepSpeed's checkpoints enter autograd again too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint

_DEEPSPEEDS = "deepspeed.runtime.activation_checkpointing.checkpointing"


@contextlib.contextmanager
def without_reentrance() -> Iterator[None]:
    """Makes checkpoints that run meanwhile others with the same gradients."""

    def apply(function: Callable[..., Any], preserve: bool, *inputs: Any) -> Any:
        if not any(isinstance(one, torch.Tensor) and one.requires_grad for one in inputs):
            # Then they give no gradient to what the function reads otherwise.
            with torch.no_grad():
                return function(*inputs)
        return checkpoint.checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=preserve)

    def apply_deepspeed(function: Callable[..., Any], all_outputs: list[Any], *inputs: Any) -> Any:
        outputs = apply(function, True, *inputs)
        all_outputs += [outputs] if isinstance(outputs, torch.Tensor) else outputs
        return outputs

    replaced: list[tuple[Any, Callable[..., Any]]] = [(checkpoint.CheckpointFunction, apply)]
    # A model that has such checkpoints has imported the module.
    if deepspeeds := sys.modules.get(_DEEPSPEEDS):
        replaced.append((deepspeeds.CheckpointFunction, apply_deepspeed))
    for kind, call in replaced:
        kind.apply = call
    try:
        yield
    finally:
        for kind, _ in replaced:
            del kind.apply
