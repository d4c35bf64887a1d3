"""Updates the running statistics of BatchNorm and InstanceNorm under ORTModule.

ORTModule's graph returns outputs and changes no buffers, so the running statistics would change during the trace and
never again. Here every BatchNorm in train mode is exported with the mean and the variance of the batch as further
outputs of the graph. After each training forward the buffers are updated with them as torch does. The trace itself does
not change the buffers. What a checkpoint of activations computes again moves them again, as in PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ortlaunch.ort.operators.aten_nodes import stop_gradient
from ortlaunch.ort.operators.torch_nodes import exact, numbers, torch_node
from ortlaunch.ort.tracing import checkpoints

_MEAN, _VARIANCE = range(2)


@contextlib.contextmanager
def collected(model: torch.nn.Module, is_training: bool) -> Iterator[tuple[list[str], list[Tensor]]]:
    """Stops BatchNorms of `model` in train mode from updating buffers, and collects their names and statistics.

    Args:
        model: the plain model.
        is_training: whether its forward will be differentiated.
    """
    names = {id(module): name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    modules: list[str] = []
    statistics: list[Tensor] = []
    again: list[tuple[str, Tensor, Tensor]] = []
    kept: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
    repeated: set[int] = set()
    original = _BatchNorm.forward

    def forward(self: _BatchNorm, input: Tensor) -> Tensor:
        counts = self.running_mean is not None
        if id(self) not in names:
            return original(self, input)
        if counts and not self.training:
            return _by_running_statistics(self, input) if is_training else original(self, input)
        self._check_input_dim(input)
        output, mean, var = torch.ops.ortlaunch.batch_norm(input, self.weight, self.bias, self.num_features, self.eps)
        if counts:
            modules.append(names[id(self)])
            statistics.extend((mean, var))
            again.extend([(names[id(self)], mean, var)] * (checkpoints.times() - 1))
            kept.append((self._buffers, dict(self._buffers)))
            after = _moved(self, mean, var)
            self._buffers.update(after)
            repeated.update(map(id, after.values()))
        return output

    _BatchNorm.forward = forward  # type: ignore[method-assign]
    try:
        with contextlib.ExitStack() as calls:
            if is_training:
                calls.enter_context(_MovesStatistics(model, repeated))
                calls.enter_context(checkpoints.counted(model, repeated))
            yield modules, statistics
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign]
        for there, before in reversed(kept):
            there.update(before)
        # The backward computes the last checkpoint first.
        for name, mean, var in reversed(again):
            modules.append(name)
            statistics.extend((mean, var))


@torch.no_grad()
def _moved(module: Any, mean: Tensor, var: Tensor) -> dict[str, Tensor | None]:
    """What a forward of a BatchNorm makes of its buffers, for code after it that reads them in the same trace.

    Nothing of it is left in a graph in which no code reads them.
    """
    before = module._buffers
    count = None if before["num_batches_tracked"] is None else before["num_batches_tracked"] + 1
    # PyTorch's BatchNorm without a momentum and without a count does not move them.
    average = 0.0 if count is None else 1.0 / count.to(mean.dtype)
    factor = average if module.momentum is None else module.momentum
    after: dict[str, Tensor | None] = {"num_batches_tracked": count}
    for name, of_batch in (("running_mean", mean), ("running_var", var)):
        running = before[name]
        after[name] = running * (1.0 - factor) + of_batch.detach().to(running.dtype) * factor
    return after


class _MovesStatistics(TorchFunctionMode):
    """Follows calls of ``batch_norm`` by modules with a forward of their own, such as SyncBatchNorm on one worker.

    The operator does not say that it changes the running statistics, and what ONNX Runtime makes of them is biased.

    Attributes:
        repeated: ids of the buffers that are changed as often as PyTorch changes them.
    """

    def __init__(self, model: torch.nn.Module, repeated: set[int]) -> None:
        super().__init__()
        self._counters = {id(one) for name, one in model.named_buffers() if name.endswith("num_batches_tracked")}
        self.repeated = repeated
        repeated |= self._counters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            return self._moving(*args, **kwargs)
        if func is torch.batch_norm:
            x, weight, bias, mean, var, training, momentum, eps, _cudnn = args
            return self._moving(x, mean, var, weight, bias, training, momentum, eps)
        if func is functional.instance_norm:
            return self._moving_instances(*args, **kwargs)
        if func is Tensor.add_ and id(args[0]) in self._counters:
            for _ in range(checkpoints.times() - 1):
                func(*args, **kwargs)
        return func(*args, **kwargs)

    def _moving(
        self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.repeated.update(id(running) for running in (running_mean, running_var) if running is not None)
        return _moving(x, running_mean, running_var, *args, **kwargs)

    def _moving_instances(
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """``torch.nn.functional.instance_norm``; the running statistics move by the means of all instances'."""
        if not use_input_stats and running_mean is not None and running_var is not None:
            return _normalized(x, running_mean, running_var, weight, bias, eps)
        result = functional.instance_norm(x, None, None, weight, bias, use_input_stats, momentum, eps)
        if running_mean is None or running_var is None:
            return result
        self.repeated.update((id(running_mean), id(running_var)))
        with torch.no_grad():
            given = x.detach().to(_statistics_dtype(x.dtype))
            var, mean = torch.var_mean(given, list(range(2, x.dim())))
            _move(((running_mean, mean.mean(0)), (running_var, var.mean(0))), momentum)
        return result


