"""Makes functions of torch that refuse to be traced, or cannot be, work while ORTModule traces a model.

- ``torch.func.functional_call`` refuses, although a trace follows the tensors that it puts in the place of parameters.
- ``torch.nn.utils.parametrize.cached`` refuses, although what it keeps is traced like everything else.
- ``torch.cond`` compiles its branches, which fails in a trace. A graph computes both and chooses.
- ``max_unpool2d`` checks sizes, and takes no tensors for the results.
- ``torch.set_grad_enabled`` takes no comparison of sizes, which is a tensor in a trace.
- ``torch.func.grad``, ``vjp`` and ``jvp`` differentiate in forward, which a graph cannot: they are refused by name.
- ``torch.autocast`` to fewer bits on the CPU, where ONNX Runtime lacks operators for them, is refused with its line.
- The fused operators of transformer layers in eval mode without gradients cannot be exported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial, partialmethod
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import graph
from torch.backends import mha
from torch.nn.utils import parametrize, stateless
from torch.utils import _pytree as pytree

from ortlaunch.ort.refusal import refusal
from ortlaunch.ort.source import asking_place, location, statement_at
from ortlaunch.ort.tracing.gradients import refuse_gradients


class Except:
    """An object of which some members are others."""

    def __init__(self, original: Any, **members: Any) -> None:
        self._original = original
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Replaces them until its end."""
    asks_the_compiler = Except(torch, jit=Except(torch.jit, is_tracing=lambda: False))
    asks_the_tracer = Except(torch, _C=Except(torch._C, _get_tracing_state=lambda: None))
    others: list[tuple[Any, str, Any]] = [
        (stateless, "torch", asks_the_compiler),
        (parametrize, "torch", asks_the_tracer),
        (torch, "cond", _chosen),
        (torch.set_grad_enabled, "__init__", partialmethod(_switched, torch.set_grad_enabled.__init__)),
        (torch, "_check_with", partial(_checked, torch._check_with)),
        (torch.autocast, "__enter__", partialmethod(_entered, torch.autocast.__enter__)),
        # What the functions that differentiate call first.
        (graph, "disable_saved_tensors_hooks", refuse_gradients),
        (eager_transforms, "jvp_increment_nesting", refuse_gradients),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in others]
    for owner, name, other in others:
        setattr(owner, name, other)
    enabled = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(enabled)
        for owner, name, original in originals:
            setattr(owner, name, original)


def _switched(self: Any, original: Callable[..., None], mode: Any) -> None:
    """Switches gradients by the truth of a comparison, which is a tensor in a trace."""
    original(self, bool(mode))


def _entered(self: Any, original: Callable[..., Any]) -> Any:
    """Enters autocast, or refuses it."""
    if self.device == "cpu" and self._enabled and self.fast_dtype is not torch.float32:
        place = asking_place()
        raise refusal(
            f"`{statement_at(*place)}` at {location(place)} computes in {str(self.fast_dtype).removeprefix('torch.')}, "
            "for which ONNX Runtime lacks operators on the CPU: use backend=eager or backend=compile"
        )
    return original(self)


def _checked(original: Callable[..., None], error: type[Exception], cond: Any, message: Any) -> None:
    """Checks a condition on sizes, which are tensors in a trace."""
    original(error, bool(cond) if isinstance(cond, torch.Tensor) else cond, message)


def _chosen(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    """Computes what ``torch.cond`` returns from the results of both branches."""
    if not isinstance(pred, torch.Tensor):
        return (true_fn if pred else false_fn)(*operands)
    return pytree.tree_map(
        lambda one, other: torch.where(pred, one, other) if isinstance(one, torch.Tensor) else one,
        true_fn(*operands),
        false_fn(*operands),
    )
