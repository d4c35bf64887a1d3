"""Operators of ours that ONNX Runtime's ATen node calls: PyTorch kernels in a form that such a node can name.

An ATen node passes tensors, integers and floats, no strings, and takes no booleans back. And ORT asks for the gradient
of a node only where that of its first input is wanted, so weights come first.
"""

from __future__ import annotations

from typing import Any

import torch

MEAN = 1
"""torch's number for the reduction to a mean."""

_libraries: list[torch.library.Library] = []
"""Keeps the operators defined: a library object that is collected takes its operators with it."""


def define() -> None:
    """Defines the operators in this process; harmless to repeat."""
    if _libraries:
        return
    aten = torch.ops.aten
    library = torch.library.Library("ortlaunch", "DEF")
    library.define("gelu_tanh(Tensor self) -> Tensor")
    library.impl("gelu_tanh", lambda x: aten.gelu(x, approximate="tanh"), "CPU")
    library.define("gelu_tanh_backward(Tensor grad_output, Tensor self) -> Tensor")
    library.impl("gelu_tanh_backward", lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"), "CPU")
    library.define("dropout(Tensor self, float p) -> (Tensor, Tensor)")
    library.impl("dropout", _scaled_noise, "CPU")
    # Not functional.linear: under ZeRO 3 an autograd.Function of DeepSpeed's stands there.
    plain_linear = torch._C._nn.linear
    library.define("linear(Tensor weight, Tensor x) -> Tensor")
    library.impl("linear", lambda weight, x: plain_linear(x, weight), "CPU")
    library.define("linear_bias(Tensor weight, Tensor bias, Tensor x) -> Tensor")
    library.impl("linear_bias", lambda weight, bias, x: plain_linear(x, weight, bias), "CPU")
    library.define("linear_grad_x(Tensor grad, Tensor weight) -> Tensor")
    library.impl("linear_grad_x", torch.matmul, "CPU")
    library.define("linear_grad_weight(Tensor grad, Tensor x) -> Tensor")
    library.impl("linear_grad_weight", lambda grad, x: grad.flatten(0, -2).t() @ x.flatten(0, -2), "CPU")
    library.define("grad_bias(Tensor grad) -> Tensor")
    library.impl("grad_bias", lambda grad: grad.flatten(0, -2).sum(0), "CPU")
    library.define("conv1d(Tensor bias, Tensor x, Tensor weight) -> Tensor")
    library.impl("conv1d", lambda bias, x, weight: aten.addmm(bias, x, weight), "CPU")
    library.define("conv1d_grad_x(Tensor grad, Tensor weight) -> Tensor")
    library.impl("conv1d_grad_x", lambda grad, weight: grad @ weight.t(), "CPU")
    library.define("conv1d_grad_weight(Tensor grad, Tensor x) -> Tensor")
    library.impl("conv1d_grad_weight", lambda grad, x: x.t() @ grad, "CPU")
    library.define("cross_entropy(Tensor x, Tensor target, int ignore) -> (Tensor, Tensor, Tensor)")
    library.impl("cross_entropy", _cross_entropy_forward, "CPU")
    library.define(
        "cross_entropy_backward(Tensor grad, Tensor log_p, Tensor total, Tensor target, int ignore) -> Tensor"
    )
    library.impl("cross_entropy_backward", _cross_entropy_backward, "CPU")
    _libraries.append(library)


def _cross_entropy_forward(x: Any, target: Any, ignore: int) -> tuple[Any, Any, Any]:
    log_p = torch.log_softmax(x, dim=-1)
    loss, total = torch.ops.aten.nll_loss_forward(log_p, target, None, MEAN, ignore)
    return loss, log_p, total


def _cross_entropy_backward(grad: Any, log_p: Any, total: Any, target: Any, ignore: int) -> Any:
    of_log_p = torch.ops.aten.nll_loss_backward(grad, log_p, target, None, MEAN, ignore, total)
    return torch.ops.aten._log_softmax_backward_data(of_log_p, log_p, -1, log_p.dtype)


def _scaled_noise(values: Any, p: float) -> tuple[Any, Any]:
    noise = torch.empty_like(values).bernoulli_(1.0 - p).div_(1.0 - p)
    return values * noise, noise
