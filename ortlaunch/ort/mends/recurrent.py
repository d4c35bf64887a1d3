"""LSTM, GRU and RNN layers; PyTorch computes them and their gradients.

onnxruntime 1.19.2 trains LSTM and GRU in one direction only and RNN not at all. Its gates are sigmoids with an error of
6e-8 at any size, so a closed gate lets a large state or input through. It takes up to six times as long as PyTorch.
torch's exporter takes neither dropout between layers nor projections.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ortlaunch.ort.mends import noise
from ortlaunch.ort.mends.torch_nodes import torch_node
from ortlaunch.ort.mends.values import sizes

_OPSET = 17
_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _shape(x: list[Any], _h0: Any, _c0: Any, _weights: Any, kind: int, width: int, _biases: Any) -> list[Any]:
    return [x[0] + int(kind == 0), x[1], width]


@torch_node(
    "Tensor x, Tensor h0, Tensor? c0, Tensor weights, int kind, int width, bool has_biases",
    differentiable=(0, 1, 2, 3),
    shape=_shape,
)
def _recurrent(
    x: Tensor, h0: Tensor, c0: Tensor | None, weights: Tensor, kind: int, width: int, has_biases: bool
) -> Tensor:
    """Computes one layer in all directions.

    Args:
        x: [T, B, I].
        h0: [directions, B, H], or [directions, B, P] of an LSTM with projections.
        c0: [directions, B, H] of an LSTM.
        weights: all weights of the layer, flat, in torch's order.
        kind: index in `_KINDS`.
        width: directions * H.
        has_biases: whether there are biases among the weights.

    Returns:
        The outputs [T, B, directions * H]. An LSTM's are padded from P to H, and its last row is the final cell state.
    """
    name = _KINDS[kind]
    directions, batch, out = h0.shape
    hidden = width // directions
    layer = _layer(x, h0, weights, kind, width, has_biases)
    rest = (layer, has_biases, 1, 0.0, True, directions == 2, False)
    if c0 is None:
        result: Tensor = getattr(torch._VF, name)(x, h0, *rest)[0]  # type: ignore[attr-defined]
        return result
    output, _, cells = torch._VF.lstm(x, (h0, c0), *rest)  # type: ignore[attr-defined]
    output = functional.pad(output.unflatten(2, (directions, out)), (0, hidden - out)).flatten(2)
    return torch.cat([output, cells.transpose(0, 1).reshape(1, batch, width)])


def _shape_of_packed(
    _x: Any, _sizes: Any, h0: list[Any], c0: Any, _weights: Any, _kind: int, _width: int, _biases: Any, which: int
) -> list[Any]:
    return ([None, h0[0] * h0[2]], h0, c0)[which]


@torch_node(
    "Tensor x, Tensor batch_sizes, Tensor h0, Tensor? c0, Tensor weights, int kind, int width, bool has_biases, "
    "int which",
    differentiable=(0, 2, 3, 4),
    shape=_shape_of_packed,
)
def _packed(
    x: Tensor,
    batch_sizes: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Tensor,
    kind: int,
    width: int,
    has_biases: bool,
    which: int,
) -> Tensor:
    """Computes one layer over a packed sequence; the arguments are those of `_recurrent`.

    Returns:
        The outputs [N, directions * H or P] (`which` is 0), the final hidden state (1) or cell state (2). Each
        of these that the model uses is a call of its own.
    """
    compute = getattr(torch._VF, _KINDS[kind])  # type: ignore[attr-defined]
    rest = (_layer(x, h0, weights, kind, width, has_biases), has_biases, 1, 0.0, True, h0.shape[0] == 2)
    result: Tensor = compute(x, batch_sizes.cpu(), h0 if c0 is None else (h0, c0), *rest)[which]
    return result


def _layer(x: Tensor, h0: Tensor, weights: Tensor, kind: int, width: int, has_biases: bool) -> list[Tensor]:
    """Returns the weights of one layer in their shapes."""
    directions, _, out = h0.shape
    hidden = width // directions
    gates = _GATES[_KINDS[kind]] * hidden
    shapes = [(gates, x.shape[-1]), (gates, out)] + [(gates,)] * (2 * has_biases) + [(out, hidden)] * (out != hidden)
    parts = weights.split([torch.Size(shape).numel() for shape in shapes] * directions)
    return [part.reshape(shape) for part, shape in zip(parts, shapes * directions, strict=True)]


def register() -> None:
    """Registers the symbolics; call it after the constructor of an ORTModule, which registers its own."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    for kind in _KINDS:
        register_custom_op_symbolic(f"aten::{kind}", partial(_symbolic, kind), _OPSET)


