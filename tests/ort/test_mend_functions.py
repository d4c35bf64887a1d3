"""Custom autograd.Function: right, or refused by name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Allow, Fallback, OrtConfig
from ortlaunch.models.task import make_task
from ortlaunch.ort import compat, session
from ortlaunch.ort.verify.start import QuickCheck
from tests.ort.precise import assert_model_as_in_fp64

pytestmark = pytest.mark.filterwarnings("ignore")
RUNS_FUNCTIONS = compat.supports_custom_autograd()


class Sine(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Product(Function):
    """In the newer style, with a number beside the tensors, and two outputs."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x * y * factor, x + factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.factor = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, y = ctx.saved_tensors
        return grad * y * ctx.factor + other, grad * x * ctx.factor, None


class Rounded(Function):
    """Straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Reversed(Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class Scaled(Reversed):
    """Inherits its forward."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 0.1 * grad


class Clamped(Function):
    """Its backward differs only from inputs beyond 3 on, which the first batch does not have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-3, 3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Nearest(Function):
    """Takes the nearest row of a table, and says which one it is, in the order in which they are not made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        which = torch.cdist(x, table).argmin(1)
        ctx.save_for_backward(which, table)
        ctx.mark_non_differentiable(which)
        return table[which], which

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        which, table = ctx.saved_tensors
        return grad, torch.zeros_like(table).index_add(0, which, grad)


class Learned(Function):
    """A step size that is learnt, with a constant beside it."""

    @staticmethod
    def forward(x: torch.Tensor, step: torch.Tensor, most: int) -> torch.Tensor:
        return (x / step).round().clamp(-most, most) * step

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, step, ctx.most = inputs
        ctx.save_for_backward(x, step)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, step = ctx.saved_tensors
        inside = ((x / step).abs() <= ctx.most).to(x.dtype)
        return grad * inside, (((x / step).round() - x / step) * inside * grad).sum(), None


class Noisy(Function):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class InPlace(Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.round_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class OfAnother(Function):
    """Takes a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Mixed(Function):
    """Has two results with gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sign(), x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return grad + other


class Clipped(Function):
    """Limits the sum of the gradients of its results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sign(), x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (grad + other).clamp(-0.1, 0.1)


class Swapped(Function):
    """Makes its results in another order than it returns them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x * 2, x + 1
        return second, first

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return grad + 2 * other


class WithoutFirst(Function):
    """Its backward counts on a first output that nothing uses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x + 1, x * 2

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
        assert first is None, "first"
        return second * 2


class Identity(Function):
    """Returns its input as it is, which torch then wraps with gradients off; Megatron has such Functions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Both(Function):
    """Two inputs as they are, in the newer style."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, other


class Detaching(Function):
    """Detaches where gradients are off anyway."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Squared(Function):
    """Detaches before its operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.detach(x).square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class Stopping(Function):
    """Stops the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


class Switching(Function):
    """Switches gradients on within its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with torch.enable_grad():
            square = x * x
        return (square * 1.0).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 * ctx.saved_tensors[0]


def beside_no_grad(function: Any) -> Any:
    """A Function under ``no_grad``, whose operators must get no gradient, beside one that gets one."""

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            still = function(x)
        return x * still + function(x)

    return call


def nearest(x: torch.Tensor) -> torch.Tensor:
    rows, which = Nearest.apply(x, x[:2] * 2)
    return rows * (1 + which[:, None])


@torch.jit.script
def scripted_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = x + bias
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))


class FusedGelu(Function):
    """GELU with a bias, by scripted functions, as Megatron has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        return scripted_gelu(x, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, bias = ctx.saved_tensors
        y = x + bias
        tanh = torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y))
        slope = 0.5 * y * ((1 - tanh * tanh) * (0.79788456 + 0.1070322243 * y * y)) + 0.5 * (1 + tanh)
        return slope * grad, (slope * grad).sum_to_size(bias.shape)


class Net(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(0.9 * self.first(x)))


