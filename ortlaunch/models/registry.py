"""The models by name: built in, registered by a decorator, announced as entry points, or named by a target.

This module and the list of names import neither torch nor transformers nor a user's model code.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import NamedModules, announced, in_working_folder
from ortlaunch.base.nearest import nearest
from ortlaunch.base.targets import (
    check_arguments,
    check_form,
    check_module,
    check_target,
    digest,
    load_module,
    load_target,
)
from ortlaunch.config.schema import ModelConfig

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from torch import nn

Inputs = Literal["tokens", "images", "any"]
"""The kind of data that a model takes."""

ENTRY_POINTS = "ortlaunch.models"
"""The entry-point group in which installed packages announce models."""

FACTORY = "factory"
CLASSES = "num_classes"
"""The argument that says how many classes a model tells apart."""
_OF_DATA = ("timm", "torchvision")
"""Models whose number of classes comes from the data, unless it is given."""
_Builder = TypeVar("_Builder", bound=Callable[..., Any])
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelEntry:
    """A model that a configuration can choose by name."""

    name: str
    target: str
    """`package.module:callable` of the builder; empty for the factory, whose builder the user names."""
    inputs: Inputs
    summary: str
    """A description of one line."""
    static_graph: bool = False
    """Whether the model uses the same parameters in the same way at every step."""


_FACTORY_ENTRY = ModelEntry(FACTORY, "", "any", "a class or function of your own, by model.target")
_BUILT_IN = NamedModules[tuple[ModelEntry, Callable[..., Any]]]("ortlaunch.models.built_in")
_REGISTERED: dict[str, tuple[ModelEntry, Callable[..., Any]]] = {}


def register_model(name: str, inputs: Inputs = "any", *, static_graph: bool = False) -> Callable[[_Builder], _Builder]:
    """Registers a model class, or a function that returns a model, under a name for `model.name`.

    List its module in `model.imports`, so that workers import it before they look up the name. `ortlaunch models` shows
    the first line of the docstring.

    Args:
        name: the name.
        inputs: the data that the model takes.
        static_graph: the model uses the same parameters in the same way at every step, so that DDP need not search for
            unused ones. If this is wrong, DDP fails or computes wrong gradients.

    Raises:
        RequestError: the name belongs to another model, or `inputs` is unknown.
    """
    if inputs not in get_args(Inputs):
        known = ", ".join(get_args(Inputs))
        raise RequestError(f"register_model('{name}', inputs='{inputs}'): inputs is one of {known}")

    def register(builder: _Builder) -> _Builder:
        target = f"{builder.__module__}:{builder.__qualname__}"
        owner = _owner_of(name, target, builder)
        if owner is not None:
            raise RequestError(f"register_model('{name}') on {target}: the name belongs to {owner}, choose another")
        summary = (builder.__doc__ or target).strip().splitlines()[0]
        model = (ModelEntry(name, target, inputs, summary, static_graph), builder)
        if _is_built_in(name, builder):
            _BUILT_IN.register(name, model)
        else:
            _REGISTERED[name] = model
        return builder

    return register


def _is_built_in(name: str, builder: Callable[..., Any]) -> bool:
    return builder.__module__ == f"{_BUILT_IN.package}.{name}"


def _owner_of(name: str, target: str, builder: Callable[..., Any]) -> str | None:
    """The present owner of a name; None if the name is free or belongs to this builder."""
    if _is_built_in(name, builder):
        return None
    if name in _BUILT_IN or name == FACTORY:
        return "ortlaunch itself"
    if name not in _REGISTERED:
        return None
    entry, known = _REGISTERED[name]
    # A module that is imported again has a new object for the same target.
    same = known is builder or (entry.target == target and "<locals>" not in target)
    return None if same else entry.target


def available() -> dict[str, ModelEntry]:
    """All models by name: built-in ones first, then registered ones, then those of installed packages."""
    entries = {name: entry for models in (_BUILT_IN, _REGISTERED) for name, (entry, _) in models.items()}
    entries.setdefault(FACTORY, _FACTORY_ENTRY)
    for point in announced(ENTRY_POINTS):
        owner = entries.setdefault(point.name, _announced(point))
        if owner.target != point.value:
            rival = owner.target or "ortlaunch"
            _log.warning("model '%s' of %s is left out: the name belongs to %s", point.name, _package(point), rival)
    return entries


def find(name: str) -> ModelEntry | None:
    """The model of a name; None if there is none. Unlike `available`, it reads only what this name needs."""
    for models in (_BUILT_IN, _REGISTERED):
        if name in models:
            return models[name][0]
    return _FACTORY_ENTRY if name == FACTORY else available().get(name)


def _announced(point: EntryPoint) -> ModelEntry:
    return ModelEntry(point.name, point.value, "any", f"{point.value} of the package {_package(point)}")


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def suggest(name: str) -> str | None:
    """The known model name that is most similar to `name`; None if no name is similar."""
    return nearest(name, available())


def unknown_model_message(name: str) -> str:
    """The message for a model name that is unknown."""
    close = suggest(name)
    hint = f" Did you mean model={close}?" if close else ""
    return (
        f"model: there is no model '{name}'.{hint} There are: {', '.join(sorted(available()))}. "
        "For a model of your own: model=factory model.target=package.module:callable"
    )


def check_request(cfg: ModelConfig) -> None:
    """Checks a model's configuration as far as that is possible without importing anything.

    Raises:
        RequestError: the name is unknown, or the target is missing, malformed or given for a model that takes none.
    """
    if cfg.name == FACTORY:
        if cfg.target is None:
            raise RequestError(
                "model=factory builds what model.target names: give model.target=package.module:callable"
            )
        where = check_form(cfg.target, "model.target")
        package = re.split("[.:]", cfg.target, maxsplit=1)[0]
        if package in sys.stdlib_module_names and in_working_folder(package) is None:
            # Many of these have no source to look at, and importing one runs nothing of the user's.
            load_target(cfg.target, where, import_module)
        return
    if cfg.target is not None:
        raise RequestError(
            f"model.target={cfg.target} is for model=factory, and model.name is {cfg.name}: drop one of them"
        )
    if not cfg.imports and find(cfg.name) is None:
        raise RequestError(unknown_model_message(cfg.name))


def check_source(cfg: ModelConfig, *, same_environment: bool) -> None:
    """Looks at the first module to be imported, or at the target and its module, without importing them.

    Args:
        cfg: the model's configuration.
        same_environment: as in `ortlaunch.base.targets.check_module`.

    Raises:
        RequestError: a module or a name certainly does not exist, or a source has a syntax error.
    """
    if cfg.imports:
        # The import of this module may add to the search path, so the later ones cannot be checked.
        first = cfg.imports[0]
        check_module(first, f"model.imports: {first}", same_environment=same_environment)
    elif cfg.target is not None:
        check_target(cfg.target, "model.target", same_environment=same_environment)


def digests(cfg: ModelConfig) -> list[str]:
    """Digests of the sources of the user's modules that a configuration names; empty for one that is not found."""
    modules = [*cfg.imports, *([] if cfg.target is None else [cfg.target.partition(":")[0]])]
    return [digest(name) for name in modules]


