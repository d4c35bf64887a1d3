"""The optimizers: the options of ``optimizer``, how they group parameters, and what a resumed run sets itself.

The launcher reads the options, so torch is imported in functions alone.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ortlaunch.base.errors import RequestError
from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import (
    DeviceOptimizer,
    GroupConfig,
    OptimizerConfig,
    ParameterGroups,
    facts_of_target,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

_ALWAYS_SETTINGS = ("initial_lr", "weight_decay")
"""What a parameter group of any optimizer has from the configuration alone."""
_SHOWN = 5


@option("optimizer")
@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter, 2019)."""

    name: str = "adamw"
    weight_decay: float = 0.01
    beta1: float = number(0.9, least=0, below=1)
    """Decay rate of the running mean of the gradients."""
    beta2: float = number(0.95, least=0, below=1)
    """Decay rate of the running mean of the squared gradients."""
    eps: float = number(1e-8, least=0)
    """Number that is added to the denominator of the update, so that it is never zero."""

    can_be_resharded: ClassVar[bool] = True

    def build(self, groups: ParameterGroups) -> Optimizer:
        from torch.optim import AdamW

        return AdamW(
            groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=can_be_fused(groups) or None
        )

    def state_elements(self, shape: Sequence[int]) -> int:
        return 2 * math.prod(shape)

    def on_device(self) -> DeviceOptimizer:
        arguments = {"betas": (self.beta1, self.beta2), "eps": self.eps, "weight_decay": self.weight_decay}
        return DeviceOptimizer("AdamW", arguments, ("lr", "beta1", "beta2", "eps", "weight_decay"))


@option("optimizer")
@dataclass
class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    name: str = "sgd"
    lr: float = 0.05
    momentum: float = number(0.9, least=0, below=1)
    """Share of the last update that is added to the next one."""

    def build(self, groups: ParameterGroups) -> Optimizer:
        from torch.optim import SGD

        optimizer = SGD(groups, lr=self.lr, momentum=self.momentum, fused=can_be_fused(groups) or None)
        optimizer.register_step_pre_hook(_start_momentum)
        return optimizer

    def state_elements(self, shape: Sequence[int]) -> int:
        return math.prod(shape) if self.momentum else 0

    def on_device(self) -> DeviceOptimizer:
        for key, value in (("momentum", self.momentum), ("weight_decay", self.weight_decay)):
            if value:
                raise RequestError(
                    f"optimizer.{key}={value:g}: ONNX Runtime's SGD on a device has none: set optimizer.{key}=0, "
                    "or use optimizer=adamw"
                )
        return DeviceOptimizer("SGD", {}, ("lr",))


@option("optimizer")
@dataclass
class AdafactorConfig(OptimizerConfig):
    """torch's Adafactor (Shazeer and Stern, 2018), which stores a matrix's second moments as one row and one column."""

    name: str = "adafactor"
    lr: float = 0.01
    beta2_decay: float = number(-0.8, most=0)
    """Exponent of the decay rate: beta2 at a step is 1 - step ** beta2_decay."""
    clip_threshold: float = number(1.0, least=1)
    """Largest root mean square of a parameter's update."""

    whole_matrices: ClassVar[str | None] = "Adafactor needs the rows and columns of whole matrices"

    def build(self, groups: ParameterGroups) -> Optimizer:
        from torch.optim import Adafactor

        return Adafactor(groups, lr=self.lr, beta2_decay=self.beta2_decay, d=self.clip_threshold)

    def state_elements(self, shape: Sequence[int]) -> int:
        if len(shape) < 2:
            return math.prod(shape)
        *matrices, rows, columns = shape
        return math.prod(matrices) * (rows + columns)


@option("optimizer")
@dataclass
class OptimizerFactoryConfig(OptimizerConfig):
    """Any class of torch.optim, or one of your own."""

    name: str = "factory"
    target: str | None = None
    """`package.module:Class` of the optimizer: torch.optim:NAdam. It gets the parameters, `lr` and `params`."""
    params: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class by name."""

    def state_facts(self) -> dict[str, Any]:
        own = facts_of_target(self.target, self.params)
        return super().state_facts() | {f"optimizer.{key}": value for key, value in own.items()}


def build_optimizer(model: nn.Module, cfg: OptimizerConfig, *, in_pieces: str | None = None) -> Optimizer:
    """The optimizer over all parameters of `model` that require gradients, fused if torch has a fused version.

    Biases, the weights of normalization layers and other parameters with fewer than two dimensions form a group of
    their own without weight decay, unless ``optimizer.decay_bias_and_norm`` is true. ``optimizer.groups`` may say
    otherwise, and give weights an optimizer of their own.

    Args:
        model: the plain model.
        cfg: the optimizer's keys.
        in_pieces: the trainer that hands weights on in flat pieces, as a key and its value; None if they stay whole.

    Raises:
        RequestError: an optimizer that the user names cannot be built, or does not go with pieces.
    """
    from ortlaunch.trainer.own_optimizers import Several, made

    owned: dict[int | None, ParameterGroups] = {}
    for owner, group in _parameter_groups(model, cfg):
        owned.setdefault(owner, []).append(group)
    parts = []
    for owner, groups in owned.items():
        node: Any = cfg if owner is None else cfg.groups[owner]
        target: str | None = getattr(node, "target", None)
        if target is None:
            parts.append(cfg.build(groups))
        else:
            key = "optimizer" if owner is None else f"optimizer.groups.{owner}"
            parts.append(made(target, node.params, groups, cfg.lr, key, in_pieces))
    return parts[0] if len(parts) == 1 else Several(parts)


def freeze(model: nn.Module, cfg: OptimizerConfig) -> None:
    """Keeps the weights from training that a group of ``optimizer.groups`` freezes.

    Raises:
        RequestError: a group matches no parameter, or all of them are frozen.
    """
    for parameter, index in _numbers(model, cfg).items():
        if index is not None and cfg.groups[index].frozen:
            parameter.requires_grad_(False)
    if cfg.groups and not any(parameter.requires_grad for parameter in model.parameters()):
        raise RequestError("optimizer.groups freezes all weights of the model: leave some to train")


def known_state(model: nn.Module, cfg: OptimizerConfig) -> int:
    """Bytes that the optimizer keeps for a plain model, without what classes keep that the user names."""
    return sum(
        one.element_size() * cfg.state_elements(one.shape)
        for owner, group in _parameter_groups(model, cfg)
        for one in group["params"]
        if owner is None
    )


def can_be_fused(groups: ParameterGroups) -> bool:
    """Whether torch's fused kernels take all weights: they take no complex ones."""
    return all(weight.is_floating_point() for group in groups for weight in group["params"])


