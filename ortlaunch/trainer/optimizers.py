"""The optimizers: the options of ``optimizer``, how they group parameters, and what a resumed run sets itself.

The launcher reads the options, so torch is imported in functions alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ortlaunch.base.errors import RequestError
from ortlaunch.config.bounds import number
from ortlaunch.config.options import option
from ortlaunch.config.schema import DeviceOptimizer, OptimizerConfig, ParameterGroups

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

_ALWAYS_SETTINGS = ("initial_lr", "weight_decay")
"""What a parameter group of any optimizer has from the configuration alone."""


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


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> Optimizer:
    """The optimizer over all parameters of `model` that require gradients, fused if torch has a fused version.

    Biases, the weights of normalization layers and other parameters with fewer than two dimensions form a group of
    their own without weight decay, unless ``optimizer.decay_bias_and_norm`` is true.
    """
    return cfg.build(parameter_groups(model, cfg))


def can_be_fused(groups: ParameterGroups) -> bool:
    """Whether torch's fused kernels take all weights: they take no complex ones."""
    return all(weight.is_floating_point() for group in groups for weight in group["params"])


def parameter_groups(model: nn.Module, cfg: OptimizerConfig) -> ParameterGroups:
    """Trainable parameters in groups with and without weight decay, in the model's order; no group is empty."""
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if cfg.decay_bias_and_norm:
        return [{"params": [parameter for _, parameter in trainable], "weight_decay": cfg.weight_decay}]
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

    groups: ParameterGroups = []
    for exempt, decay in ((False, cfg.weight_decay), (True, 0.0)):
        chosen = [parameter for name, parameter in trainable if is_exempt(name, parameter) is exempt]
        if chosen:
            groups.append({"params": chosen, "weight_decay": decay})
    return groups


@contextlib.contextmanager
def settings_kept(optimizer: Optimizer, scheduler: LambdaLR) -> Iterator[None]:
    """Keeps the settings of this run while the state of both is loaded from a checkpoint.

    A checkpoint also holds the settings of the run that wrote it: the peak of the learning rate and its present value,
    weight decay, and the kernel. With them, the keys that a resume changes would have no effect.
    """
    # torch's own optimizers change nothing in their groups. Others may keep state there, as Prodigy does.
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    settings = [
        {
            name: value
            for name, value in group.items()
            if name in _ALWAYS_SETTINGS or (is_torchs and name not in ("params", "lr"))
        }
        for group in optimizer.param_groups
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
