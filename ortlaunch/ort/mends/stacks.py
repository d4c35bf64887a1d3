"""ONNX symbolics for ``hstack`` and ``vstack`` through which gradients pass.

The exporter joins the tensors by operators of ONNX's sequences, for which onnxruntime 1.19.2 has no gradient.
"""

from __future__ import annotations

from typing import Any


def _hstack(g: Any, tensors: Any) -> Any:
    """Exports ``torch.hstack``: vectors are joined end to end, other tensors along the second dimension."""
    return _joined(g, tensors, least_rank=1, axis_of=lambda rank: 0 if rank == 1 else 1)


def _vstack(g: Any, tensors: Any) -> Any:
    """Exports ``torch.vstack``: vectors are rows, other tensors are joined along the first dimension."""
    return _joined(g, tensors, least_rank=2, axis_of=lambda _rank: 0)


def _joined(g: Any, tensors: Any, *, least_rank: int, axis_of: Any) -> Any:
    from torch.onnx import errors, symbolic_helper

    parts = symbolic_helper._unpack_list(tensors)
    ranks = [symbolic_helper._get_tensor_rank(part) for part in parts]
    if any(rank is None for rank in ranks):
        raise errors.SymbolicValueError(
            "a stack of tensors of an unknown number of dimensions is not exported", tensors
        )
    joined = []
    for part, rank in zip(parts, ranks, strict=True):
        # Missing dimensions come first.
        missing = max(0, least_rank - rank)
        joined.append(symbolic_helper._unsqueeze_helper(g, part, list(range(missing))) if missing else part)
    return g.op("Concat", *joined, axis_i=axis_of(max(least_rank, max(ranks))))


SYMBOLICS = {"aten::hstack": _hstack, "aten::vstack": _vstack}