def _symbolic(kind: str, g: Any, *args: Any) -> Any:
    from torch.onnx import symbolic_helper

    if symbolic_helper._is_tensor_list(args[3]):
        x, batch_sizes, states, weights, has_biases, layers, rate, *flags = args
    else:
        x, states, weights, has_biases, layers, rate, *flags = args
        batch_sizes = None
    states = symbolic_helper._unpack_list(states) if kind == "lstm" else [states]
    weights = symbolic_helper._unpack_list(weights)
    has_biases, train, bidirectional, *batch_first = (
        bool(symbolic_helper._get_const(value, "b", "flag")) for value in (has_biases, *flags)
    )
    layers = symbolic_helper._get_const(layers, "i", "num_layers")
    share = symbolic_helper._get_const(rate, "f", "dropout") if train else 0.0
    directions = 2 if bidirectional else 1
    return _layers(g, kind, x, batch_sizes, states, weights, has_biases, layers, share, directions, any(batch_first))


def _layers(
    g: Any,
    kind: str,
    x: Any,
    batch_sizes: Any | None,
    states: list[Any],
    weights: list[Any],
    has_biases: bool,
    layers: int,
    rate: float,
    directions: int,
    batch_first: bool,
) -> Any:
    """Adds a node for each layer, with dropout between them; returns the output and the final states.

    A packed sequence is [N, I] with the batch sizes.
    """
    from torch.onnx import errors

    x = g.op("Transpose", x, perm_i=[1, 0, 2]) if batch_first else x
    time, batch = sizes(x)[:2]
    rows, out = sizes(weights[1])
    if rows is None or out is None:
        raise errors.SymbolicValueError("the sizes of the layer's weights are unknown", x)
    hidden = rows // _GATES[kind]
    finals: list[list[Any]] = [[] for _ in states]
    per_layer = len(weights) // layers
    for number in range(layers):
        if number and rate:
            x = noise.dropout(g, x, rate)
        mine = weights[number * per_layer : (number + 1) * per_layer]
        flat = [g.op("Reshape", weight, g.op("Constant", value_t=torch.tensor([-1]))) for weight in mine]
        first = [_slice(g, state, 0, number * directions, (number + 1) * directions) for state in states]
        width = hidden * directions
        cells = first[1] if kind == "lstm" else None
        rest = (first[0], cells, g.op("Concat", *flat, axis_i=0), _KINDS.index(kind), width, has_biases)
        if batch_sizes is None:
            dims = [None if time is None else time + (kind == "lstm"), batch, width]
            x, last = _separated(g, _recurrent(g, x, *rest, dims=dims), kind, directions, out, hidden)
        else:
            shapes = [[None, directions * out], *map(sizes, first)]
            x, *last = [_packed(g, x, batch_sizes, *rest, which, dims=dims) for which, dims in enumerate(shapes)]
        for states_of_kind, state in zip(finals, last, strict=True):
            states_of_kind.append(state)
    x = g.op("Transpose", x, perm_i=[1, 0, 2]) if batch_first else x
    return x, *(g.op("Concat", *states_of_kind, axis_i=0) for states_of_kind in finals)


def _separated(g: Any, result: Any, kind: str, directions: int, out: int, hidden: int) -> tuple[Any, list[Any]]:
    """Returns the output of one layer and its final states, each [directions, B, size]."""
    output = _slice(g, result, 0, 0, -1) if kind == "lstm" else result
    halves = [_slice(g, output, 2, i * hidden, i * hidden + out) for i in range(directions)]
    if directions == 1 and out == hidden:
        halves = [output]
    elif out != hidden:
        output = g.op("Concat", *halves, axis_i=2)
    # The second direction ends at the beginning.
    ends = [_slice(g, halves[0], 0, -1, 2**63 - 1), *(_slice(g, half, 0, 0, 1) for half in halves[1:])]
    states = [g.op("Concat", *ends, axis_i=0)]
    if kind == "lstm":
        cells = _slice(g, result, 0, -1, 2**63 - 1)
        parts = [_slice(g, cells, 2, i * hidden, (i + 1) * hidden) for i in range(directions)]
        states.append(g.op("Concat", *parts, axis_i=0))
    return output, states


def _slice(g: Any, value: Any, axis: int, start: int, end: int) -> Any:
    from torch.onnx import symbolic_helper

    return symbolic_helper._slice_helper(g, value, axes=[axis], starts=[start], ends=[end])
