"""Lets the nodes of ONNX Runtime's graph call our operators directly.

ORTModule's executor finds an operator of torch by two texts that it makes at each call, and calls it through torch's
dispatcher. For small tensors this takes longer than the operator. Ours (``native/executor.cpp``) calls our operators
itself, and passes all others on to ORTModule's.
"""

from __future__ import annotations

from types import ModuleType


def install(kernels: ModuleType) -> None:
    """Makes ONNX Runtime call our executor for all ATen nodes of this process; repeated calls change nothing.

    Args:
        kernels: the module that `ortlaunch.ort.extension.load_kernels` returned.
    """
    from onnxruntime.capi import _pybind_state
    from onnxruntime.training.ortmodule.torch_cpp_extensions import aten_op_executor
    from onnxruntime.training.ortmodule.torch_cpp_extensions.cpu.aten_op_executor import (
        load_aten_op_executor_cpp_extension,
    )

    # ORTModule's constructor does this once in a process, and would replace ours.
    load_aten_op_executor_cpp_extension()
    address = kernels.execute_with(aten_op_executor.execute_aten_operator_address())
    _pybind_state.register_aten_op_executor(str(aten_op_executor.is_tensor_argument_address()), str(address))
