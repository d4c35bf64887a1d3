"""Keeps the backward of custom ``autograd.Function`` classes, or refuses those that ORTModule would train wrongly.

ORTModule's own support for them needs an extension that newer torch versions cannot link. There the exporter writes the
operators of a Function's forward into the graph, and ONNX Runtime differentiates those. A backward of its own, as in a
straight-through estimator or a gradient reversal, would be lost silently. So every Function that the model calls is
tested before the export. If its backward and the derivative of its forward's operators give the same gradients, these
operators are exported. Otherwise the graph calls the Function (`function_calls`), or the model is refused by its name.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

from ortlaunch.ort import compat
from ortlaunch.ort.mends import function_calls
from ortlaunch.ort.refusal import refusal

DETACH = (Tensor.detach, torch.detach)
_TOLERANCE = 1e-3
_FACTORS = (1.0, -1.0, 0.1, 10.0, 100.0)
"""Factors of the inputs in the test; a clamp with its own backward, for example, differs only where it clamps."""
_KNOWN_RIGHT = ("torch.utils.checkpoint.CheckpointFunction", "torch.distributions.dirichlet._Dirichlet")
"""Functions that need no test. One recomputes its forward and differentiates it, and a test would add to the gradients
of the parameters; the other one is a single operator, whose export has its gradient.
"""
_ORTMODULES_OWN = "onnxruntime.training.ortmodule."
"""Package of Functions that ORTModule exports itself. Those of ``onnxruntime.training.utils`` are a user's choice."""

_RECORDING = "onnxruntime.training.utils.hooks."
"""Package of Functions that record every activation, which a graph would not do."""

_running: list[type[Function]] = []
"""Functions whose forward is running inside `watched`."""
_called: set[type[Function]] = set()
"""Functions that the trace takes for operators of their own."""
_passing: dict[type[Function], bool] = {}
"""Whether gradients pass `detach` in the forwards of the Functions that were tested."""


def are_called() -> bool:
    """Whether the last export has operators that this process has made of Functions."""
    return bool(_called)


def is_running() -> bool:
    """Whether a Function's forward is running; gradients are off in it although the Function is differentiated."""
    return bool(_running)


def passes_detach() -> bool:
    """Whether `detach` in the forward that is running stops no gradient, because the Function's backward gives one."""
    return bool(_running) and _passing.get(_running[-1], False)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raises at the call of a Function whose backward would be lost, with its name and the line of the call."""
    refuses = not compat.supports_custom_autograd()
    _passing.clear()
    _called.clear()
    with contextlib.ExitStack() as stack:
        for cls in set(_subclasses(Function)):
            # The forward is replaced and not `apply`, which models may bind to another name: `reverse = Reverse.apply`.
            stack.enter_context(_replaced_forward(cls, _watching(cls, cls.forward, refuses)))
        stack.enter_context(_scripts_inlined())
        yield


@contextlib.contextmanager
def _scripts_inlined() -> Iterator[None]:
    """Exports a ``torch.jit.script`` function that a Function's forward calls, as in Megatron's fused GELU.

    torch's exporter replaces such calls by their operators before it takes up the forwards of Functions.
    """
    original = torch._C._jit_pass_onnx_autograd_function_process

    def process(graph: torch._C.Graph) -> None:
        original(graph)
        torch._C._jit_pass_inline(graph)

    torch._C._jit_pass_onnx_autograd_function_process = process
    try:
        yield
    finally:
        torch._C._jit_pass_onnx_autograd_function_process = original


def _watching(cls: type[Function], forward: Callable[..., Any], refuses: bool) -> Callable[..., Any]:
    name = f"{cls.__module__}.{cls.__qualname__}"
    is_trusted = not refuses or name in _KNOWN_RIGHT or name.startswith(_ORTMODULES_OWN)

    @functools.wraps(forward)
    def watching(*args: Any, **kwargs: Any) -> Any:
        # A subclass may call the forward of its base class.
        if _running:
            return forward(*args, **kwargs)
        _running.append(cls)
        try:
            inputs = args[1:] if _takes_context(cls) else args
            if torch._C._get_tracing_state():
                called = function_calls.traced(cls, inputs) if cls in _called else forward(*args, **kwargs)
                return _in_order(called, inputs) if refuses else called
            if not is_trusted and cls not in _called:
                _require_agreement(cls, forward, inputs, name)
            return forward(*args, **kwargs)
        finally:
            _running.pop()

    return watching


def _in_order(results: Any, inputs: tuple[Any, ...]) -> Any:
    """Traces the results of a Function in their order; the exporter takes them in the order in which they were made."""
    if not isinstance(results, tuple):
        return results
    return tuple(
        one.view_as(one) if isinstance(one, Tensor) and not any(one is given for given in inputs) else one
        for one in results
    )


class _BackwardError(Exception):
    """A Function's backward fails when it gets a gradient for each of its outputs."""


def _require_agreement(cls: type[Function], forward: Callable[..., Any], inputs: tuple[Any, ...], name: str) -> None:
    try:
        if not _agrees(cls, forward, inputs):
            reason = function_calls.why_not(cls, inputs)
            if reason is not None:
                raise refusal(_message(name, f"is not the derivative of its forward's operators, and which {reason}"))
            _called.add(cls)
    except _BackwardError as failed:
        error = failed.__cause__
        told = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        why = f"fails when each of its outputs has a gradient ({told}), so nothing shows that it is the derivative of"
        raise refusal(_message(name, f"{why} its forward's operators")) from error


