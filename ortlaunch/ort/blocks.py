"""ORTModule under ZeRO 3: each block of the model has its own ORTModule, and the rest of the model is plain PyTorch.

ZeRO 3 gathers a module's parameters for its forward, frees them, and gathers them again for its backward. ORTModule's
backward, however, reads the parameters where its forward found them. ``backend.zero3`` chooses between two solutions:

* ``recompute``: only the block's output is kept from the forward. The backward runs ONNX Runtime's forward and backward
  one after the other, while the parameters are gathered. This keeps ZeRO 3's memory and saves activations, but costs a
  second forward. That forward finds the block's buffers as the first one found them, and leaves them as they are.
* ``hold``: the gathered parameters are kept until the backward. This costs no second forward, but the whole model is in
  memory between forward and backward.

A block stays where it is in the model and keeps its class; only its ``forward`` is replaced on the instance. So
parameters keep their names, and DeepSpeed hooks the plain model, each block as a leaf (``set_z3_leaf_module``) that is
gathered and freed as a whole.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import OrtZero3
from ortlaunch.models import modes
from ortlaunch.ort.tracing.buffers import copied_buffers

_MOST_SIGNATURES = 8
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)

_Constants = list[tuple[Any, ...] | None]
"""For each leaf of a structure: None for a tensor, otherwise the value and a key that identifies it."""

Watch = Callable[[nn.Module, list[Tensor]], None]
"""Is given the ORTModule that has run a block, and its tensors, while the block's parameters are gathered."""

MakeOrtModule = Callable[[nn.Module, str], nn.Module]
"""Wraps a module in an ORTModule; the second argument distinguishes the files of its graphs."""


