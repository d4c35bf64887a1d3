"""What FSDP2 of torch 2.6 lacks on the CPU; newer versions of torch have it.

Without it, the first forward ends in ``'Stream' object has no attribute 'record_event'``, and the backward of a block
whose parameters were freed after its forward in "one of the variables needed for gradient computation has been modified
by an inplace operation".
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch


def complete() -> None:
    """Adds what is missing in this process. Does nothing where nothing is missing, and when it is called again."""
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    group: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    kept: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter
    for name in ("record_event", "wait_event"):
        # Work on the CPU is complete when its call returns. torch 2.13 has the same empty methods.
        setattr(torch.cpu.Stream, name, _nothing)
    gather = group.foreach_all_gather_copy_out

    def gather_again(result: Any, parameters: list[Any], *rest: Any) -> None:
        # The backward gathers the same numbers into the same memory, which autograd must not take for a change. Newer
        # versions of torch do the same.
        with contextlib.ExitStack() as versions:
            for parameter in parameters:
                for output in parameter.all_gather_outputs:
                    if not output.is_inference():  # Such a tensor has no version.
                        versions.enter_context(kept(output))
            gather(result, parameters, *rest)

    group.foreach_all_gather_copy_out = gather_again


def _nothing(*_: Any) -> None:
    """Does nothing."""