def build_model(cfg: ModelConfig) -> nn.Module:
    """Builds the model of a configuration on the CPU and checks that it can be trained.

    The caller has called `ortlaunch.base.modules.add_working_folder`.

    Raises:
        RequestError: a model, target, import or parameter is unknown, or the result cannot be trained (see
            `ortlaunch.models.checks.check_model`). Exceptions of the user's own builder are passed on.
    """
    from ortlaunch.models.checks import check_model

    model = construct(cfg)
    check_model(model)
    return model


def construct(cfg: ModelConfig) -> nn.Module:
    """Calls the builder and returns its result on the CPU, without the check of `build_model`.

    A model that comes in evaluation mode as a whole, as ``from_pretrained`` of transformers returns it, is put into
    training mode. Single modules in evaluation mode stay in it, such as a BatchNorm whose statistics are frozen.

    Raises:
        RequestError: a model, target, import or parameter is unknown.
    """
    from ortlaunch.models.positions import note_built

    check_request(cfg)
    for module in cfg.imports:
        load_module(module, f"model.imports: {module}")
    builder, owner = _builder(cfg)
    check_arguments(builder, cfg.params, owner, "model.params")
    model = builder(**cfg.params)
    if is_built_in(cfg):
        note_built(model)
    if getattr(model, "training", None) is False:
        model.train()
    for module in getattr(model, "modules", tuple)():
        # Norms, exchanges and AdamW take no sparse gradients, and dense ones give the same weights.
        if getattr(module, "sparse", False) is True and type(module).__module__ == "torch.nn.modules.sparse":
            module.sparse = False
    return model


def _builder(cfg: ModelConfig) -> tuple[Callable[..., Any], str]:
    """The builder of a configuration's model, and its name for messages."""
    if cfg.target is not None:
        return load_target(cfg.target, f"model.target={cfg.target}"), cfg.target
    for models in (_BUILT_IN, _REGISTERED):
        if cfg.name in models:
            return models[cfg.name][1], f"model {cfg.name}"
    entry = available().get(cfg.name)
    if entry is None:
        raise RequestError(unknown_model_message(cfg.name))
    return load_target(entry.target, f"model={cfg.name} ({entry.summary})", import_module), f"model {cfg.name}"


def takes_classes(cfg: ModelConfig) -> bool:
    """Whether a configuration's model takes its number of classes from the data."""
    return cfg.target is None and cfg.name in _OF_DATA and CLASSES not in cfg.params


def is_built_in(cfg: ModelConfig) -> bool:
    """Whether a configuration's model is one of ortlaunch's own."""
    return cfg.target is None and cfg.name in _BUILT_IN
