"""Nodes of the graph whose result and gradients PyTorch computes.

They serve operators that onnxruntime 1.19.2 lacks or differentiates wrongly. Its ATen node calls any operator that is
registered with torch, on every device. An operator registered here calls a function of PyTorch, and its gradient
repeats that function and differentiates it with autograd, so both are PyTorch's own by construction.

An ATen node passes tensors, integers, booleans and lists of integers. It rounds numbers to fp32, so `exact` passes
them as integers with the same bits.

ONNX Runtime writes output ``i`` of a gradient's node only if input ``i`` needs a gradient, and fails if the operator
returns it nevertheless. So an operator has a variant for each set of inputs that need gradients, which has these inputs
first, and `choose_gradients` selects the variant in the exported graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.graphs.gradients import stops
from ortlaunch.ort.graphs.nodes import ATEN
from ortlaunch.ort.operators import shapes
from ortlaunch.ort.operators.aten_nodes import ATEN_OP, none, step

_LIBRARY = torch.library.Library("ortlaunch", "FRAGMENT")
_NODES: dict[str, TorchNode] = {}


@dataclass(frozen=True)
class TorchNode:
    """An operator that `compute` defines: its arguments are those of `compute`, its dtype that of the first one."""

    name: str
    compute: Callable[..., Tensor]
    arguments: tuple[str, ...]
    """In torch's schema language."""
    differentiable: tuple[int, ...]
    """Indices of the arguments with a gradient."""
    shape: Callable[..., list[Any]]

    def __call__(self, g: Any, *arguments: Any, dims: Sequence[int | None] | None = None) -> Any:
        """Adds the operator to a graph under export.

        Args:
            g: the exporter's graph.
            *arguments: of `compute`; graph values, or integers, booleans, lists of integers and None.
            dims: sizes of the result, None where one varies; by default the result has the first argument's.

        Returns:
            The result in the graph.
        """
        inputs = [_graph_value(g, argument) for argument in arguments]
        result = g.op(ATEN_OP, *inputs, operator_s=f"ortlaunch::{self.name}")
        kind = inputs[0].type()
        result.setType(kind if dims is None else kind.with_sizes(list(dims)))
        return result

    def variants(self) -> Iterator[Variant]:
        """Yields a variant for each set of arguments that need gradients, the empty one included."""
        for count in range(len(self.differentiable) + 1):
            for needed in combinations(self.differentiable, count):
                yield Variant(self, needed)


@dataclass(frozen=True)
class Variant:
    """An operator that has the arguments that need gradients first."""

    node: TorchNode
    needed: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name with domain."""
        return "_".join([f"ortlaunch::{self.node.name}", *map(str, self.needed)])

    @property
    def order(self) -> list[int]:
        """The original index of each argument."""
        return [*self.needed, *(i for i in range(len(self.node.arguments)) if i not in self.needed)]

    def define(self) -> None:
        """Registers the operator and its gradient with torch, and its shape with ORTModule's inference."""
        arguments = ", ".join(self.node.arguments[index] for index in self.order)
        _define(self.name, arguments, 1, self._compute)
        shapes.add(self.name, self._shape)
        if self.needed:
            _define(f"{self.name}_backward", f"Tensor grad, {arguments}", len(self.needed), self._differentiate)

    def _shape(self, *inputs: Any) -> list[list[Any]]:
        arguments = zip(self.node.arguments, self._original(inputs), strict=True)
        # A tensor counts with its shape, and a number or a list of integers with its value.
        known = [shapes.shape_alone(value) if text.startswith("Tensor") else value for text, value in arguments]
        return [self.node.shape(*known)]

    def gradient(self) -> list[Any]:
        """Returns the gradient in ORTModule's terms."""
        inputs = ["GO(0)", *(f"I({index})" for index in range(len(self.node.arguments)))]
        return [step(f"{self.name}_backward", inputs, [f"GI({index})" for index in range(len(self.needed))])]

    def _original(self, arguments: Sequence[Any]) -> list[Any]:
        return [argument for _, argument in sorted(zip(self.order, arguments, strict=True), key=lambda pair: pair[0])]

    def _compute(self, *arguments: Any) -> Tensor:
        return self.node.compute(*self._original(arguments))

    def _differentiate(self, grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        given = arguments[: len(self.needed)]
        # Integers, such as an index that was computed from a weight, have a gradient of zero.
        leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in given]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            result = self._compute(*leaves, *arguments[len(self.needed) :])
            if not (wanted and result.requires_grad):
                return tuple(torch.zeros_like(leaf) for leaf in leaves)
            # onnxruntime gives a number's gradient a dimension, behind a power for one.
            grad = grad.reshape(result.shape)
            found = iter(torch.autograd.grad(result, wanted, grad, allow_unused=True, materialize_grads=True))
        return tuple(next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves)


