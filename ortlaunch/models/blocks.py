"""Finds the repeated blocks of a model, which are sharded, gathered and executed one by one."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase

from torch import nn

from ortlaunch.base.errors import RequestError

Blocks = dict[str, nn.Module]
"""Blocks by their module path, in the order of the model's modules."""


def repeated_blocks(model: nn.Module, wanted: str | None, key: str) -> Blocks:
    """The repeated blocks of a model; empty if there are none. No block contains another.

    Args:
        model: the plain model.
        wanted: a class name, or a glob of module paths whose ``*`` does not match a dot. None finds the blocks: the
            modules of classes that transformers calls indivisible (``_no_split_modules``) and that occur more than
            once. If there are none, it takes the longest ``nn.ModuleList`` of modules of one class.
        key: the configuration key of `wanted`, for messages.

    Raises:
        RequestError: `wanted` matches no module with parameters.
    """
    return _outermost(
        _chosen(model, wanted, key) if wanted is not None else _indivisible(model) or _longest_list(model)
    )


def _chosen(model: nn.Module, wanted: str, key: str) -> Blocks:
    modules = {path: module for path, module in model.named_modules() if path}
    blocks = {path: module for path, module in modules.items() if type(module).__name__ == wanted}
    blocks = blocks or {path: module for path, module in modules.items() if _path_matches(path, wanted)}
    if any(_has_parameters(block) for block in blocks.values()):
        return {path: block for path, block in blocks.items() if _has_parameters(block)}
    what = "matches no module with parameters" if not blocks else "matches only modules without parameters"
    repeated = Counter(type(module).__name__ for module in modules.values() if _has_parameters(module))
    classes = ", ".join(name for name, count in repeated.items() if count > 1) or "none"
    raise RequestError(
        f"{key}={wanted}: {what} of {type(model).__name__}. It takes a class name or a glob of module paths "
        f"such as 'model.layers.*'; classes that repeat: {classes}"
    )


def _indivisible(model: nn.Module) -> Blocks:
    """The modules of the classes that transformers does not split over devices and that occur more than once."""
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
