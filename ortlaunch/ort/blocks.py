"""ORTModule under ZeRO 3: one for each block of the model, the rest of the model in plain PyTorch.

ZeRO 3 gathers a module's parameters for its forward, frees them, and gathers them again for its backward. ORTModule's
backward, however, reads the parameters where its forward found them. Two ways out, by ``backend.zero3``:

* ``recompute``: the block's output alone is kept from the forward; the backward runs ONNX Runtime's forward and
  backward one after the other, while the parameters are gathered. Keeps ZeRO 3's memory, and needs less of it for
  activations; costs a second forward.
* ``hold``: what the forward gathered is kept until the backward. No second forward; from forward to backward the
  whole model lies in memory.

A block stays where it is in the model and keeps its class; only its ``forward`` is replaced on the instance. So
parameters keep their names, and DeepSpeed hooks the plain model, each block as a leaf (``set_z3_leaf_module``) that is
gathered and freed as a whole.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import OrtZero3

_MOST_SIGNATURES = 8
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)

_Constants = list[tuple[Any, ...] | None]
"""For each leaf of a structure: None where it is a tensor, else its value and what tells it from others."""

MakeOrtModule = Callable[[nn.Module, str], nn.Module]
"""Puts a module into an ORTModule; the second argument tells its graphs from others'."""


class OrtBlock:
    """Takes the place of a block's ``forward``."""

    def __init__(self, block: nn.Module, path: str, make: MakeOrtModule, mode: OrtZero3) -> None:
        """
        Args:
            block: the block, still with its own forward.
            path: its path in the model, for messages and files.
            make: makes its ORTModules, at its first forward: only then are its parameters there.
            mode: how the parameters outlast the backward.
        """
        self.block = block
        self.path = path
        self._make = make
        self._mode = mode
        self._forward = block.forward
        self._signatures: list[_Signature] = []

    @property
    def ort_modules(self) -> list[nn.Module]:
        """One for each way in which the block was called; none before its first forward."""
        return [signature.ort_module for signature in self._signatures]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        signature = self._signature(_constants(leaves), structure)
        signature.follow_training_mode()
        if not torch.is_grad_enabled():
            outputs = signature.ort_module(*tensors)
        elif self._mode is OrtZero3.hold:
            outputs = self._held(signature.ort_module, tensors)
        else:
            outputs = self._recomputed(signature.ort_module, tensors)
        return signature.rebuild(outputs)

    def ask_for_gradients(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the block: makes some positional input one that requires a gradient.

        DeepSpeed reduces a leaf's gradients when those of its positional inputs are complete. Where no such input asks
        for one, that is before the leaf's backward: its parameters would be trained with zeros.
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

    def _signature(self, constants: _Constants, structure: pytree.TreeSpec) -> _Signature:
        """The ORTModule for arguments of this structure and with these constants."""
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

    def _recomputed(self, ort_module: nn.Module, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        run = _seeded(ort_module)
        if not any(tensor.requires_grad for tensor in tensors):
            return run(*tensors)

        def either_pass(*inputs: Tensor) -> tuple[Tensor, ...]:
            if torch.is_grad_enabled():
                return run(*inputs)
            # The first pass too must run the training graph: ORTModule without gradients takes the one without
            # dropout, and the loss would be that of another function than the one whose gradients are computed.
            with torch.enable_grad():
                outputs = run(*inputs)
            return tuple(output.detach() for output in outputs)

        outputs: tuple[Tensor, ...] = checkpoint(either_pass, *tensors, use_reentrant=True)
        return outputs

    def _held(self, ort_module: nn.Module, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        held = [parameter.data for parameter in self.block.parameters()]
        outputs = _seeded(ort_module)(*tensors)
        node = next((output.grad_fn for output in outputs if output.grad_fn is not None), None)
        if node is not None:
            # Called after the node, which is ONNX Runtime's backward; the closure lives as long as the node does.
            node.register_hook(lambda *_: held.clear())
        return outputs


class _Original(nn.Module):
    """The block's own forward with tensors in and tensors out, all else bound: what ORTModule exports."""

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
        self.output_constants: _Constants = []
        self.output_structure: pytree.TreeSpec | None = None
        self._block_forward = forward

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        leaves = [next(remaining) if constant is None else constant[0] for constant in self.constants]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        with _plain_linear():
            outputs, self.output_structure = pytree.tree_flatten(self._block_forward(*args, **kwargs))
        self.output_constants = _constants(outputs)
        return tuple(output for output in outputs if isinstance(output, Tensor))


@contextlib.contextmanager
def _plain_linear() -> Iterator[None]:
    """Within it, ``functional.linear`` is torch's: ZeRO 3 puts an ``autograd.Function`` of DeepSpeed's in its place,
    which would be exported as such and not as a matrix product."""
    replaced = functional.linear
    functional.linear = torch._C._nn.linear
    try:
        yield
    finally:
        functional.linear = replaced


class _Signature:
    """The ORTModule that serves calls of one structure with one set of constants."""

    def __init__(self, original: _Original, ort_module: nn.Module) -> None:
        self._original = original
        self.ort_module = ort_module
        self.constants = original.constants
        self.structure = original.structure

    def follow_training_mode(self) -> None:
        """Whoever calls ``train()`` or ``eval()`` on the model reaches the block and not what holds it."""
        if self._original.training != self._original.block.training:
            self.ort_module.train(self._original.block.training)

    def rebuild(self, tensors: tuple[Tensor, ...]) -> Any:
        """What the block itself would have returned."""
        assert self._original.output_structure is not None
        remaining = iter(tensors)
        leaves = [next(remaining) if fixed is None else fixed[0] for fixed in self._original.output_constants]
        return pytree.tree_unflatten(leaves, self._original.output_structure)


def attach(blocks: dict[str, nn.Module], make: MakeOrtModule, mode: OrtZero3) -> None:
    """Lets ONNX Runtime run the blocks, and DeepSpeed gather and free each as a whole."""
    from deepspeed.utils import set_z3_leaf_module

    for path, block in blocks.items():
        # Plain attribute: the module tree, and so every parameter's name, stays as it is.
        block.forward = OrtBlock(block, path, make, mode)  # type: ignore[method-assign]
        # Before DeepSpeed's own hooks, which must see what it returns.
        block.register_forward_pre_hook(block.forward.ask_for_gradients, with_kwargs=True)
        set_z3_leaf_module(block, True)


def attached(model: nn.Module) -> list[OrtBlock]:
    """The blocks of a model that `attach` has reached."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    return [forward for forward in forwards if isinstance(forward, OrtBlock)]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _constants(leaves: list[Any]) -> _Constants:
    return [None if isinstance(leaf, Tensor) else (leaf, type(leaf)) for leaf in leaves]


def _seeded(ort_module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """Runs it with the same dropout masks at every call.

    ONNX Runtime has a random generator of its own, which checkpointing does not restore: the second forward would draw
    other masks than the first, and the gradients would be those of another output. The seed comes from torch's
    generator, so that restoring that one restores the masks.
    """
    import onnxruntime

    seed = int(torch.randint(2**31 - 1, ()))

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        onnxruntime.set_seed(seed)
        outputs: tuple[Tensor, ...] = ort_module(*tensors)
        return outputs

    return run
