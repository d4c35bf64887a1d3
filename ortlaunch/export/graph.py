"""Reads, changes and writes ONNX graphs: names, versions, and the outputs that gradients need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from ortlaunch.base.errors import RequestError
from ortlaunch.ort.graphs import corrections, normalization

IR_VERSION = 10
"""The newest version that ONNX Runtime 1.19.2 reads; the installed onnx may write newer ones."""

_STANDARD = ("", "ai.onnx")
_FOR_TRAINING = (*_STANDARD, "com.microsoft")
"""Operator domains that every training build of ONNX Runtime has."""
_GRADIENT_OUTPUTS = {"LayerNormalization": 3, "SoftmaxCrossEntropyLoss": 2, "Dropout": 2}
"""Number of outputs of operators whose optional outputs are read by ONNX Runtime's gradients."""

Array = NDArray[np.generic]


def load(path: Path) -> ModelProto:
    """Reads a file with all of its weights."""
    return onnx.load(str(path))


def save(model: ModelProto, path: Path) -> None:
    """Writes a graph in versions that ONNX Runtime 1.19.2 reads, and checks the file.

    Args:
        model: the graph.
        path: the file to write; external weights must already be in the same folder.
    """
    save_unchecked(model, path)
    # The checker gets the path, because a graph with all weights may exceed the size limit of a protobuf message.
    onnx.checker.check_model(str(path), full_check=True)


def save_unchecked(model: ModelProto, path: Path) -> None:
    """Writes a graph without onnx.checker, which does not know ONNX Runtime's own operators.

    The versions are those that ONNX Runtime 1.19.2 reads.
    """
    model.ir_version = min(model.ir_version, IR_VERSION)
    onnx.save(model, str(path))


def opset(model: ModelProto) -> int:
    """Returns the version of the standard ONNX operators."""
    return next(int(one.version) for one in model.opset_import if one.domain in _STANDARD)


def correct(model: ModelProto) -> None:
    """Changes in place what ONNX Runtime 1.19.2 computes wrongly or refuses, though it is right in ONNX.

    Convolutions with implicit padding have a wrong gradient there and no dilation, and some chains of operators are
    taken for a normalization.
    """
    corrections.pad_explicitly(model.graph)
    normalization.avoid_fusion(model)


def initializers(model: ModelProto) -> dict[str, TensorProto]:
    """Returns weights and constants by name."""
    return {tensor.name: tensor for tensor in model.graph.initializer}


def value(tensor: TensorProto) -> Array:
    """Returns the values of an initializer."""
    return numpy_helper.to_array(tensor)


def constant(number: float, name: str, dtype: str = "float32") -> TensorProto:
    """Makes an initializer from a number."""
    return numpy_helper.from_array(np.array(number, dtype), name)


def set_values(model: ModelProto, values: dict[str, Array]) -> None:
    """Replaces the values of initializers, in place."""
    for tensor in model.graph.initializer:
        if tensor.name in values:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            array = np.ascontiguousarray(values[tensor.name].astype(dtype, copy=False))
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def rename(model: ModelProto, names: dict[str, str]) -> None:
    """Renames initializers and the inputs that read them, in place; of equal new names the first is kept."""
    kept: dict[str, TensorProto] = {}
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
        kept.setdefault(tensor.name, TensorProto.FromString(tensor.SerializeToString()))
    if names:
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept.values())
    for node in nodes(model):
        for position, name in enumerate(node.input):
            node.input[position] = names.get(name, name)


def nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Returns all nodes, including those inside branches and loops."""
    return _nodes(model.graph.node)


def _nodes(found: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in found:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g.node)


def attribute(node: NodeProto, name: str, default: float) -> float:
    """Returns a numeric attribute of a node, or the default."""
    for one in node.attribute:
        if one.name == name:
            return one.i if one.type == onnx.AttributeProto.INT else one.f
    return default


def complete_for_gradient(model: ModelProto) -> None:
    """Adds the optional outputs that ONNX Runtime's gradients read, in place; no other output changes."""
    for node in nodes(model):
        for position in range(len(node.output), _GRADIENT_OUTPUTS.get(node.op_type, 0)):
            node.output.append(f"{node.output[0]}.{position}")


def without_dropout(model: ModelProto) -> ModelProto:
    """Returns a copy in which every Dropout has rate 0; everything else is unchanged."""
    copied = ModelProto()
    copied.CopyFrom(model)
    name = "ortlaunch.no_dropout"
    found = [node for node in nodes(copied) if node.op_type in ("Dropout", "DropoutGrad", "BitmaskDropout")]
    for node in found:
        # DropoutGrad reads the gradient and the mask before the rate.
        position = 2 if node.op_type == "DropoutGrad" else 1
        if len(node.input) > position:
            node.input[position] = name
    if found:
        copied.graph.initializer.append(constant(0.0, name))
    return copied


def with_statistics(model: ModelProto) -> ModelProto:
    """Returns a copy in which the running statistics that BatchNorms compute are also outputs.

    If no node reads them, ONNX Runtime 1.19.2 overwrites the running statistics in place. It also stores small equal
    constants once: in a new BatchNorm of up to 8 channels the weight shares memory with the variance and the bias with
    the mean, so the outputs are wrong from the first run on.
    """
    copied = ModelProto()
    copied.CopyFrom(model)
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            copied.graph.output.extend(
                onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, ["channels"]) for name in node.output[1:]
            )
    return copied


def active_dropout(model: ModelProto) -> list[float]:
    """Returns the rates of the Dropout nodes that are in train mode."""
    known = {tensor.name: value(tensor) for tensor in model.graph.initializer if tensor.dims in ([], [1])}
    for node in nodes(model):
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            known[node.output[0]] = value(node.attribute[0].t)
    rates = []
    for node in nodes(model):
        if node.op_type == "Dropout" and len(node.input) > 2 and bool(np.all(known.get(node.input[2], True))):
            rates.append(float(np.max(known.get(node.input[1], np.float32(0.5)))))
    return [rate for rate in rates if rate > 0]


def check_operators(model: ModelProto, *, for_training: bool, what: str) -> None:
    """Refuses operators that a plain runtime does not have.

    Raises:
        RequestError: such operators are in the graph; the message names them.
    """
    allowed = _FOR_TRAINING if for_training else _STANDARD
    foreign = {f"{node.domain}::{node.op_type}" for node in nodes(model) if node.domain not in allowed}
    if foreign:
        raise RequestError(
            f"{what} would need operators that a plain ONNX Runtime does not have: {', '.join(sorted(foreign))}"
        )
