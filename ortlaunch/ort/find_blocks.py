"""Finds the repeated blocks of a model, which ZeRO 3 gathers, ONNX Runtime runs and ZeRO 3 frees one by one."""

from __future__ import annotations

from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.models.blocks import Blocks, repeated_blocks


def find_blocks(model: nn.Module, wanted: str | None) -> Blocks:
    """Returns the blocks to run on ONNX Runtime; no block contains another.

    Args:
        model: the plain model.
        wanted: as for `repeated_blocks`.

    Raises:
        RequestError: there are no blocks, or one contains a module that would silently give wrong results.
    """
    blocks = repeated_blocks(model, wanted, "backend.blocks")
    if not blocks:
        raise RequestError(
            f"backend=ort with trainer.zero_stage=3 runs a model block by block, and {type(model).__name__} has no "
            "repeated blocks: name what to take for blocks (backend.blocks=<class name or glob of module paths>), or "
            "use trainer.zero_stage=2, or backend=eager"
        )
    for path, block in blocks.items():
        for module in block.modules():
            _refuse(path, module)
    return blocks


def _refuse(path: str, module: nn.Module) -> None:
    if getattr(module, "gradient_checkpointing", False) is True:
        raise RequestError(
            f"the block {path} recomputes its activations itself (gradient checkpointing), which gives wrong gradients "
            "with backend=ort and trainer.zero_stage=3: switch it off in the model, backend.zero3=recompute already "
            "does it"
        )
