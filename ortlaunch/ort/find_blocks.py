"""Finds the repeated blocks of a model, which ZeRO 3 gathers, ONNX Runtime runs and ZeRO 3 frees one by one."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase

from torch import nn

from ortlaunch.base.errors import RequestError

Blocks = dict[str, nn.Module]
"""Blocks by their path in the model, in the order of the model's modules."""


def find_blocks(model: nn.Module, wanted: str | None) -> Blocks:
    """Returns the blocks to run on ONNX Runtime; no block contains another.

    Args:
        model: the plain model.
        wanted: class name, or glob of module paths whose ``*`` does not match a dot. None selects the classes that
            transformers calls indivisible (``_no_split_modules``) and that occur several times, or else the longest
            ``nn.ModuleList`` of modules of one class.

    Raises:
        RequestError: there are no blocks, or one contains a module that would silently give wrong results.
    """
    blocks = _outermost(_chosen(model, wanted) if wanted is not None else _found(model))
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
    if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
        raise RequestError(
            f"the block {path} holds a {type(module).__name__}, whose running statistics ONNX Runtime leaves as the "
            "first batch made them: use backend=eager, or a normalization without running statistics"
        )


def _chosen(model: nn.Module, wanted: str) -> Blocks:
    modules = {path: module for path, module in model.named_modules() if path}
    blocks = {path: module for path, module in modules.items() if type(module).__name__ == wanted}
    blocks = blocks or {path: module for path, module in modules.items() if _path_matches(path, wanted)}
    if any(_has_parameters(block) for block in blocks.values()):
        return {path: block for path, block in blocks.items() if _has_parameters(block)}
    what = "matches no module with parameters" if not blocks else "matches only modules without parameters"
    repeated = Counter(type(module).__name__ for module in modules.values() if _has_parameters(module))
    classes = ", ".join(name for name, count in repeated.items() if count > 1) or "none"
    raise RequestError(
        f"backend.blocks={wanted}: {what} of {type(model).__name__}. It takes a class name or a glob of module paths "
        f"such as 'model.layers.*'; classes that repeat: {classes}"
    )


def _found(model: nn.Module) -> Blocks:
    blocks = _indivisible(model) or _longest_list(model)
    if not blocks:
        raise RequestError(
            f"backend=ort with trainer.zero_stage=3 runs a model block by block, and {type(model).__name__} has no "
            "repeated blocks: name what to take for blocks (backend.blocks=<class name or glob of module paths>), or "
            "use trainer.zero_stage=2, or backend=eager"
        )
    return blocks


def _indivisible(model: nn.Module) -> Blocks:
    """Returns modules of the classes that transformers does not split over devices, if a class occurs several times."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    blocks = {path: module for path, module in model.named_modules() if type(module).__name__ in names}
    count = Counter(type(block).__name__ for block in blocks.values())
    return {path: block for path, block in blocks.items() if count[type(block).__name__] > 1}


def _longest_list(model: nn.Module) -> Blocks:
    longest: Blocks = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len({type(child) for child in module}) != 1:
            continue
        if len(module) > max(1, len(longest)) and all(_has_parameters(child) for child in module):
            longest = {f"{path}.{name}".lstrip("."): child for name, child in module.named_children()}
    return longest


def _outermost(blocks: Blocks) -> Blocks:
    inside = {id(inner) for block in blocks.values() for inner in block.modules() if inner is not block}
    return {path: block for path, block in blocks.items() if id(block) not in inside}


def _path_matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
