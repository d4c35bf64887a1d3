"""Takes the steps of a training graph without what ORTModule repeats in each of them.

In every step ORTModule hands each parameter and buffer to ONNX Runtime anew, and passes all of them through several
functions of Python; for a small model this takes longer than the graph. The guard (`ortlaunch.ort.module.guard`) knows
that model and arguments are those of the export. So the memory of the parameters is handed over once, and again when
one of them has moved. What a step computes is the same.

This is for a whole model on the CPU. Where a condition does not hold, ORTModule's own forward runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ortlaunch.ort.module.randomness import seed_from_torch

_PLAIN = (bool, int, float, str, type(None))
_LARGEST = 2**20
"""Bytes of a batch up to which it is copied into memory that ONNX Runtime knows from an earlier step."""
_MOST_SIZES = 8
"""Sizes of batches for which such memory is kept."""
_MOST_FREE = 4
"""Forwards without a backward between them for which it is kept, of each size."""

_Sizes = tuple[torch.Size, ...]


def enable(wrapped: Any, kernels: ModuleType) -> None:
    """Makes an ORTModule around a whole model on the CPU take its steps this way.

    Args:
        wrapped: the ORTModule.
        kernels: the module that `ortlaunch.ort.extension.load_kernels` returned.
    """
    inner = wrapped._torch_module
    # There is none after a fallback.
    if hasattr(inner, "_execution_manager"):
        inner._execution_manager(True)._ortlaunch_kernels = kernels


def enable_like(manager: Any, other: Any) -> None:
    """Makes a manager of ORTModule's take its steps as another one does."""
    if (kernels := kernels_of(other)) is not None:
        manager._ortlaunch_kernels = kernels


def kernels_of(manager: Any) -> ModuleType | None:
    """Returns the module of the compiled kernels that `enable` has given to a manager of ORTModule's."""
    return getattr(manager, "_ortlaunch_kernels", None)


