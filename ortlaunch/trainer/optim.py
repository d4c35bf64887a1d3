"""What all optimizers share: which parameters decay, and a step that is skipped where gradients are not finite."""

from __future__ import annotations

import torch
from torch import nn

from ortlaunch.config.schema import OptimizerConfig, ParameterGroups

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over all parameters of `model` that require gradients, fused if torch has a fused version.

    Biases, the weights of normalization layers and other parameters with fewer than two dimensions form a group of
    their own without weight decay, unless ``optimizer.decay_bias_and_norm`` is true.
    """
    return cfg.build(parameter_groups(model, cfg))


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
