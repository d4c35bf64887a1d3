"""Checks before every forward that the graph still matches the model and the call.

ORTModule exports at the first forward and checks nothing afterwards. Later changes have no effect: a parameter that is
frozen or unfrozen, a parameter, buffer, module or function that is replaced, a hook that is added, an argument that is
omitted or has another truth value, a rate that a schedule lowers. With this guard, such a change causes a new export.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ortlaunch.base.errors import TrainingError
from ortlaunch.ort.module.failed_node import failure
from ortlaunch.ort.module.steps import Steps, kernels_of
from ortlaunch.ort.refusal import cause, refusal

_FAILED = "Error in forward pass execution"
"""What ORTModule's messages about a graph that failed while it ran begin with."""
_MOST_EXPORTS = 16
_PLAIN = (bool, int, float, str, type(None))
_COMPARED = (*_PLAIN, FunctionType, BuiltinFunctionType, MethodType, type)
"""Attributes of a module that equal themselves alone, or what is as good."""

_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
"""Tables of a module whose entries take part in its forward."""
_trains = attrgetter("requires_grad")
_values = methodcaller("values")

_Names = list[tuple[torch.nn.Module, str]]
_Owner = tuple[torch.nn.Module, tuple[str, ...], tuple[Any, ...]]
"""A module, names of attributes and their values."""

_own: WeakKeyDictionary[torch.nn.Module, frozenset[str]] = WeakKeyDictionary()


def note(model: torch.nn.Module) -> None:
    """Records the attributes of a plain model, because DeepSpeed and others later add attributes that count calls."""
    for module in model.modules():
        _own[module] = frozenset(vars(module))


def install() -> None:
    """Puts a guard before every ORTModule of this process; repeated calls do nothing."""
    from onnxruntime.training.ortmodule._inference_manager import InferenceManager
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    for manager, is_training in ((TrainingManager, True), (InferenceManager, False)):
        if not hasattr(manager, "_ortlaunch_guarded"):
            manager.forward = manager._ortlaunch_guarded = _guarded(manager.forward, is_training)


def _guarded(original: Any, is_training: bool) -> Any:
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if self._fallback_manager.is_pending():
            return original(self, *inputs, **kwargs)
        if not hasattr(self, "_ortlaunch_guard"):
            self._ortlaunch_guard = ExportGuard(self._original_module, is_training, kernels_of(self))
        guard: ExportGuard = self._ortlaunch_guard
        is_valid = guard.admits(inputs, kwargs)
        if not is_valid:
            # ORTModule exports again if both are unset.
            self._graph_transition_manager._exported_model_info = None
            self._execution_agent = self._ortlaunch_steps = None
        try:
            if self._ortlaunch_steps is not None:
                taken = self._ortlaunch_steps.take(inputs, kwargs)
                if taken is not None:
                    return taken[0]
            outputs = original(self, *inputs, **kwargs)
        except RuntimeError as error:
            if _FAILED not in str(error):
                raise
            what = failure(self, str(error)) or cause(error)
            raise TrainingError(
                f"ONNX Runtime cannot compute this batch: {what}. If other batches work, its graph holds a "
                "size that depends on a batch's values: use backend=eager or backend=compile"
            ) from error
        guard.settle()
        if is_training and not is_valid:
            self._ortlaunch_steps = Steps.after(self, inputs, kwargs)
        return outputs

    return forward


