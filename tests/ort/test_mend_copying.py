"""copy.deepcopy of a model under ORTModule."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Fallback, ModelConfig, OrtConfig
from ortlaunch.models.registry import build_model
from ortlaunch.ort import session
from tests.ort.precise import assert_model_as_in_fp64


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_copy_gives_the_same_and_trains_on_its_own(to_ort: Any, when: str) -> None:
    ort, x = to_ort(build_model(ModelConfig(name="mlp"))), torch.rand(3, 64)
    if when == "after":
        ort(x).sum().backward()
    duplicate = copy.deepcopy(ort)
    assert type(duplicate) is type(ort)
    assert list(duplicate.state_dict()) == list(ort.state_dict())
    torch.testing.assert_close(duplicate(x), ort(x))
    kept = ort(x).detach().clone()
    optimizer = torch.optim.SGD(duplicate.parameters(), lr=0.1)
    duplicate(x).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(ort(x), kept)
    assert not torch.allclose(duplicate(x), kept)
    assert session.is_active(duplicate)


def test_a_copy_keeps_the_mode_of_every_module_and_its_place_in_a_larger_one(to_ort: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    ort = to_ort(model)
    ort.module[1].eval()
    outer = copy.deepcopy({"model": ort, "again": ort})
    assert outer["model"] is outer["again"]
    assert (outer["model"].training, outer["model"].module[1].training) == (True, False)


def test_a_pickled_model_trains_as_in_fp64(to_ort: Any) -> None:
    """ORTModule of onnxruntime 1.19.2 looks for attributes that it has on a GPU only."""

    def pickled(model: torch.nn.Module) -> torch.nn.Module:
        ort = to_ort(model)
        ort(torch.rand(2, 4)).sum().backward()
        ort.zero_grad()
        restored: torch.nn.Module = pickle.loads(pickle.dumps(ort))
        assert [m.training for m in restored.modules()] == [m.training for m in ort.modules()]
        return restored

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Dropout(0.5).eval())
    assert_model_as_in_fp64(pickled, model, torch.rand(2, 4), torch.rand(3, 4))


def test_a_pickled_model_needs_a_process_that_uses_ort(to_ort: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ort = to_ort(torch.nn.Linear(4, 4))
    text = pickle.dumps(ort)
    monkeypatch.delattr(type(ort), "__reduce__")
    with pytest.raises(RequestError, match="pickled under backend=ort"):
        pickle.loads(text)


class Keeping(torch.nn.Module):
    """Has a hook that keeps what forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.kept: dict[str, torch.Tensor] = {}
        self.first.register_forward_hook(lambda _module, _inputs, output: self.kept.update(output=output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))) + self.kept.pop("output")


def test_a_hook_may_be_a_closure_of_the_model() -> None:
    """ORTModule runs a copy first, whose hook keeps it in the original."""
    results = []
    for is_ort in (False, True):
        torch.manual_seed(0)
        model = Keeping()
        used = session.wrap(model, OrtConfig(), threads=1, onnx_dir=None) if is_ort else model
        output = used(torch.randn(3, 4))
        output.square().sum().backward()
        results.append([output, *(parameter.grad for parameter in model.parameters())])
        assert not is_ort or session.is_active(used)
    torch.testing.assert_close(*results)


def test_what_fell_back_can_be_copied_too(to_ort: Any) -> None:
    class Unsupported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0e(self.linear(x))

    ort, x = to_ort(Unsupported(), OrtConfig(fallback=Fallback.warn)), torch.rand(2, 4)
    torch.testing.assert_close(copy.deepcopy(ort)(x), ort(x))
