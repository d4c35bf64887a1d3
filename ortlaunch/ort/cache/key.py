"""Describes everything that an export depends on, so that two exports with the same description give the same graph.

ORTModule's own cache (``ORTMODULE_CACHE_DIR``) identifies a model by its printed form, which shows neither its code nor
its inputs nor its mode. Here all of these count: the code of every class in the tree and of everything imported that is
not an installed package, the values that this code reads (`reachable_code`), the attributes of every module, parameters
and buffers by shape and dtype, those that are not saved by their values, the inputs by shape, the versions, and the
exporter's settings. If anything cannot be described, the export is not cached.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.ort.cache import torch_state
from ortlaunch.ort.cache.outline import REGISTRY
from ortlaunch.ort.cache.values import Describe, tensor_facts
from ortlaunch.ort.mends.buffers import moved_constants

# These belong to a module's own bookkeeping. Their content is described separately, or does not reach the graph.
_NOT_ATTRIBUTES = {"_parameters", "_buffers", "_modules"}
_NOT_ATTRIBUTES |= {f"_{kind}_hooks" for kind in ("backward", "backward_pre", "state_dict", "state_dict_pre")}
_NOT_ATTRIBUTES |= {"_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}


@dataclass(frozen=True)
class ModelFacts:
    """The description of a model."""

    facts: dict[str, Any]
    codes: frozenset[types.CodeType]
    """All of the user's code that the facts cover."""


def model_facts(model: torch.nn.Module) -> dict[str, Any]:
    """Describes a module tree: code, attributes, parameters and buffers, without the tensors' values.

    Raises:
        NotCacheableError: a module has an attribute that cannot be described, or code without a file.
    """
    return describe_model(model).facts


def describe_model(model: torch.nn.Module, *, is_exported: bool = False, must_be_complete: bool = True) -> ModelFacts:
    """Describes a module tree, and says which code the description covers.

    Args:
        model: the module tree.
        is_exported: whether it was exported since the first description.
        must_be_complete: whether a value without a complete description is refused. Else its type stands for it.

    Raises:
        NotCacheableError: as for `model_facts`.
    """
    describe = Describe(model, is_exported=is_exported, must_be_complete=must_be_complete)
    modules = {name: _module(describe, module) for name, module in model.named_modules(remove_duplicate=False)}
    names: dict[int, str] = {}
    tensors = {}
    constants = _constants(model)
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            # Tied weights are a single input of the graph.
            tensors[name] = [*tensor_facts(tensor), names.setdefault(id(tensor), name)]
            if name in constants:
                tensors[name].append(describe.tensor_values(f"model.{name}", tensor))
            describe.reached.add_tensor(f"model.{name}", tensor)
    reached, of_packages = describe.reached.facts()
    facts = {
        "modules": modules,
        # Code may go through modules and parameters in their order.
        "order": [list(modules), list(tensors)],
        "tensors": tensors,
        "hooks of all modules": describe.value("a hook of all modules", _global_hooks()),
        "replaced in torch": [describe.value(where, value) for where, value in torch_state.replaced().items()],
        "reached": reached,
    }
    # Files stay the same while a process runs, and what a package keeps for itself, such as a cache, is no state of
    # the model: only the key of an export needs them.
    if must_be_complete:
        facts |= {"values in packages": of_packages, "code": describe.code_digests()}
        facts["packages"] = describe.package_versions()
    return ModelFacts(facts, frozenset(describe.reached.codes))


def changed(before: Any, after: Any) -> bool:
    """Whether two descriptions differ in more than new entries of packages and values that were None.

    transformers' classifiers set such a value at the first forward: the kind of loss in their configuration. Packages
    such as einops remember in a dictionary what they have found.
    """
    if before == after or before == ["NoneType", "None"]:
        return False
    if isinstance(before, list) and isinstance(after, list) and before[:1] == after[:1] == [REGISTRY]:
        return any(changed(value, after[1].get(key)) for key, value in before[1].items())
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return any(changed(value, after[key]) for key, value in before.items())
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return any(changed(*pair) for pair in zip(before, after, strict=True))
    return True


def input_facts(info: Any) -> dict[str, Any]:
    """Describes the inputs that ORTModule has parsed (its ``ModelInfoForExport``), by shape and not by value."""
    describe = Describe(None)
    return {
        "mode": str(info.export_mode),
        "names": info.onnx_graph_input_names,
        "shapes": info.onnx_graph_input_shapes,
        "require_grad": info.onnx_graph_input_names_require_grad,
        "args": describe.value("args", list(info.onnx_graph_input_arg_schema)),
        "kwargs": describe.value("kwargs", dict(info.onnx_graph_input_kwarg_schema)),
        "extra": describe.value("extra", dict(info.export_extra_kwargs or {})),
    }


def _module(describe: Describe, module: torch.nn.Module) -> list[Any]:
    attributes = {key: value for key, value in vars(module).items() if key not in _NOT_ATTRIBUTES}
    for key, value in attributes.items():
        if key.startswith("_forward") and key.endswith("hooks"):
            # The keys of this dictionary number all hooks of the process; other dictionaries refer to them.
            flags = [sorted(vars(module).get(f"{key}_{flag}", ())) for flag in ("with_kwargs", "always_called")]
            attributes[key] = [(hook, *(number in known for known in flags)) for number, hook in value.items()]
        elif key.startswith("_forward") and "hooks" in key:
            attributes[key] = None
    where = describe.names[id(module)] or "model"
    return [
        describe.class_(type(module), is_made=False),
        {key: describe.value(f"{where}.{key}", value) for key, value in attributes.items()},
    ]


def _constants(model: torch.nn.Module) -> set[str]:
    """Returns the tensors whose values a graph keeps: those that are not saved, unless a graph has moved them."""
    # torch's exporter takes for inputs what `state_dict` writes, whatever a model's own leaves out of its result.
    saved: dict[str, Any] = {}
    model.state_dict(destination=saved, prefix="", keep_vars=True)
    kinds = (model.named_parameters, model.named_buffers)
    names = {name for kind in kinds for name, _ in kind(remove_duplicate=False)}
    return names.difference(saved, moved_constants(model))


def _global_hooks() -> list[Any]:
    """Returns hooks that torch calls at the forward of every module."""
    hooks = torch.nn.modules.module
    found: list[Any] = []
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        flags = getattr(hooks, f"{name}_with_kwargs", {})
        found += [(name, hook, number in flags) for number, hook in getattr(hooks, name).items()]
    return found