class ExportGuard:
    """Remembers what one graph was exported for, and detects changes."""

    def __init__(self, model: torch.nn.Module, is_training: bool, kernels: ModuleType | None) -> None:
        """
        Args:
            model: the plain model.
            is_training: whether its graph has a backward.
            kernels: the module of the compiled kernels, which compares faster; None where there is none.
        """
        self._model = model
        self._is_training = is_training
        self._kernels = kernels
        self.exports = 0
        """How often the graph was exported, or is about to be."""
        self._ignored: set[tuple[int, str]] = set()
        self._call: list[Any] = []
        self._names: _Names = []
        self._values: list[Any] = []
        self._read: list[tuple[torch.nn.Module, Any]] = []
        """Modules with what reads their attributes of `_names` at once: this is done before every step."""
        self._state: list[Any] = []
        self._owners: tuple[_Owner, ...] = ()
        """The same attributes and their values for `_kernels`."""
        self._tables: tuple[dict[str, Any], ...] = ()
        """The tables of `_TABLES` of each module."""
        self._members: tuple[Any, ...] = ()
        self._addresses: list[int] = []
        self._tensors: tuple[Tensor, ...] = ()
        self._trained: list[bool] | bytes = []
        self._is_new = False

    def admits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the graph is valid for the current model and a call with these arguments.

        Raises:
            RequestError: the model or its calls change too often; the message names the change.
        """
        call = self._call_facts(args, kwargs)
        if self.exports and call == self._call and self._same_model():
            return True
        what = self._changed(call) if self.exports else ""
        self.exports += 1
        if self.exports > _MOST_EXPORTS:
            raise refusal(
                f"the model was exported {_MOST_EXPORTS} times because it or its calls changed, the last time {what}, "
                "and each time costs an export: pass what changes as a tensor, or use backend=eager or compile"
            )
        self._remember(call)
        return False

    def settle(self) -> None:
        """Called after a forward: attributes that the trace itself changed, such as a counter of calls, are ignored."""
        if not self._is_new:
            return
        self._is_new = False
        moved = {
            (id(module), name)
            for (module, name), value in zip(self._names, self._values, strict=True)
            if not _same(vars(module).get(name), value)
        }
        if moved:
            self._ignored |= moved
            self._remember(self._call)
            self._is_new = False

    def _remember(self, call: list[Any]) -> None:
        modules = list(self._model.modules())
        self._call = call
        self._names = [
            (module, name)
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, _COMPARED)
            and name in _own.get(module, (name,))
            and (id(module), name) not in self._ignored
        ]
        self._values = [vars(module)[name] for module, name in self._names]
        names: dict[torch.nn.Module, list[str]] = {}
        for module, name in self._names:
            names.setdefault(module, []).append(name)
        self._read = [(module, itemgetter(*of_module)) for module, of_module in names.items()]
        self._state = self._attributes()
        self._owners = tuple(
            (module, tuple(of_module), tuple(vars(module)[name] for name in of_module))
            for module, of_module in names.items()
        )
        self._tables = tuple(vars(module)[name] for module in modules for name in _TABLES)
        # The members are kept alive, so that their ids stay unique.
        self._members = tuple(chain.from_iterable(map(_values, self._tables)))
        self._addresses = list(map(id, self._members))
        self._tensors = tuple(member for member in self._members if isinstance(member, Tensor))
        self._trained = self._trained_now()
        self._is_new = True

    def _same_model(self) -> bool:
        if self._kernels is not None:
            return (
                self._kernels.same_attributes(self._owners)
                and self._kernels.same_entries(self._tables, self._members)
                and self._trained_now() == self._trained
            )
        try:
            # Plain values of the same type can be compared with ==. A NaN in a list equals itself, as the same object.
            is_same = self._attributes() == self._state
        except KeyError:
            return False
        now = chain.from_iterable(map(_values, self._tables))
        return is_same and list(map(id, now)) == self._addresses and self._trained_now() == self._trained

    def _attributes(self) -> list[Any]:
        return [read(vars(module)) for module, read in self._read]

    def _trained_now(self) -> list[bool] | bytes:
        """Which of the remembered tensors need a gradient; nothing for a graph without a backward."""
        if not self._is_training:
            return []
        if self._kernels is not None:
            trained: bytes = self._kernels.trained(self._tensors)
            return trained
        return list(map(_trains, self._tensors))

    def _call_facts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves: list[Any] = [*args, *kwargs.values()]
        structure: Any = (len(args), *kwargs)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            leaves, structure = pytree.tree_flatten((args, kwargs))
        autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        facts: list[Any] = [structure, autocast]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                facts.append((leaf.dtype, leaf.dim(), self._is_training and leaf.requires_grad))
            else:
                facts.append((type(leaf), leaf) if isinstance(leaf, _PLAIN) else type(leaf))
        return facts

    def _changed(self, call: list[Any]) -> str:
        if call != self._call:
            return "its arguments (other than their sizes and values)"
        names = {id(module): name for name, module in self._model.named_modules()}
        for (module, name), value in zip(self._names, self._values, strict=True):
            now = vars(module).get(name)
            if not _same(now, value):
                where = names.get(id(module)) or "the model"
                return f"the attribute {name} of {where}, from {value!r} to {now!r}"
        return "which parameters, buffers, modules and hooks it has or trains"


def _same(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and left == right)