class Steps:
    """The steps of one exported graph with arguments of one kind."""

    @classmethod
    def after(cls, manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps | None:
        """Returns the steps after a first one, or None if ORTModule has to take them.

        Args:
            manager: ORTModule's manager of the training graph.
            args: the positional arguments of the first step.
            kwargs: the others.
        """
        kernels = kernels_of(manager)
        info = manager._graph_transition_manager._post_export_processed_model_info
        options = manager._runtime_options
        if kernels is None or info is None or manager._execution_agent is None or manager._device.type != "cpu":
            return None
        is_usual = (
            not options.enable_zero_stage3_support
            # Somebody wants ORTModule's checks of each step.
            and not options.skip_check.is_disabled()
            and not manager._gradient_accumulation_manager.enabled
            and not info.is_mem_efficient_grad_management_enabled
            and not info.onnx_graph_input_const_as_tensor
            # The graph gets a copy of a buffer that it moves.
            and not info.module_forward_output_schema.buffers
            # ORTModule looks into further kinds of containers.
            and all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in pytree.tree_leaves((args, kwargs)))
        )
        if not is_usual:
            return None
        steps = cls(manager, info, kernels)
        # ORTModule gives ONNX Runtime a copy of booleans, which would not follow them.
        return None if any(weight.dtype == torch.bool for weight in steps._weights) else steps

    def __init__(self, manager: Any, info: Any, kernels: ModuleType) -> None:
        """
        Args:
            manager: ORTModule's manager of the training graph.
            info: what it knows of its export.
            kernels: the module of the compiled kernels.
        """
        from onnxruntime import set_seed
        from onnxruntime.capi import _pybind_state
        from onnxruntime.training.ortmodule import _utils

        self._manager, self._info, self._kernels, self._ort = manager, info, kernels, _pybind_state
        self._transition = manager._graph_transition_manager
        # The session ends when the manager lets its agent go.
        self._agent = weakref.ref(manager._execution_agent)
        self._set_seed = set_seed if manager._execution_agent._ortlaunch_draws else None
        self._to_dlpack: Callable[[Tensor], Any] = _utils._torch_tensor_to_dlpack
        asked = set(info.onnx_graph_input_names_user_defined)
        access = info.onnx_graph_input_data_accessor_user_defined
        self._inputs: list[Tensor | None] = [
            None if name in asked else tensor for name, tensor in info._buffer_for_ort_runs.items()
        ]
        self._asked = [(place, access[name]) for place, name in enumerate(info._buffer_for_ort_runs) if name in asked]
        self._weights = tuple(tensor for tensor in self._inputs if tensor is not None)
        graph = manager._graph_info
        self._saved = [
            place
            for place in graph.module_output_indices_requires_save_for_backward
            if place < len(graph.user_output_names)
        ]
        self._not_differentiable = list(graph.output_grad_indices_non_differentiable)
        self._whole_shape = frozenset(graph.output_grad_indices_require_full_shape)
        self._booleans: list[int] | None = None
        self._pick: dict[tuple[bool, ...], itemgetter[Any]] = {}
        """Arranges the gradients as the inputs are; by which outputs have a gradient."""
        self._places: bytes | None = None
        """Where the weights are, of which `_free` knows."""
        self._free: dict[_Sizes, list[_Feeds]] = {}
        # torch's own Python first looks at each argument for wrappers of a transform; `_fits` excludes transforms.
        self._apply = super(torch.autograd.Function, _function_of(self)).apply  # type: ignore[misc]

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Runs the forward and returns its outputs in a tuple of one; None if ORTModule has to run it.

        The arguments must be of the kind that the guard has admitted.
        """
        if not self._fits():
            return None
        asked = [read(args, kwargs) for _, read in self._asked]
        feeds = self._feeds(asked)
        if feeds is None:
            return None
        inputs = self._inputs.copy()
        for (place, _), value in zip(self._asked, asked, strict=True):
            inputs[place] = value
        return (self._info.restore_outputs(self._apply(feeds, *inputs)),)

    def forward(self, ctx: Any, feeds: _Feeds) -> tuple[Tensor, ...]:
        """Runs the forward graph; the forward of an ``autograd.Function``."""
        if self._set_seed is not None:
            seed_from_torch(self._set_seed)
        state, fetched = self._ort.PartialGraphExecutionState(), self._ort.OrtValueVector()
        self._manager._execution_agent.run_forward(feeds.values, fetched, state, None)
        outputs: list[Tensor] = fetched.to_dlpacks(self._kernels.take)
        if self._booleans is None:
            self._booleans = list(fetched.bool_tensor_indices())
        for place in self._booleans:
            outputs[place] = outputs[place].to(torch.bool)
        ctx.set_materialize_grads(False)
        ctx.state, ctx.feeds = state, feeds
        ctx.kinds = [(output.shape, output.dtype) for output in outputs]
        # As ORTModule does, one by one: the last call counts.
        for place in self._saved:
            ctx.save_for_backward(outputs[place])
        for place in self._not_differentiable:
            ctx.mark_non_differentiable(outputs[place])
        return tuple(outputs)

    def backward(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Runs the backward graph; the backward of an ``autograd.Function``."""
        from ortlaunch.ort.module.training_graph import refuse_second_derivatives

        refuse_second_derivatives()
        # This finds outputs that were changed in place.
        _ = ctx.saved_tensors
        given = self._ort.OrtValueVector()
        for place, grad in enumerate(grads):
            if place in self._not_differentiable:
                assert grad is None, f"output {place} of ONNX Runtime's graph has no gradient, and got one"
                continue
            slope = self._zero(place, *ctx.kinds[place]) if grad is None else grad.contiguous()
            given.push_back(self._to_dlpack(slope), slope.dtype is torch.bool)
        fetched = self._ort.OrtValueVector()
        try:
            self._manager._execution_agent.run_backward(given, fetched, ctx.state)
        finally:
            # It holds the memory of the forward.
            del ctx.state
        self._done(ctx.feeds)
        return self._arranged(grads, fetched.to_dlpacks(self._kernels.take))

    def _fits(self) -> bool:
        """Whether the session is the one that these steps began with."""
        return (
            self._manager._execution_agent is self._agent()
            and self._manager._execution_agent is not None
            and self._transition._post_export_processed_model_info is self._info
            and not torch._C._are_functorch_transforms_active()
        )

    def _feeds(self, asked: Sequence[Tensor]) -> _Feeds | None:
        """Hands the weights and these arguments over; None if some are not on the CPU, or not contiguous."""
        places = self._kernels.places(self._weights)
        if places is None or self._kernels.places(tuple(asked)) is None:
            return None
        if places != self._places:
            self._free.clear()
            self._places = places
        sizes = tuple(one.shape for one in asked)
        free = self._free.get(sizes)
        if free:
            feeds = free.pop()
            feeds.follow(asked)
            return feeds
        return self._new_feeds(sizes, asked)

    def _new_feeds(self, sizes: _Sizes, asked: Sequence[Tensor]) -> _Feeds:
        is_small = sum(one.nbytes for one in asked) <= _LARGEST
        copies = [one.detach().clone() if is_small else one.detach() for one in asked]
        booleans = [one.dtype is torch.bool for one in copies]
        copies = [one.view(torch.uint8) if is_bool else one for one, is_bool in zip(copies, booleans, strict=True)]
        values = self._ort.OrtValueVector()
        values.reserve(len(self._inputs))
        rest = iter(zip(copies, booleans, strict=True))
        for weight in self._inputs:
            tensor, is_bool = next(rest) if weight is None else (weight.detach(), False)
            values.push_back(self._to_dlpack(tensor), is_bool)
        return _Feeds(values, copies, booleans, sizes, self._places if is_small else None)

    def _done(self, feeds: _Feeds) -> None:
        """Keeps what a step has handed over for a later one."""
        if feeds.places is None or feeds.places is not self._places:
            return
        if len(self._free) == _MOST_SIZES and feeds.sizes not in self._free:
            self._free.clear()
        free = self._free.setdefault(feeds.sizes, [])
        if len(free) < _MOST_FREE:
            free.append(feeds)

    def _zero(self, place: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns the gradient of an output that has none; a single zero unless the graph needs its shape."""
        return torch.zeros(shape if place in self._whole_shape else (), dtype=dtype)

    def _arranged(self, grads: tuple[Tensor | None, ...], results: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the inputs, and before them none of `_Feeds`."""
        have = tuple(grad is not None for grad in grads)
        pick = self._pick.get(have)
        if pick is None:
            pick = self._pick[have] = itemgetter(0, *self._order(have))
        arranged: tuple[Tensor | None, ...] = pick((None, *results))
        return arranged

    def _order(self, have: tuple[bool, ...]) -> list[int]:
        """Returns for each input the place of its gradient, from 1 on; 0 for none."""
        from ortlaunch.ort.module.training_graph import asked_for

        order = [place + 1 for place in self._manager._gradient_map]
        # ORTModule's None for no gradient is a 0 here.
        return [place or 0 for place in asked_for(self._info, [one or None for one in have], order)]


class _Feeds:
    """The weights and arguments of a step as ONNX Runtime sees them."""

    def __init__(
        self, values: Any, copies: list[Tensor], booleans: list[bool], sizes: _Sizes, places: bytes | None
    ) -> None:
        """
        Args:
            values: all inputs of the graph, in its order.
            copies: the memory of the arguments among them.
            booleans: which of these are booleans, whose memory is that of bytes.
            sizes: of the arguments.
            places: where the weights are; None if a later step cannot use this.
        """
        self.values = values
        self.sizes = sizes
        self.places = places
        self._copies = [one.view(torch.bool) if is_bool else one for one, is_bool in zip(copies, booleans, strict=True)]

    def follow(self, asked: Sequence[Tensor]) -> None:
        """Copies the arguments of another step into the memory."""
        for copy, one in zip(self._copies, asked, strict=True):
            copy.copy_(one.detach() if one.requires_grad else one)


def _function_of(steps: Steps) -> type[torch.autograd.Function]:
    """Returns a function whose first argument is `_Feeds`, and whose further ones are all inputs of the graph."""

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, feeds: _Feeds, *_inputs: Any) -> tuple[Tensor, ...]:
            return steps.forward(ctx, feeds)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return steps.backward(ctx, grads)

    return Step
