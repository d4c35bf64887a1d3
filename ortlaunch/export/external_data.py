"""Stores the weights of a graph as ONNX external data, in a file next to the graph.

A graph is one protobuf message, and a message holds at most 2 GB. With external data the graph in memory has no
weights: changing or copying it costs kilobytes, and ONNX Runtime opens it by its path.
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
"""Bytes. Weights of this total size and more are written to a file of their own."""
SUFFIX = ".data"

_SMALLEST = 1024
"""Bytes. Smaller tensors stay in the graph: shapes and rates, which are read when the graph is changed."""
_ALIGNED = 4096
"""Alignment of a tensor in the file, in bytes, so that runtimes can map it into memory."""
_TRIAL = "trial.onnx"


def read_exported(path: Path, *, external: bool) -> ModelProto:
    """Reads a graph that torch has written, and deletes all files in its folder.

    Args:
        path: the graph, alone in its folder; torch writes each weight of a large graph to a file next to it.
        external: whether to store the weights as external data whatever their size.

    Returns:
        The graph. It is complete, or its weights are in ``path.data``.
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
        # A protobuf message keeps the memory of what was removed from it, so a new message is made.
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
    """Writes a file again in versions that ONNX Runtime 1.19.2 reads; external weights are not touched."""
    graph.save_unchecked(onnx.load(str(path), load_external_data=False), path)


def used_by(model: ModelProto) -> bool:
    """Whether the graph has weights in external data."""
    return any(uses_external_data(tensor) for tensor in model.graph.initializer)


def runnable(model: ModelProto, folder: Path | None, values: Mapping[str, graph.Array] | None = None) -> Graph:
    """Returns a graph that is ready to run.

    Args:
        model: the graph; `values` of initializers that are inside it replace their values in place.
        folder: the folder of the external data, if any.
        values: values of initializers to run the graph with instead of its own.
    """
    beside = {tensor.name for tensor in model.graph.initializer if uses_external_data(tensor)}
    values = values or {}
    graph.set_values(model, {name: value for name, value in values.items() if name not in beside})
    if folder is None or not beside:
        return Graph(model.SerializeToString())
    path = folder / _TRIAL
    try:
        graph.save_unchecked(model, path)
        # ONNX Runtime drops weights that no node reads, and would reject their names.
        read = {name for node in graph.nodes(model) for name in node.input}
        return Graph(path, weights={name: value for name, value in values.items() if name in beside & read})
    finally:
        path.unlink(missing_ok=True)


def value(tensor: TensorProto, folder: Path | None) -> graph.Array:
    """Returns the values of an initializer, read-only, from the graph or from the external data in `folder`."""
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
    """Loads the values that torch wrote to a file into the tensor."""
    if uses_external_data(tensor):
        load_external_data_for_tensor(tensor, str(folder))
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def _move(tensor: TensorProto, folder: Path, data: BinaryIO) -> None:
    """Appends a tensor's values to the file of external data; small tensors stay in the graph."""
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