def torch_node(
    arguments: str, *, differentiable: tuple[int, ...] = (), shape: Callable[..., list[Any]] | None = None
) -> Callable[[Callable[..., Tensor]], TorchNode]:
    """Registers a function of PyTorch as an operator under its own name.

    Args:
        arguments: its arguments in torch's schema language, as ``"Tensor x, int dim"``.
        differentiable: indices of the arguments with a gradient.
        shape: the result's shape, from the shapes of the arguments (of a single number: its value), with None for a
            size that is unknown. By default it is the first argument's shape.
    """

    def register(compute: Callable[..., Tensor]) -> TorchNode:
        node = TorchNode(
            compute.__name__.lstrip("_"),
            compute,
            tuple(arguments.split(", ")),
            differentiable,
            shape or (lambda first, *_: first),
        )
        for variant in node.variants():
            variant.define()
        _NODES[f"ortlaunch::{node.name}"] = node
        return node

    return register


def register_gradients() -> None:
    """Registers the gradients of these nodes with ORTModule; call it before ORTModule's constructor."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    operator, domain = ATEN
    for node in _NODES.values():
        for variant in node.variants():
            if variant.needed:
                CustomGradientRegistry.register(domain, operator, (variant.name, ""), variant.gradient)
            else:
                edges = list(range(len(node.arguments)))
                CustomGradientRegistry.register_custom_stop_gradient_edges(edges, domain, operator, variant.name, "")


def choose_gradients(graph: Any, wanted: set[str]) -> dict[str, list[int]]:
    """Replaces each of these nodes by its variant for the inputs that need gradients, in place.

    Args:
        graph: an exported ``onnx.GraphProto``.
        wanted: names of its inputs whose gradients are wanted.

    Returns:
        Which inputs of a node are wanted and have no gradient there, by the node's first output.
    """
    needing = set(wanted)
    without: dict[str, list[int]] = {}
    for node in graph.node:
        operator = next((x for x in node.attribute if x.name == "operator"), None)
        known = _NODES.get(operator.s.decode()) if operator is not None else None
        if known is not None and operator is not None:
            needed = tuple(i for i in known.differentiable if i < len(node.input) and node.input[i] in needing)
            variant = Variant(known, needed)
            operator.s = variant.name.encode()
            inputs = [*node.input, *[""] * (len(known.arguments) - len(node.input))]
            node.input[:] = [inputs[index] for index in variant.order]
            without[node.output[0]] = [i for i in range(len(needed), len(inputs)) if node.input[i] in wanted]
            passes = bool(needed)
        else:
            passes = bool(needing.intersection(node.input)) and not stops(node)
        if passes:
            # The others are indices, masks and statistics.
            needing.update(node.output[:1] if node.op_type in ("ATen", "TopK") else node.output)
    return without


def exact(values: Sequence[float] | None) -> list[int] | None:
    """Returns fp64 numbers as integers of the same bits, which an ATen node passes without rounding."""
    return None if values is None else torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()


def numbers(values: Sequence[int] | None) -> list[float] | None:
    """Returns the numbers that `exact` wrote."""
    return None if values is None else torch.tensor(values, dtype=torch.int64).view(torch.float64).tolist()


def _define(name: str, arguments: str, results: int, compute: Callable[..., Any]) -> None:
    name = name.removeprefix("ortlaunch::")
    kind = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    _LIBRARY.define(f"{name}({arguments}) -> {kind}")
    _LIBRARY.impl(name, partial(_apart, compute), "CompositeExplicitAutograd")


def _apart(compute: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in the dtypes of its arguments; its results get memory that the graph may overwrite."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    used = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    with torch.autocast(tensors[0].device.type, enabled=False):
        results = compute(*arguments)
    own = []
    for result in [results] if isinstance(results, Tensor) else results:
        if result._is_zerotensor():
            # The gradient of `sgn`, for one: zeros without memory.
            own.append(result.clone())
            continue
        address = result.untyped_storage().data_ptr()
        own.append(result.clone() if address in used else result)
        used.add(address)
    return own[0] if len(own) == 1 else tuple(own)


def _graph_value(g: Any, argument: Any) -> Any:
    if argument is None:
        return none(g)
    if isinstance(argument, torch._C.Value):
        return argument
    # An empty list would be one of fp32 numbers.
    kind = torch.int64 if isinstance(argument, list) else None
    return g.op("Constant", value_t=torch.tensor(argument, dtype=kind))
