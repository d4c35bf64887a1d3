"""Weights in a file beside a graph: one protobuf message, which a graph is, holds 2 GB at most.

The graph in memory is then without them: whatever changes or copies it moves kilobytes, and it is run by its path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from ortlaunch.export import graph
from ortlaunch.ort.runtime import Graph

EXTERNAL_BYTES = 1_000_000_000
"""Weights of this size and more in all lie in a file of their own."""
SUFFIX = ".data"

_SMALLEST = 1024
"""Bytes; what is smaller stays in the graph: shapes and rates, which are read when it is changed."""
_ALIGNED = 4096
"""Where a tensor may begin, so that runtimes can map it into memory."""
_TRIAL = "trial.onnx"


def take(path: Path, *, external: bool) -> ModelProto:
    """Reads a graph that torch has written, and takes away all files of its folder.

    Args:
        path: of the graph, in a folder of its own; of a large one torch leaves each weight in a file beside it.
        external: whether the weights come to lie beside the graph whatever their size.

    Returns:
        The graph: whole, or without its weights, which are in ``path.data`` then.
    """
    model = onnx.load(str(path), load_external_data=False)
    path.unlink()
    folder = path.parent
    for node in graph.nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _fill(attribute.t, folder)
    if external or _size(model) >= EXTERNAL_BYTES:
        kept = folder / f"{path.name}{SUFFIX}"
        with kept.open("xb") as data:
            for tensor in model.graph.initializer:
                _move(tensor, folder, data)
        # A message keeps the memory of what is taken out of it.
        model = ModelProto.FromString(model.SerializeToString())
    else:
        kept = None
        for tensor in model.graph.initializer:
            _fill(tensor, folder)
    for file in folder.iterdir():
        if file != kept:
            file.unlink()
    return model


def lower_version(path: Path) -> None:
    """Writes a file again in versions that ONNX Runtime 1.19.2 reads; weights beside it stay where they are."""
    graph.save_unchecked(onnx.load(str(path), load_external_data=False), path)


def any_in(model: ModelProto) -> bool:
    """Whether weights of the graph lie beside it."""
    return any(uses_external_data(tensor) for tensor in model.graph.initializer)


def runnable(model: ModelProto, folder: Path | None, values: Mapping[str, graph.Array] | None = None) -> Graph:
    """A graph ready to run.

    Args:
        model: the graph; `values` of initializers that it has itself are put into it, in place.
        folder: where the weights lie that it has not itself.
        values: of initializers, to run it with instead of its own.
    """
    beside = {tensor.name for tensor in model.graph.initializer if uses_external_data(tensor)}
    values = values or {}
    graph.set_values(model, {name: value for name, value in values.items() if name not in beside})
    if folder is None or not beside:
        return Graph(model.SerializeToString())
    path = folder / _TRIAL
    try:
        graph.save_unchecked(model, path)
        # ONNX Runtime has dropped what nothing reads, and would not know it.
        read = {name for node in graph.nodes(model) for name in node.input}
        return Graph(path, weights={name: value for name, value in values.items() if name in beside & read})
    finally:
        path.unlink(missing_ok=True)


def value(tensor: TensorProto, folder: Path | None) -> graph.Array:
    """The values of an initializer, read only, from the graph or from the file beside it in `folder`."""
    if not uses_external_data(tensor):
        return numpy_helper.to_array(tensor)
    assert folder is not None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return np.memmap(
        folder / entries["location"],
        dtype=helper.tensor_dtype_to_np_dtype(tensor.data_type),
        mode="r",
        offset=int(entries["offset"]),
        shape=tuple(tensor.dims),
    )


def _size(model: ModelProto) -> int:
    return sum(_bytes(tensor) for tensor in model.graph.initializer)


def _bytes(tensor: TensorProto) -> int:
    return math.prod(tensor.dims) * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _fill(tensor: TensorProto, folder: Path) -> None:
    """Reads what torch has left in a file into the tensor."""
    if uses_external_data(tensor):
        load_external_data_for_tensor(tensor, str(folder))
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def _move(tensor: TensorProto, folder: Path, data: BinaryIO) -> None:
    """Moves a tensor's values to the end of a file; small ones into the tensor."""
    if _bytes(tensor) < _SMALLEST:
        _fill(tensor, folder)
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if entries:
        source = folder / entries["location"]
        content = source.read_bytes()[int(entries.get("offset", 0)) :][: _bytes(tensor)]
    else:
        content = numpy_helper.to_array(tensor).tobytes()
    data.write(b"\0" * (-data.tell() % _ALIGNED))
    offset = data.tell()
    data.write(content)
    moved = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    moved.data_location = TensorProto.EXTERNAL
    for key, entry in (("location", Path(data.name).name), ("offset", offset), ("length", len(content))):
        moved.external_data.add(key=key, value=str(entry))
    tensor.CopyFrom(moved)