def _message(name: str, why: str) -> str:
    return (
        f"the model calls the autograd.Function {name} ({caller()}), whose backward {why}. On this torch ONNX Runtime "
        "would take the derivative of the forward's operators instead and train wrongly in silence: use backend=eager "
        "or compile, or torch 2.6, where ORTModule runs such Functions, or write it with operators and detach(), a "
        "straight-through estimator as x + (f(x) - x).detach()"
    )


def _agrees(cls: type[Function], forward: Callable[..., Any], inputs: tuple[Any, ...]) -> bool:
    """Whether the backward and the derivative of the forward's operators agree, at several sizes of inputs.

    In a forward gradients are off, so that `detach` means nothing; its derivative may be nothing or the identity.
    """
    needed = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
    if not any(needed) or _are_detached(inputs):
        return True
    variants = (False,) if cls.__module__.startswith(_RECORDING) else (False, True)
    # All calls are traced alike.
    for passes in (_passing[cls],) if cls in _passing else variants:
        if _agrees_if(passes, cls, forward, inputs, needed):
            _passing[cls] = passes
            return True
    return False


def _are_detached(inputs: tuple[Any, ...]) -> bool:
    """Whether the model has switched gradients off, so that what is computed from inputs needs none."""
    with torch.enable_grad():
        return not any(x.clone().requires_grad for x in inputs if isinstance(x, Tensor) and x.requires_grad)


def _agrees_if(
    passes: bool, cls: type[Function], forward: Callable[..., Any], inputs: tuple[Any, ...], needed: list[bool]
) -> bool:
    def through_operators(*args: Any) -> Any:
        context = (_Context(args),) if _takes_context(cls) else ()
        with _DifferentiatesAll(passes):
            return forward(*context, *args)

    tried = 0
    # The saved tensors are needed here, whatever hooks are set outside.
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself), torch.enable_grad():
        for factor in _FACTORS:
            try:
                expected = _gradients(cls.apply, inputs, needed, factor)
            except (_BackwardError, RuntimeError, ValueError, IndexError, AssertionError):
                # A Function need not accept every number, but must accept the model's own.
                if factor == 1.0:
                    raise
                continue
            try:
                actual = _gradients(through_operators, inputs, needed, factor)
            except (_BackwardError, RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
                return False
            tried += 1
            if not all(_close(a, b) for a, b in zip(expected, actual, strict=True)):
                return False
    return tried > 0


def _gradients(call: Callable[..., Any], inputs: tuple[Any, ...], needed: list[bool], factor: float) -> list[Tensor]:
    leaves = [
        (x.detach() * factor if x.is_floating_point() else x.detach()).clone() if isinstance(x, Tensor) else x
        for x in inputs
    ]
    wanted = [x.requires_grad_() for x, is_needed in zip(leaves, needed, strict=True) if is_needed]
    # Every call draws the same random numbers and leaves the model's generator unchanged.
    device = wanted[0].device
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else [], device_type=device.type):
        # Non-leaf tensors are passed, because a Function may change its inputs in place.
        outputs = call(*[x.clone() if isinstance(x, Tensor) else x for x in leaves])
    outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(x, Tensor)]
    pairs = [(x, function_calls.direction(x)) for x in outputs if x.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in wanted]
    try:
        gradients = torch.autograd.grad(
            [x for x, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True, materialize_grads=True
        )
    except Exception as error:
        raise _BackwardError from error
    return list(gradients)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _close(expected: Tensor, actual: Tensor) -> bool:
    # An infinity or NaN in both means that this size was not a fair test.
    fair = torch.isfinite(expected) | torch.isfinite(actual)
    expected, actual = expected[fair], actual[fair]
    if expected.numel() == 0:
        return True
    return bool((expected - actual).abs().max() <= _TOLERANCE * expected.abs().max().clamp(min=1e-30))


class _DifferentiatesAll(TorchFunctionMode):
    """Differentiates every operator even if gradients are switched off, as a graph has no such switch."""

    def __init__(self, passes_detach: bool) -> None:
        super().__init__()
        self._passes_detach = passes_detach

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._passes_detach and func in DETACH:
            return args[0]
        with torch.enable_grad():
            return func(*args, **(kwargs or {}))


class _Context:
    """Collects what a forward stores for its backward."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in inputs)

    def _take(self, *_values: Any) -> None:
        """Ignores the values."""

    save_for_backward = save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = _take


def _takes_context(cls: type[Function]) -> bool:
    return cls.setup_context is Function.setup_context


def caller() -> str:
    """Returns ``file:line`` of the model's call."""
    frames = traceback.extract_stack()
    ours = {Path(torch.__file__).parent, Path(__file__).parents[1]}
    for frame in reversed(frames):
        if not any(folder in Path(frame.filename).parents for folder in ours):
            return f"{frame.filename}:{frame.lineno}"
    return "?"


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for heir in cls.__subclasses__():
        yield heir
        yield from _subclasses(heir)


@contextlib.contextmanager
def _replaced_forward(cls: type[Function], forward: Callable[..., Any]) -> Iterator[None]:
    own = cls.__dict__.get("forward")
    cls.forward = staticmethod(forward)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if own is None:
            del cls.forward
        else:
            cls.forward = own  # type: ignore[method-assign]
