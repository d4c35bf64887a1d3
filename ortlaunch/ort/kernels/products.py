"""Recognizes products that end a chain of operators for which there is one kernel: RMSNorm and SwiGLU.

transformers writes both out: ``weight * (x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))`` and ``silu(gate) * up``.
As nodes of their own these are ten passes over the activations in the forward and more in the backward.
"""

from __future__ import annotations

from typing import Any

from ortlaunch.ort.operators import broadcasting, exporter, table, torch_calls
from ortlaunch.ort.operators.aten_nodes import ATEN_OP, constant
from ortlaunch.ort.operators.attention import known_size
from ortlaunch.ort.operators.traced import attribute, input_of_call, inputs_of, is_same, number, without_casts

RMS_NORM = "ortlaunch::rms_norm"
SIGMOID = "ortlaunch::sigmoid"
SILU = "ortlaunch::silu"
SILU_PRODUCT = "ortlaunch::silu_product"
_DTYPES = ("Float", "Double")


def mul(g: Any, one: Any, other: Any) -> Any:
    """Exports a product, as one node of ours where it ends such a chain."""
    for first, second in ((one, other), (other, one)):
        found = _rms_norm(g, first, second) or _silu_product(g, first, second)
        if found is not None:
            return found
    if table.has_small_integers(one, other):
        return torch_calls.exported(g, one, other)
    # The kernels broadcast by themselves.
    return exporter.symbolic("aten::mul")(g, *broadcasting.whole(g, one, other))


def rms_norm(g: Any, weight: Any, x: Any, epsilon: float) -> Any | None:
    """Exports the normalization of the last dimension as one node of ours; None if the kernel does not support it.

    The node computes the gradients of weight and values alike, so both must be needed.
    """
    kind = x.type().scalarType()
    if kind not in _DTYPES or weight.type().scalarType() != kind or not (x.requires_grad() and weight.requires_grad()):
        return None
    size = known_size(weight, 0) if weight.type().dim() == 1 else None
    if size is None or not x.type().dim() or known_size(x, -1) != size:
        return None
    output, _ = g.op(ATEN_OP, weight, x, constant(g, epsilon), operator_s=RMS_NORM, outputs=2)
    output.setType(x.type())
    return output


def _rms_norm(g: Any, weight: Any, normalized: Any) -> Any | None:
    """Exports ``weight * normalized`` if that is x over the root of its mean square."""
    factors = inputs_of(normalized, "onnx::Mul")
    for x, root in (factors, factors[::-1]) if factors else ():
        epsilon = _epsilon(x, root)
        if epsilon is not None:
            return rms_norm(g, weight, without_casts(x), epsilon)
    return None


def _epsilon(x: Any, root: Any) -> float | None:
    """Returns the epsilon if `root` is ``rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)``, else None."""
    quotient = inputs_of(root, "onnx::Div")
    below = inputs_of(quotient[1], "onnx::Sqrt") if quotient and number(quotient[0]) == 1.0 else None
    summands = inputs_of(below[0], "onnx::Add") if below else None
    for mean, epsilon in (summands, summands[::-1]) if summands else ():
        if number(epsilon) is not None and _is_mean_square(mean, x):
            return number(epsilon)
    return None


def _is_mean_square(mean: Any, x: Any) -> bool:
    inputs = inputs_of(mean, "onnx::ReduceMean")
    if not inputs or not attribute(without_casts(mean).node(), "keepdims"):
        return False
    rank = x.type().dim()
    axes = [axis % rank for axis in attribute(without_casts(mean).node(), "axes")] if rank else []
    power = inputs_of(inputs[0], "onnx::Pow")
    is_square = power is not None and is_same(power[0], x) and number(power[1]) == 2.0
    return axes == [(rank or 0) - 1] and is_square


def _silu_product(g: Any, silu: Any, x: Any) -> Any | None:
    """Exports ``silu * x`` if the first is a SiLU, or the product of a value and its sigmoid."""
    gate = _gate(silu)
    if gate is None or not _are_alike(gate, x):
        return None
    output = g.op(ATEN_OP, gate, x, operator_s=SILU_PRODUCT)
    # Sizes are known only when the graph runs; the kernel broadcasts where they differ.
    output.setType(gate.type().with_sizes([None] * (gate.type().dim() - 1) + [known_size(gate, -1)]))
    return output


def _gate(silu: Any) -> Any | None:
    """Returns the value of which this is the SiLU; None if it is none."""
    gate = input_of_call(silu, SILU)
    factors = inputs_of(silu, "onnx::Mul")
    for value, share in (factors, factors[::-1]) if factors else ():
        inside = input_of_call(share, SIGMOID)
        if inside is not None and is_same(inside, value):
            gate = value
    return None if gate is None else without_casts(gate)


def _are_alike(gate: Any, x: Any) -> bool:
    """Whether both have one dtype, number of dimensions and last size, and need a gradient."""
    kinds = {value.type().scalarType() for value in (gate, x)}
    ranks = {value.type().dim() for value in (gate, x)}
    if len(kinds) > 1 or not kinds <= set(_DTYPES) or len(ranks) > 1 or not ranks.pop():
        return False
    size = known_size(gate, -1)
    return size is not None and size == known_size(x, -1) and gate.requires_grad() and x.requires_grad()