class OrtBlock:
    """Replaces a block's ``forward``."""

    def __init__(self, block: nn.Module, path: str, make: MakeOrtModule, mode: OrtZero3, may_fall_back: bool) -> None:
        """
        Args:
            block: the block, with its original forward.
            path: its path in the model, for messages and file names.
            make: creates the block's ORTModules; called at its first forward, because the parameters exist only then.
            mode: how the parameters are available to the backward.
            may_fall_back: whether PyTorch runs the block where ONNX Runtime cannot.
        """
        self.block = block
        self.path = path
        self._make = make
        self._mode = mode
        self._may_fall_back = may_fall_back
        self._forward = block.forward
        self._signatures: list[_Signature] = []

    @property
    def ort_modules(self) -> list[nn.Module]:
        """One ORTModule for each way in which the block was called; empty before its first forward."""
        return [signature.ort_module for signature in self._signatures]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and self._is_trained():
            # PyTorch drops out here too, and a reentrant checkpoint around the block repeats this pass with gradients.
            # ORTModule's graph for passes without gradients has no dropout.
            with torch.enable_grad():
                outputs = self(*args, **kwargs)
            return pytree.tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, outputs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        signature = self._signature(_constants(leaves), structure)
        signature.follow_training_mode()
        if not torch.is_grad_enabled():
            outputs = signature.ort_module(*tensors)
        elif self._mode is OrtZero3.hold:
            outputs = self._held(signature.ort_module, tensors)
        else:
            outputs = self._recomputed(signature, tensors)
        watch = _watches.get(self)
        if watch is not None:
            watch(signature.ort_module, tensors)
        return signature.rebuild(outputs)

    def watched_by(self, watch: Watch | None) -> None:
        """Has `watch` called after each forward; None for nothing."""
        if watch is None:
            _watches.pop(self, None)
        else:
            _watches[self] = watch

    def in_pytorch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block's own forward."""
        with _plain_linear():
            return self._forward(*args, **kwargs)

    def ask_for_gradients(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the block: makes a positional input require a gradient.

        DeepSpeed reduces the gradients of a leaf once those of its positional inputs are complete. If no positional
        input requires a gradient, that is before the leaf's backward, and its parameters would be trained with zeros.
        """
        trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in block.parameters())
        if not trained or any(map(_requires_grad, args)):
            return None
        bound = inspect.signature(self._forward).bind(*args, **kwargs)
        positional = list(bound.args)
        if not any(map(_requires_grad, positional)):
            index = next((i for i, value in enumerate(positional) if _is_floating(value)), None)
            if index is None:
                raise RequestError(
                    f"the block {self.path} is called without a positional floating-point tensor, and DeepSpeed would "
                    "reduce its gradients too early: choose other blocks by backend.blocks, or trainer.zero_stage=2"
                )
            positional[index] = positional[index].detach().requires_grad_()
        return tuple(positional), bound.kwargs

    def _is_trained(self) -> bool:
        return self.block.training and any(parameter.requires_grad for parameter in self.block.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> OrtBlock:
        """A copy of a block has no sessions; it makes its own at its first forward."""
        copied = memo[id(self)] = OrtBlock.__new__(OrtBlock)
        shared = {"path": self.path, "_make": self._make, "_mode": self._mode, "_may_fall_back": self._may_fall_back}
        vars(copied).update(shared, _signatures=[])
        copied.block, copied._forward = copy.deepcopy(self.block, memo), copy.deepcopy(self._forward, memo)
        return copied

    def _signature(self, constants: _Constants, structure: pytree.TreeSpec) -> _Signature:
        """Returns the ORTModule for arguments of this structure and with these constants."""
        for known in self._signatures:
            if known.structure == structure and known.constants == constants:
                return known
        self._check(constants)
        original = _Original(self.block, self._forward, constants, structure)
        name = self.path if not self._signatures else f"{self.path}_{len(self._signatures)}"
        self._signatures.append(_Signature(original, self._make(original, name)))
        return self._signatures[-1]

    def _check(self, constants: _Constants) -> None:
        for constant in constants:
            if constant is not None and not isinstance(constant[0], _CONSTANTS):
                raise RequestError(
                    f"the block {self.path} is called with a {type(constant[0]).__name__}, and ONNX Runtime takes "
                    "tensors and plain values: let the model pass nothing else to its blocks (no cache of keys and "
                    "values: use_cache=False), choose others by backend.blocks, or use trainer.zero_stage=2"
                )
        if len(self._signatures) == _MOST_SIGNATURES:
            raise RequestError(
                f"the block {self.path} was called in {_MOST_SIGNATURES} ways that differ in more than their tensors, "
                "and each is exported anew: let the model pass what changes as a tensor, or use trainer.zero_stage=2"
            )

    def _recomputed(self, signature: _Signature, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        # ORTModule can be imported only after the compatibility layer.
        from ortlaunch.ort.module import outputs
        from ortlaunch.ort.tracing import buffers

        run = _seeded(signature.ort_module)
        if not any(tensor.requires_grad for tensor in tensors):
            return run(*tensors)
        before: dict[str, Tensor] = {}

        def either_pass(*inputs: Tensor) -> tuple[Tensor, ...]:
            if torch.is_grad_enabled():
                # The buffers have moved once, in the first pass.
                with buffers.set_back(signature.original, before):
                    return run(*inputs)
            # The first pass must also run the training graph. Without gradients ORTModule would run the graph without
            # dropout, and the loss would belong to another function than the gradients.
            # PyTorch, which runs after a fallback, moves buffers in place.
            before.update(copied_buffers(signature.original) if self._may_fall_back else {})
            with torch.enable_grad(), outputs.values_before() as values:
                results = run(*inputs)
            before.update(values)
            return tuple(result.detach() for result in results)

        recomputed: tuple[Tensor, ...] = checkpoint(either_pass, *tensors, use_reentrant=True)
        return recomputed

    def _held(self, ort_module: nn.Module, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        held = [parameter.data for parameter in self.block.parameters()]
        outputs = _seeded(ort_module)(*tensors)
        node = next((output.grad_fn for output in outputs if output.grad_fn is not None), None)
        if node is not None:
            # The hook is called after ONNX Runtime's backward. The closure lives as long as the node.
            node.register_hook(lambda *_: held.clear())
        return outputs


_watches: WeakKeyDictionary[OrtBlock, Watch] = WeakKeyDictionary()
"""Not attributes: a copy of a block has none, and what a watch changes is no state of the model."""


class _Returned:
    """What a block's own forward has returned beside tensors.

    ORTModule runs a copy of the block to find its outputs, and with a graph from the cache it runs nothing else. A copy
    shares this object, so that the block knows what its copy has returned.
    """

    def __init__(self) -> None:
        self.constants: _Constants = []
        self.structure: pytree.TreeSpec | None = None

    def take(self, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        """Notes what a forward has returned."""
        self.constants, self.structure = _constants(leaves), structure

    def __deepcopy__(self, memo: dict[int, Any]) -> _Returned:
        return self


class _Original(nn.Module):
    """The block's own forward with tensors as inputs and outputs and all constants bound; ORTModule exports this."""

    def __init__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        constants: _Constants,
        structure: pytree.TreeSpec,
    ) -> None:
        super().__init__()
        self.training = block.training
        self.block = block
        self.constants = constants
        self.structure = structure
        self.returned = _Returned()
        self._block_forward = forward

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        leaves = [next(remaining) if constant is None else constant[0] for constant in self.constants]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        with _plain_linear():
            outputs, structure = pytree.tree_flatten(self._block_forward(*args, **kwargs))
        self.returned.take(outputs, structure)
        return tuple(output for output in outputs if isinstance(output, Tensor))