RIGHT = {
    "Sine": Sine.apply,
    "Product": lambda x: sum(Product.apply(x, x.tanh(), 0.7)),
    "Identity": Identity.apply,
    "Identity of the input": lambda x: Identity.apply(x) * x,
    "Both": lambda x: torch.mul(*Both.apply(x, x.tanh())),
    "Switching": Switching.apply,
    "Swapped": lambda x: torch.sub(*Swapped.apply(x)),
    "Sine under no_grad": beside_no_grad(Sine.apply),
    "Identity under no_grad": beside_no_grad(Identity.apply),
}
DETACHING = {
    "Detaching": lambda x: Detaching.apply(x, "name"),
    "Detaching beside detach": lambda x: Detaching.apply(x, "name") * x.detach().tanh(),
    "Detaching twice": lambda x: Detaching.apply(Detaching.apply(x, "first").sin(), "second"),
    "Detaching under no_grad": beside_no_grad(lambda x: Detaching.apply(x, "name")),
    "Squared": Squared.apply,
    "Stopping": lambda x: Stopping.apply(x) * x,
}
REENTRANT = {"checkpoint": lambda x: checkpoint(lambda y: y.sin(), x, use_reentrant=True)}
OF_THEIR_OWN = {
    "Rounded": Rounded.apply,
    "Reversed": Reversed.apply,
    "Clamped": Clamped.apply,
    "Scaled": Scaled.apply,
    "Nearest": nearest,
    "Learned": lambda x: Learned.apply(x, x.abs().mean(), 2) + Learned.apply(x, x[0, 0], 3),
    "Mixed": lambda x: torch.mul(*Mixed.apply(x * 3)),
    "one of Mixed": lambda x: Mixed.apply(x * 3)[1],
    "Rounded under no_grad": beside_no_grad(Rounded.apply),
}
NO_CALLS = {
    "Noisy": (Noisy.apply, "draws random numbers"),
    "InPlace": (InPlace.apply, "changes its arguments"),
    "OfAnother": (lambda x: OfAnother.apply(x, torch.round), "takes something else than tensors"),
    "Clipped": (lambda x: torch.mul(*Clipped.apply(x)), "gives gradients for several outputs that are not the sum"),
}


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.rand(3, 4)}, {"x": torch.rand(5, 4)}]


def named(functions: dict[str, Any]) -> list[Any]:
    """The names of functions as parameters of a test."""
    flows = pytest.mark.xfail(RUNS_FUNCTIONS, reason="ORTModule gives a Function gradients under no_grad too")
    return [pytest.param(name, marks=[flows] if "no_grad" in name else []) for name in functions]


@pytest.mark.parametrize("name", named(RIGHT))
def test_functions_whose_backward_is_their_derivative_train(assert_parity: Any, name: str) -> None:
    assert_parity(Net(RIGHT[name]), *batches())


@pytest.mark.parametrize("name", named(DETACHING))
def test_functions_that_detach_in_their_forward_train_as_in_fp64(to_ort: Any, name: str) -> None:
    """On torch from 2.7 on onnxruntime 1.19.2 gets the forward's operators, where aten::detach stops the gradient."""
    assert_model_as_in_fp64(to_ort, Net(DETACHING[name]), *(batch["x"] for batch in batches()))


def test_scripted_functions_of_a_function_train_as_in_fp64(to_ort: Any) -> None:
    """torch's exporter leaves a prim::CallFunction in the graph, which onnxruntime 1.19.2 does not have."""

    class Fused(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.function(self.first(x), self.first.bias))

    assert_model_as_in_fp64(to_ort, Fused(FusedGelu.apply), *(batch["x"] for batch in batches()))


@pytest.mark.parametrize("outputs", [1, 2])
def test_checkpoints_of_deepspeed_train_as_in_fp64(to_ort: Any, outputs: int) -> None:
    checkpointing = pytest.importorskip("deepspeed").checkpointing
    layer = torch.nn.Linear(4, 4)

    class Checkpointed(Net):
        def __init__(self) -> None:
            super().__init__(self._checkpointed)
            self.inner = layer

        def _checkpointed(self, x: torch.Tensor) -> torch.Tensor:
            if outputs == 1:
                return checkpointing.checkpoint(self.inner, x)
            return torch.mul(*checkpointing.checkpoint(lambda y: (self.inner(y), y.sin()), x))

    original = checkpointing.CheckpointFunction.apply
    assert_model_as_in_fp64(to_ort, Checkpointed(), *(batch["x"] for batch in batches()))
    assert checkpointing.CheckpointFunction.apply == original


