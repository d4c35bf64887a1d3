"""Memory that an operation holds on the CPU while it runs, beside its arguments and its results.

The rules were found by measuring single operations on torch 2.13 (oneDNN's convolutions, gloo's exchanges). Most
operations hold nothing.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_LSTM_KEPT = 0.35
"""Share of the workspace of oneDNN's LSTM that its forward writes; the backward writes the rest."""


def of_kernel(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes that the kernel itself holds, in the thread that calls it.

    Args:
        func: the operation, after it has run.
        args: its arguments.
        out: its results.
    """
    name = func.overloadpacket.__name__
    if name == "convolution":
        return _convolution(args[0], args[1], out, beside=_size(out) + _size(args[1]))
    if name == "convolution_backward":
        gradient, image, weight = args[:3]
        return _convolution(image, weight, gradient, beside=max(_size(image) + _size(gradient), _size(weight)))
    if name == "mkldnn_rnn_layer_backward":
        # The weights in another order, their gradients in such an order, and the rest of the workspace.
        return int((1 - _LSTM_KEPT) * _lstm(args[0], int(args[15]))) + 2 * _size(args[1:3])
    if name == "_reduce_scatter_base_" or (func.namespace == "c10d" and name == "reduce_scatter_tensor_coalesced_"):
        return _size(args[1])  # gloo reduces a copy of the whole.
    if name == "reduce_scatter_tensor":
        return _size(args[0])
    return 0


def completed(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """The results of an operation, with those that torch leaves empty on tensors without content.

    The workspace of oneDNN's LSTM holds gates and states of all steps for the backward, and is many times its output.
    """
    if func.overloadpacket.__name__ != "mkldnn_rnn_layer" or not args[-1] or out[3].numel() > 0:
        return out
    return *out[:3], out[3].new_empty(int(_LSTM_KEPT * _lstm(args[0], int(args[10]))))


def _lstm(sequence: torch.Tensor, hidden: int) -> int:
    """Bytes of the workspace of oneDNN's LSTM: within 10 % of what it asks for in fp32, and what it writes in bf16."""
    steps, batch, width = sequence.shape
    numbers = steps * 2 * 4 * hidden + (steps + 1) * (6 * max(width, hidden) + hidden)
    return int(batch * numbers * sequence.element_size())


def of_exchange(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes that an exchange between workers holds, in a thread of gloo's: what is gathered, once more."""
    if func.namespace == "c10d" and func.overloadpacket.__name__ in (
        *("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "allgather_coalesced_", "gather_"),
    ):
        return _size(args[0])
    if func.namespace == "_c10d_functional" and func.overloadpacket.__name__.startswith("all_gather_into_tensor"):
        return _size(out)
    return 0


def _convolution(image: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, *, beside: int) -> int:
    """Bytes of a convolution's workspace.

    Args:
        image: its input.
        weight: its weight.
        result: its output, or the output's gradient.
        beside: what oneDNN holds: arguments and results in an order of its own.
    """
    if image.dtype in (torch.bfloat16, torch.float16) and not has_low_precision(image.dtype):
        # Without such instructions torch multiplies by a matrix with a column for each place of the kernel.
        places = math.prod(weight.shape[2:])
        columns = image.shape[0] * image.shape[1] * places * math.prod(result.shape[2:])
        return columns * image.element_size() if places > 1 else 0
    return beside


@cache
def has_low_precision(dtype: torch.dtype) -> bool:
    """Whether oneDNN has convolutions of bf16 or fp16 on this machine."""
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    known = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return known is not None and bool(known())


def _size(tree: Any) -> int:
    return sum(one.nbytes for one in tree_leaves(tree) if isinstance(one, torch.Tensor))
