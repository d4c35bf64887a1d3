"""Replaces checkpoints that enter autograd again (``use_reentrant=True``), which can neither be traced nor compared.

torch's tracer fails in their ``autograd.Function``, and they refuse ``torch.autograd.grad``. What is computed again is
no matter of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint


@contextlib.contextmanager
def without_reentrance() -> Iterator[None]:
    """Makes checkpoints that run meanwhile others with the same gradients."""

    def apply(function: Callable[..., Any], preserve: bool, *inputs: Any) -> Any:
        if not any(isinstance(one, torch.Tensor) and one.requires_grad for one in inputs):
            # Then they give no gradient to what the function reads otherwise.
            with torch.no_grad():
                return function(*inputs)
        return checkpoint.checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=preserve)

    kind: Any = checkpoint.CheckpointFunction
    kind.apply = apply
    try:
        yield
    finally:
        del kind.apply
