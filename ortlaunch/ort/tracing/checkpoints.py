"""Replaces checkpoints that enter autograd again (``use_reentrant=True``), which can neither be traced nor compared.

torch's tracer fails in their ``autograd.Function``, and they refuse ``torch.autograd.grad``. DeepSpeed's checkpoints
enter autograd again too. What is computed again is no matter of the graph, except for buffers: the second computation
changes them a second time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils import checkpoint

from ortlaunch.ort.refusal import refusal

_DEEPSPEEDS = "deepspeed.runtime.activation_checkpointing.checkpointing"
_GENERATOR = "_checkpoint_without_reentrant_generator"
"""torch's function that yields before and after what a checkpoint computes."""
_Around = Callable[[contextlib.AbstractContextManager[Any]], contextlib.AbstractContextManager[None]]
_depth: ContextVar[int] = ContextVar("_depth", default=0)


def times() -> int:
    """Returns how often PyTorch computes what runs now in a step: once, and once more for each checkpoint around it."""
    return 1 + _depth.get()


@contextlib.contextmanager
def counted(model: torch.nn.Module, repeated: set[int]) -> Iterator[None]:
    """Counts the checkpoints that are entered meanwhile, for `times`.

    Args:
        model: whose forward runs.
        repeated: ids of the buffers that are changed as often as PyTorch changes them.

    Raises:
        RequestError: another buffer changes in a checkpoint.
    """

    @contextlib.contextmanager
    def inside(context: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        before = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
        token = _depth.set(_depth.get() + 1)
        try:
            with context:
                yield
        finally:
            _depth.reset(token)
        for name, buffer in model.named_buffers():
            same, version = before.get(name, (None, 0))
            if id(buffer) not in repeated and (buffer is not same or buffer._version != version):
                raise refusal(
                    f"the buffer {name} changes in an activation checkpoint: PyTorch changes it again when it computes "
                    "the checkpoint a second time in the backward, and ONNX Runtime's graph does not. Change it "
                    "outside the checkpoint, or use backend=eager or backend=compile"
                )

    with _run_in(inside):
        yield


@contextlib.contextmanager
def _run_in(inside: _Around) -> Iterator[None]:
    """Runs the first computation of each checkpoint, where it is to be repeated, in a context around its own."""
    original = getattr(checkpoint, _GENERATOR)

    def generator(function: Any, preserve: bool, contexts: Callable[[], Any], *rest: Any, **options: Any) -> Any:
        def wrapped() -> tuple[Any, Any]:
            forward, again = contexts()
            return inside(forward), again

        return original(function, preserve, wrapped, *rest, **options)

    setattr(checkpoint, _GENERATOR, generator)
    try:
        yield
    finally:
        setattr(checkpoint, _GENERATOR, original)


@contextlib.contextmanager
def without_reentrance() -> Iterator[None]:
    """Makes checkpoints that run meanwhile others with the same gradients; contexts may be within each other."""

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
    # A comparison runs in one, and a model that has changed is exported in another one within it.
    before = [vars(kind).get("apply") for kind, _ in replaced]
    for kind, call in replaced:
        kind.apply = call
    try:
        yield
    finally:
        for (kind, _), call_before in zip(replaced, before, strict=True):
            del kind.apply
            if call_before is not None:
                kind.apply = call_before
