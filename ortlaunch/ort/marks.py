"""Finds the operator of a training graph that ends the process, as a defect of native code does without a word.

ONNX Runtime's release has no log of the nodes that it computes. So the graph that it would compute, all fusions
included, is read back, and before each node comes one that notes it in a file. Each of these depends on what the node
before has returned, so that the nodes are computed in the order of the notes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ortlaunch.base.private_folder import PrivateFolder
from ortlaunch.ort.failed_node import described, stacks_of
from ortlaunch.ort.kernels.aten_nodes import ATEN

MARK = "ortlaunch::mark"
_LIBRARY = torch.library.Library("ortlaunch", "FRAGMENT")

_lines: list[bytes] = []
_write: Callable[[bytes], None] | None = None


@contextlib.contextmanager
def noted(write: Callable[[bytes], None]) -> Iterator[None]:
    """Notes each node of the training graphs that are made and run in this block, before it is computed.

    Args:
        write: takes a line of JSON with the keys `operator`, `module`, `location` and `statement`.
    """
    global _write
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    original = TrainingManager._create_execution_agent

    def create(manager: Any) -> None:
        _create_marked(manager, original)

    TrainingManager._create_execution_agent, _write = create, write
    try:
        yield
    finally:
        TrainingManager._create_execution_agent, _write = original, None


def _create_marked(manager: Any, create: Callable[[Any], None]) -> None:
    """Opens the session twice: to get its final graph, and with that graph and the marks."""
    import onnx
    import onnxruntime

    configured = manager._get_session_config
    with PrivateFolder("marks") as folder:
        path = folder / "final.onnx"

        def saving() -> Any:
            options, *rest = configured()
            options.optimized_model_filepath = str(path)
            return options, *rest

        def as_it_is() -> Any:
            options, *rest = configured()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            return options, *rest

        try:
            manager._get_session_config = saving
            create(manager)
            model = onnx.load(str(path))
            _mark(model.graph, stacks_of(manager))
            manager._onnx_models.optimized_model = model
            manager._get_session_config = as_it_is
            create(manager)
        finally:
            del manager._get_session_config


def _mark(graph: Any, stacks: dict[str, str]) -> None:
    """Puts a mark before each node of a graph that takes a tensor, in place.

    Args:
        graph: an ``onnx.GraphProto`` whose nodes are in an order in which they can be computed.
        stacks: by the name of a node, the stack from which it was exported.
    """
    from onnx import helper

    known = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    weights = {weight.name: weight for weight in graph.initializer}
    nodes, token = [], ""
    for node in graph.node:
        place = next((at for at, name in enumerate(node.input) if name in known), None)
        if place is not None:
            number = len(_lines)
            _lines.append(json.dumps(described(node, stacks, weights)).encode())
            index = helper.make_tensor(f"ortlaunch_mark_{number}", 7, [], [number])
            graph.initializer.append(index)
            source, marked = node.input[place], f"ortlaunch_marked_{number}"
            inputs = [source, token or source, index.name]
            operator, domain = ATEN
            nodes.append(helper.make_node(operator, inputs, [marked], domain=domain, operator=MARK, name=marked))
            copy = graph.value_info.add()
            copy.CopyFrom(known[source])
            copy.name = marked
            node.input[place] = marked
        nodes.append(node)
        token = next((name for name in node.output if name in known), token)
    del graph.node[:]
    graph.node.extend(nodes)


def _note(x: Tensor, token: Tensor, index: int) -> Tensor:
    if _write is not None:
        _write(_lines[index])
    # The graph may overwrite it.
    return x.clone()


_LIBRARY.define("mark(Tensor x, Tensor token, int index) -> Tensor")
_LIBRARY.impl("mark", _note, "CompositeExplicitAutograd")
