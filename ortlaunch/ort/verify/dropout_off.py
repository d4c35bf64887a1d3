"""Lets an ORTModule run its training graph, forward and backward, with dropout off.

Dropout's rates are constants of the graph. So a copy of the graph, gradients included, gets rates of zero and a session
of its own. The graph is neither exported nor differentiated a second time.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from ortlaunch.ort import session
from ortlaunch.ort.graphs.nodes import nodes_of, operator_of
from ortlaunch.ort.kernels import symbolics as kernels
from ortlaunch.ort.module import randomness

_OFF, _EXACTLY_OFF = "ortlaunch_no_rate", "ortlaunch_exactly_no_rate"
_RATES = {
    "Dropout": 1,
    "BitmaskDropout": 1,
    "BiasDropout": 3,
    "BitmaskBiasDropout": 3,
    "BiasSoftmaxDropout": 2,
    "DropoutGrad": 2,
    "BitmaskDropoutGrad": 2,
    "SoftmaxDropoutGrad": 3,
}
"""onnxruntime's operators with dropout, and the index of the input with the rate."""


@contextlib.contextmanager
def dropout_off(wrapped: torch.nn.Module) -> Iterator[None]:
    """Switches dropout off in an ORTModule's training forward and backward.

    Args:
        wrapped: an ORTModule after its first training forward.
    """
    manager = session.training_manager(wrapped)
    assert manager is not None
    graphs, agent = manager._onnx_models, manager._execution_agent
    original = graphs.optimized_model
    without = copy.deepcopy(original)
    if not _switch_off(without.graph):
        yield
        return
    try:
        graphs.optimized_model = without
        with _small_session(manager):
            manager._create_execution_agent()
        # A seed for dropout would be drawn in vain, and shift the numbers that the model itself draws.
        manager._execution_agent._ortlaunch_draws = randomness.draws(without.graph, with_dropout=False)
        yield
    finally:
        graphs.optimized_model, manager._execution_agent = original, agent


@contextlib.contextmanager
def _small_session(manager: Any) -> Iterator[None]:
    """Gives a session no arena, which would hold a second peak of the activations beside that of the run's own."""
    configured = manager._get_session_config

    def small() -> Any:
        options, providers, provider_options = configured()
        options.enable_cpu_mem_arena = False
        # Otherwise the run's own file of backend.debug.save_onnx would be overwritten.
        options.optimized_model_filepath = ""
        return options, providers, provider_options

    manager._get_session_config = small
    try:
        yield
    finally:
        del manager._get_session_config


def _switch_off(graph: Any) -> bool:
    """Sets all rates to zero; returns whether there were any."""
    from onnx import TensorProto, helper

    from ortlaunch.ort.operators import noise

    ours = kernels.rate_inputs()
    found = False
    for node in nodes_of(graph):
        index = _RATES.get(node.op_type, ours.get(operator_of(node)))
        if index is not None:
            node.input.extend([""] * (index + 1 - len(node.input)))
            node.input[index] = _OFF
            found = True
        elif operator_of(node) in noise.WITH_RATE:
            node.input[1] = _EXACTLY_OFF
            found = True
    if found:
        graph.initializer.append(helper.make_tensor(_EXACTLY_OFF, TensorProto.INT64, [1], noise.NO_RATE))
        graph.initializer.append(helper.make_tensor(_OFF, TensorProto.FLOAT, [], [0.0]))
    return found
