"""What all optimizers share: which parameters decay, what a resumed run sets itself, and steps that are skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ortlaunch.config.schema import OptimizerConfig, ParameterGroups

_ALWAYS_SETTINGS = ("initial_lr", "weight_decay")
"""What a parameter group of any optimizer has from the configuration alone."""

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
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
    in_norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")
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
def settings_kept(optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> Iterator[None]:
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


def masks_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the optimizer's kernel can skip a step by a flag on the device."""
    return device.type == "cuda" and bool(optimizer.defaults.get("fused"))


def step_if(optimizer: torch.optim.Optimizer, finite: torch.Tensor, *, on_device: bool) -> None:
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