def _parameter_groups(model: nn.Module, cfg: OptimizerConfig) -> list[tuple[int | None, dict[str, Any]]]:
    """Trainable parameters in groups with and without weight decay, in the model's order; no group is empty.

    Returns:
        The groups, first those of the weights that no group of ``optimizer.groups`` matches. The number of such a group
        stands before each that has an optimizer of its own.
    """
    from torch import nn

    norms = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
    in_norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, norms) or type(module).__name__.endswith("Norm")
        for parameter in module.parameters(recurse=False)
    }

    def is_exempt(name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim < 2 or name.rpartition(".")[2] == "bias" or id(parameter) in in_norms

    numbers = _numbers(model, cfg)
    groups: list[tuple[int | None, dict[str, Any]]] = []
    for index in (None, *range(len(cfg.groups))):
        own = GroupConfig() if index is None else cfg.groups[index]
        decay = cfg.weight_decay if own.weight_decay is None else own.weight_decay
        is_one = cfg.decay_bias_and_norm or own.weight_decay is not None
        mine = [(name, one) for name, one in model.named_parameters() if one.requires_grad and numbers[one] == index]
        for exempt in (False, True):
            chosen = [one for name, one in mine if (is_exempt(name, one) and not is_one) is exempt]
            if chosen:
                group = {"params": chosen, "weight_decay": 0.0 if exempt else decay, "lr": cfg.lr * own.lr_factor}
                groups.append((index if own.target is not None else None, group))
    return groups


def _numbers(model: nn.Module, cfg: OptimizerConfig) -> dict[nn.Parameter, int | None]:
    """The number of the first group of ``optimizer.groups`` that matches each parameter; None if none does.

    Raises:
        RequestError: a group matches no parameter.
    """
    names: dict[nn.Parameter, list[str]] = {}
    # Each name of a weight that has several.
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, []).append(f"{path}.{leaf}" if path else leaf)
    matched = {
        parameter: [index for index, one in enumerate(cfg.groups) if fnmatch.filter(own, one.match)]
        for parameter, own in names.items()
    }
    for index, one in enumerate(cfg.groups):
        if not any(index in found for found in matched.values()):
            some = ", ".join(name for own in list(names.values())[:_SHOWN] for name in own)
            raise RequestError(
                f"optimizer.groups.{index}.match={one.match} matches no parameter of the model: its names are {some} …"
            )
    return {parameter: found[0] if found else None for parameter, found in matched.items()}


@contextlib.contextmanager
def settings_kept(optimizer: Optimizer, scheduler: LambdaLR | None) -> Iterator[None]:
    """Keeps the settings of this run while the state of both is loaded from a checkpoint.

    A checkpoint also holds the settings of the run that wrote it: the peak of the learning rate and its present value,
    weight decay, and the kernel. With them, the keys that a resume changes would have no effect. Without a schedule of
    the run's own, the optimizer is a script's, which has no keys.
    """
    if scheduler is None:
        yield
        return
    from ortlaunch.trainer.own_optimizers import parts_of

    # torch's own optimizers change nothing in their groups. Others may keep state there, as Prodigy does.
    settings = [
        {
            name: value
            for name, value in group.items()
            if name in _ALWAYS_SETTINGS
            or (type(part).__module__.startswith("torch.optim.") and name not in ("params", "lr"))
        }
        for part in parts_of(optimizer)
        for group in part.param_groups
    ]
    peaks = list(scheduler.base_lrs)
    yield
    scheduler.base_lrs = peaks
    rates = [peak * ratio(scheduler.last_epoch) for peak, ratio in zip(peaks, scheduler.lr_lambdas, strict=True)]
    for group, own, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update(own, lr=rate)
    scheduler._last_lr = rates


def masks_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the optimizer's kernel can skip a step by a flag on the device."""
    return device.type == "cuda" and bool(optimizer.defaults.get("fused"))


def step_if(optimizer: Optimizer, finite: torch.Tensor, *, on_device: bool) -> None:
    """Steps if `finite` is true, and leaves weights and state as they are if not.

    Args:
        optimizer: the optimizer, its gradients in place and unscaled.
        finite: boolean scalar on the device.
        on_device: the result of `masks_on_device`; if false, the host reads the flag, which costs nothing on the CPU.
    """
    if on_device:
        # The fused kernels' own attributes, by which torch's GradScaler skips steps.
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(finite):
        optimizer.step()


def _start_momentum(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Starts the momentum of each parameter that has a gradient for the first time with zeros.

    The first update is then the gradient, as in torch. The fused kernel itself starts all parameters in one step: it
    raises an error if some get their first gradient later, and if that step is skipped for gradients that are not
    finite, it leaves memory that nothing has been written to as their momentum.
    """
    import torch

    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"]:
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