@pytest.mark.skipif(RUNS_FUNCTIONS, reason="ORTModule itself refuses reentrant checkpoints where it runs Functions")
def test_reentrant_checkpoints_train(assert_parity: Any) -> None:
    assert_parity(Net(REENTRANT["checkpoint"]), *batches())


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_functions_with_a_backward_of_their_own_train(assert_parity: Any, name: str) -> None:
    if RUNS_FUNCTIONS and name not in ("Rounded", "Reversed", "Clamped"):
        pytest.skip("ORTModule takes no Function that inherits from another, and gives gradients under no_grad")
    original = Function.apply.__func__
    assert_parity(Net(OF_THEIR_OWN[name]), *batches())
    # Nothing of the search stays behind.
    assert Function.apply.__func__ is original
    assert "forward" not in Scaled.__dict__
    x = torch.ones(2, requires_grad=True)
    Scaled.apply(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.skipif(RUNS_FUNCTIONS, reason="with this torch ORTModule runs them")
@pytest.mark.parametrize("name", NO_CALLS)
def test_functions_that_a_graph_cannot_call_are_refused_by_name(to_ort: Any, name: str) -> None:
    function, why = NO_CALLS[name]
    with pytest.raises(RequestError, match=rf"{__name__}\.{name} .*test_mend_functions\.py:\d+.*{why}.*backend=eager"):
        to_ort(Net(function))(torch.rand(3, 4))


@pytest.mark.skipif(RUNS_FUNCTIONS, reason="with this torch ORTModule runs them")
def test_a_graph_that_calls_a_function_is_kept_for_no_other_process(to_ort: Any) -> None:
    ort = to_ort(Net(Rounded.apply), OrtConfig(export_cache=True))
    ort(torch.rand(3, 4))
    assert session.export_origins(ort) == ["not stored: the graph calls a custom autograd.Function of this process"]


@pytest.mark.skipif(RUNS_FUNCTIONS, reason="with this torch ORTModule runs them")
def test_a_backward_that_fails_when_every_output_has_a_gradient_is_refused_by_name(to_ort: Any) -> None:
    model = Net(lambda x: WithoutFirst.apply(x)[1])
    model(torch.rand(3, 4)).sum().backward()
    with pytest.raises(RequestError, match=r"WithoutFirst .*outputs has a gradient \(AssertionError: first"):
        to_ort(model)(torch.rand(3, 4))


@pytest.mark.skipif(RUNS_FUNCTIONS, reason="with this torch ORTModule runs them")
def test_functions_of_ortmodules_subscribers_are_refused_by_name(to_ort: Any, tmp_path: Path) -> None:
    """Subscribers of onnxruntime-training 1.19.2 record activations by a Function, which detaches its input."""
    from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber

    model = Net(torch.sin)
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(tmp_path / "statistics"))])
    with pytest.raises(RequestError, match=r"_statistics_subscriber\._InspectActivation .*backend=eager"):
        to_ort(model)(torch.rand(3, 4))


@pytest.mark.skipif(RUNS_FUNCTIONS, reason="with this torch ORTModule runs them")
def test_with_fallback_allowed_pytorch_runs_them(to_ort: Any) -> None:
    eager = Net(lambda x: torch.mul(*Clipped.apply(x)))
    ort, x = to_ort(eager, OrtConfig(fallback=Fallback.warn)), torch.rand(3, 4)
    for model in (eager, ort):
        model(x).square().sum().backward()
    torch.testing.assert_close(ort.first.weight.grad, eager.first.weight.grad)
    assert not session.is_active(ort)
    assert "Clipped" in session.fallback_reason(ort)


def test_a_function_behind_frozen_inputs_needs_no_gradient(assert_parity: Any) -> None:
    model = Net(Rounded.apply)
    model.first.requires_grad_(False)
    assert_parity(model, *batches())


class Column(torch.nn.Module):
    """Its Function takes a column and one number of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product, moved = Product.apply(x.view(8, -1), self.bias[0], 2.0)
        return (moved + self.bias).sin() + product


@pytest.mark.skipif(RUNS_FUNCTIONS, reason="ORTModule itself gives such an input a wrong gradient")
def test_an_input_beside_a_weight_may_be_broadcast_to_it(to_ort: Any) -> None:
    """A Function's results seem to need gradients, also of inputs that need none; the weight gives the shape here."""
    assert_model_as_in_fp64(to_ort, Column(), torch.rand(8), torch.rand(8))


@pytest.mark.skipif(not RUNS_FUNCTIONS, reason="with this torch such an input has its gradient")
def test_an_input_that_a_function_broadcasts_is_refused_at_the_start_of_a_run(to_ort: Any) -> None:
    class Net(Column):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = super().forward(x)
            return {"loss": (outputs.sum(0) * labels).sum(), "logits": outputs}

    model, data = Net(), [{"x": torch.rand(8), "labels": torch.rand(8)} for _ in range(3)]
    check = QuickCheck(to_ort(model), make_task(model, data[0]), contextlib.nullcontext)
    assert [found.kind for found in check.findings(data)] == [Allow.wrong_gradients]
