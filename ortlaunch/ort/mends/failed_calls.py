"""Lets a trace go on after a call of torch that failed, and whose error the model has caught.

torch's tracer stops in the middle of the call: the rest of the forward would not be traced, and the call's unfinished
operator would end the process with SIGSEGV.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class TracesOn(TorchFunctionMode):
    """Takes the operator of a failed call out of the trace, and continues it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = torch._C._get_tracing_state()
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            if state is not None and torch._C._get_tracing_state() is None:
                last = _last(state.graph())
                if last is not None and last.kind().startswith("aten::") and last.outputsSize() == 0:
                    last.destroy()
                torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
            raise


def _last(block: Any) -> Any | None:
    """Returns the last node of a graph; a module that is being traced is a block in it."""
    node = next(iter(reversed(list(block.nodes()))), None)
    inside = [] if node is None else list(node.blocks())
    return _last(inside[-1]) if inside else node