@contextlib.contextmanager
def _plain_linear() -> Iterator[None]:
    """Restores torch's ``functional.linear``, which ZeRO 3 replaces by an ``autograd.Function`` of DeepSpeed.

    The Function would be exported as such and not as a matrix product.
    """
    replaced = functional.linear
    functional.linear = torch._C._nn.linear
    try:
        yield
    finally:
        functional.linear = replaced


class _Signature:
    """The ORTModule for calls of one structure with one set of constants."""

    def __init__(self, original: _Original, ort_module: nn.Module) -> None:
        self.original = original
        self.ort_module = ort_module
        self.constants = original.constants
        self.structure = original.structure

    def follow_training_mode(self) -> None:
        """Copies the block's mode; ``train()`` and ``eval()`` of the model reach the block but not this object."""
        if self.original.training != self.original.block.training:
            # Modules of the block that are kept in another mode stay so, and a train() of its own was called already.
            with modes.kept(self.original.block), modes.only_set(self.original.block):
                self.ort_module.train(self.original.block.training)

    def rebuild(self, tensors: tuple[Tensor, ...]) -> Any:
        """Converts the outputs to the structure that the block itself returns."""
        returned = self.original.returned
        assert returned.structure is not None
        remaining = iter(tensors)
        leaves = [next(remaining) if fixed is None else fixed[0] for fixed in returned.constants]
        return pytree.tree_unflatten(leaves, returned.structure)


def attach(blocks: dict[str, nn.Module], make: MakeOrtModule, mode: OrtZero3, *, may_fall_back: bool) -> None:
    """Makes ONNX Runtime run the blocks, and DeepSpeed gather and free each of them as a whole."""
    from deepspeed.utils import set_z3_leaf_module

    for path, block in blocks.items():
        # This is a plain attribute, so that the module tree and the names of the parameters do not change.
        block.forward = OrtBlock(block, path, make, mode, may_fall_back)  # type: ignore[method-assign]
        # The hook comes before DeepSpeed's own hooks, which must see its result.
        block.register_forward_pre_hook(block.forward.ask_for_gradients, with_kwargs=True)
        set_z3_leaf_module(block, True)


def attached(model: nn.Module) -> list[OrtBlock]:
    """Returns the blocks of a model that `attach` has changed."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    return [forward for forward in forwards if isinstance(forward, OrtBlock)]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _constants(leaves: list[Any]) -> _Constants:
    return [None if isinstance(leaf, Tensor) else (leaf, type(leaf)) for leaf in leaves]


def _seeded(ort_module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """Makes every call use the same dropout masks.

    ONNX Runtime has its own random generator, which checkpointing does not restore. The second forward would draw other
    masks than the first, and the gradients would belong to another output. So the seed comes from torch's generator,
    which checkpointing restores.
    """
    import onnxruntime

    seed = int(torch.randint(2**31 - 1, ()))

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        onnxruntime.set_seed(seed)
        outputs: tuple[Tensor, ...] = ort_module(*tensors)
        return outputs

    return run