def _moving(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm``, with the changes of the running statistics as operators of their own."""
    if not training and running_mean is not None and running_var is not None:
        return _normalized(x, running_mean, running_var, weight, bias, eps)
    output, mean, var = torch.ops.ortlaunch.batch_norm(x, weight, bias, x.size(1), eps)
    with torch.no_grad():
        _move(((running_mean, mean.detach()), (running_var, var.detach())), momentum)
    result: Tensor = output
    return result


def _move(pairs: tuple[tuple[Tensor | None, Tensor], ...], momentum: float) -> None:
    """Moves running statistics, where they are kept, towards those of a batch; in a checkpoint as often as PyTorch."""
    for running, of_batch in pairs * checkpoints.times():
        if running is not None:
            running.mul_(1.0 - momentum).add_(of_batch.to(running.dtype), alpha=momentum)


def _by_running_statistics(module: Any, x: Tensor) -> Tensor:
    """Computes BatchNorm in eval mode."""
    module._check_input_dim(x)
    return _normalized(x, module.running_mean, module.running_var, module.weight, module.bias, module.eps)


def _normalized(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalizes by given statistics, with operators that ONNX Runtime can differentiate."""
    shape = [-1] + [1] * (x.dim() - 2)
    scale = torch.rsqrt(var + eps)
    scale = scale if weight is None else scale * weight
    offset = -mean * scale
    offset = offset if bias is None else offset + bias
    return x * scale.reshape(shape) + offset.reshape(shape)


def buffers_of(model: torch.nn.Module, modules: Sequence[str]) -> list[str]:
    """Returns the names of the buffers that `update` changes."""
    names = []
    for name in dict.fromkeys(modules):
        there = model.get_submodule(name)._buffers
        kept = (one for one in ("running_mean", "running_var", "num_batches_tracked") if there[one] is not None)
        names += [f"{name}.{one}" if name else one for one in kept]
    return names


@torch.no_grad()
def update(model: torch.nn.Module, modules: list[str], statistics: Sequence[Tensor]) -> None:
    """Updates the running statistics of `model`'s BatchNorm modules as their own forward does, once for each entry.

    Args:
        model: the plain model.
        modules: names of its BatchNorm modules.
        statistics: mean and unbiased variance of the batch, [C] each, alternating.
    """
    for name, mean, var in zip(modules, statistics[::2], statistics[1::2], strict=True):
        module: Any = attrgetter(name)(model) if name else model
        # A module's `__getattr__` takes as long as the arithmetic.
        moved = module._buffers
        if (count := moved["num_batches_tracked"]) is not None:
            count.add_(1)
        factor = 1.0 / float(count) if module.momentum is None else module.momentum
        for running, batch in ((moved["running_mean"], mean), (moved["running_var"], var)):
            running.mul_(1.0 - factor).add_(batch.to(running.dtype), alpha=factor)


def register() -> None:
    """Registers the operator with which a BatchNorm in train mode is exported; repeated calls do nothing."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    register_custom_op_symbolic("ortlaunch::batch_norm", _batch_norm_symbolic, 17)


def _batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, channels: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes a batch; also returns its mean and unbiased variance per channel, as fp32 (fp64 for fp64) [C]."""
    output = torch.nn.functional.batch_norm(input, None, None, weight, bias, training=True, eps=eps)
    axes = [axis for axis in range(input.dim()) if axis != 1]
    var, mean = torch.var_mean(input.to(_statistics_dtype(input.dtype)), axes)
    return output, mean, var


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


_LIBRARY = torch.library.Library("ortlaunch", "FRAGMENT")
_LIBRARY.define(
    "batch_norm(Tensor input, Tensor? weight, Tensor? bias, int channels, float eps) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("batch_norm", _batch_norm, "CompositeExplicitAutograd")


def _batch_norm_symbolic(g: Any, input: Any, weight: Any, bias: Any, channels: Any, eps: Any) -> tuple[Any, Any, Any]:
    from torch.onnx import TensorProtoDataType, _type_utils, symbolic_helper

    channels = symbolic_helper._get_const(channels, "i", "channels")
    dtype = _type_utils.JitScalarType.from_value(input).dtype()
    epsilon = symbolic_helper._get_const(eps, "f", "eps")

    def constant(value: Tensor) -> Any:
        return g.op("Constant", value_t=value)

    weight = constant(torch.ones(channels, dtype=dtype)) if symbolic_helper._is_none(weight) else weight
    bias = constant(torch.zeros(channels, dtype=dtype)) if symbolic_helper._is_none(bias) else bias
    if dtype == torch.float64:
        # ONNX Runtime has no kernel for it.
        output = _normalized_batch(g, input, weight, bias, exact([epsilon]))
        of_batch = (_statistic_of_batch(g, input, which, dims=[channels]) for which in (_MEAN, _VARIANCE))
        return output, *(stop_gradient(g, statistic) for statistic in of_batch)
    # ONNX Runtime may overwrite the running statistics; with momentum 1 their values do not change.
    output, _, _, mean, inverse_std = g.op(
        "com.microsoft::BatchNormInternal",
        input,
        weight,
        bias,
        constant(torch.zeros(channels)),
        constant(torch.ones(channels)),
        epsilon_f=epsilon,
        momentum_f=1.0,
        training_mode_i=1,
        outputs=5,
    )
    # Providers differ in whether their running variance is unbiased. This value has the same meaning in all of them.
    double, result = TensorProtoDataType.DOUBLE, _statistics_dtype(dtype)
    inverse_std = g.op("Cast", inverse_std, to_i=double)
    biased = g.op("Sub", g.op("Reciprocal", g.op("Mul", inverse_std, inverse_std)), constant(_double(epsilon)))
    count = g.op("Cast", g.op("Div", g.op("Size", input), constant(torch.tensor(channels))), to_i=double)
    var = g.op("Div", g.op("Mul", biased, count), g.op("Sub", count, constant(_double(1.0))))
    output.setType(input.type())
    statistics = []
    for value in (mean, var):
        cast = g.op("Cast", value, to_i=_type_utils.JitScalarType.from_dtype(result).onnx_type())
        cast.setType(input.type().with_dtype(result).with_sizes([channels]))
        statistics.append(stop_gradient(g, cast))
    return output, *statistics


@torch_node("Tensor x, Tensor weight, Tensor bias, int[] eps", differentiable=(0, 1, 2))
def _normalized_batch(x: Tensor, weight: Tensor, bias: Tensor, eps: list[int]) -> Tensor:
    (small,) = numbers(eps) or [0.0]
    return functional.batch_norm(x, None, None, weight, bias, training=True, eps=small)


@torch_node("Tensor x, int which", shape=lambda x, _which: [x[1]])
def _statistic_of_batch(x: Tensor, which: int) -> Tensor:
    """Returns the mean or the unbiased variance of each channel."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    return x.mean(axes) if which == _MEAN else x.var(axes)


def _double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
