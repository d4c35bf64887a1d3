"""Cross entropy in all of its forms; other losses are in `test_mend_operators`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from ortlaunch.base.errors import TrainingError
from ortlaunch.config.schema import OrtConfig
from ortlaunch.ort import session


@pytest.fixture(params=[True, False], ids=["torch_kernels", "ort_kernels"])
def torch_kernels(request: pytest.FixtureRequest) -> bool:
    """Both, for the GPU has ONNX Runtime's alone."""
    return request.param


class Net(torch.nn.Module):
    """Scales its input by a weight, so that outputs and gradients cover all of the input's range."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(6))
        self.function = function

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        scaled = x * self.scale
        return self.function(scaled) if target is None else self.function(scaled, target)


def values() -> torch.Tensor:
    """From far below to far above, with zero and the limits of relu6 among them."""
    return torch.tensor([[-200.0, -30.0, -14.0, -1.0, 0.0, 1e-6], [6.0, 3.0, 14.0, 20.0, 30.0, 200.0]])


FORMS: dict[str, dict[str, Any]] = {
    "weighted": {"weight": torch.tensor([0.5, 1.0, 2.0, 0.1, 0.3, 0.7])},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "mean": {},
}


@pytest.mark.parametrize(
    ("form", "is_sequence"),
    # The mean over samples is onnxruntime's operator without our kernels; with them, tests of the kernels show it.
    [(form, is_sequence) for form in FORMS for is_sequence in (False, True) if (form, is_sequence) != ("mean", False)],
)
def test_cross_entropy_at_the_limits_of_its_targets(form: str, is_sequence: bool) -> None:
    """Without a target that counts, the mean is NaN; one out of range is an error. Both come after the trace."""
    x, classes = torch.randn(2, 6, *([3] if is_sequence else [])), torch.tensor([1, -100, 4, 0, -100, 5])
    good = classes.view(2, 3) if is_sequence else classes[[0, 2]]

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(x * self.scale, target, **FORMS[form]).sum()

    model = Loss()
    ort = session.wrap(model, OrtConfig(export_cache=False), threads=1, onnx_dir=None)
    ort(x, good)
    for given in (good.flip(0), torch.full_like(good, -100)):
        loss, expected = ort(x, given), model(x, given)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        (mine,), (true,) = (torch.autograd.grad(one, [model.scale]) for one in (loss, expected))
        torch.testing.assert_close(mine, true, equal_nan=True)
    with pytest.raises(TrainingError, match="out of bounds"):
        ort(x, good + 2)


def test_the_cross_entropy_of_one_sample_without_a_batch(assert_parity: Any) -> None:
    def of_one(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x[0] / 100, target[0])

    assert_parity(Net(of_one), {"x": values(), "target": torch.tensor([3, 1])}, tolerance=1e-6)


@pytest.mark.parametrize(
    "choose",
    [
        lambda losses: losses.flatten().topk(3)[0].mean(),
        lambda losses: losses.flatten().sort()[0][2],
        lambda x: x[:, 1:],
    ],
    ids=["largest", "sorted", "cut"],
)
def test_the_losses_of_single_targets_are_chosen_from(
    assert_parity: Any, choose: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def chosen(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return choose(functional.cross_entropy(x.view(-1, 3, 2) / 100, target, reduction="none"))

    target = torch.tensor([[0, 1], [2, 2]])
    assert_parity(Net(chosen), {"x": values(), "target": target}, tolerance=1e-6)


class Criterion(torch.nn.Module):
    """Its loss is a module, which ignores one class."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)
        self.loss = torch.nn.CrossEntropyLoss(ignore_index=0)
        self.by_name = by_name

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.layer(x)
        loss: torch.Tensor = self.loss(input=logits, target=labels) if self.by_name else self.loss(logits, labels)
        return loss


@pytest.mark.parametrize("by_name", [True, False])
def test_how_many_labels_are_ignored_is_no_value_of_the_trace(assert_parity: Any, by_name: bool) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(3, 6), "labels": torch.tensor(labels)} for labels in ([1, 0, 2], [3, 1, 2], [0, 0, 1])]
    ort = assert_parity(Criterion(by_name), *batches, tolerance=1e-5)
    manager = session.training_manager(ort)
    assert manager is not None
    processed = manager._graph_transition_manager._post_export_processed_model_info
    assert processed.module_forward_output_schema.decisions.all == []
