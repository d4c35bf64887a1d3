"""Models under ORTModule beside their eager twins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from ortlaunch.config.schema import OrtConfig, OrtZero3
from ortlaunch.ort import session
from ortlaunch.ort.tracing import decisions
from ortlaunch.trainer.wrapping import wrap_backend

Wrap = Callable[..., torch.nn.Module]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a function with many cases, each under two kinds of kernels or of ZeRO 3, CI has one case of the second."""
    of_both: dict[tuple[Any, str], list[pytest.Item]] = {}
    firsts = set()
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        for name, second in (("torch_kernels", False), ("zero3", OrtZero3.hold)):
            if name in params and params[name] == second:
                of_both.setdefault((item.function, name), []).append(item)
            elif name in params:
                firsts.add((item.function, name))
    for key, (_, *others) in of_both.items():
        for item in others if key in firsts else ():
            item.add_marker("nightly")


@pytest.fixture(autouse=True)
def decisions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's run does not stop the models of later tests at the decisions that they change."""
    monkeypatch.setattr(decisions, "_enforced", False)
    for noted in ("_unverified", "_unverified_in_evaluation"):
        monkeypatch.setattr(decisions, noted, [])


@pytest.fixture
def torch_kernels() -> bool:
    """Whether PyTorch's CPU kernels are used; a file that tests with and without them overrides this."""
    return True


@pytest.fixture
def wrap(tmp_path: Path) -> Wrap:
    """Wraps a model itself, as a run does."""
    return lambda model: wrap_backend(model, OrtConfig(), threads=1, onnx_dir=tmp_path)


@pytest.fixture
def to_ort(tmp_path: Path, torch_kernels: bool) -> Wrap:
    """Wraps a copy of a model, so that the model itself stays the eager twin."""

    def wrap(model: torch.nn.Module, cfg: OrtConfig | None = None) -> torch.nn.Module:
        chosen = cfg or OrtConfig(torch_kernels=torch_kernels)
        return session.wrap(copy.deepcopy(model), chosen, threads=2, onnx_dir=tmp_path / "onnx")

    return wrap


@pytest.fixture
def assert_parity(to_ort: Wrap) -> Callable[..., torch.nn.Module]:
    """Checks loss and every gradient under ORTModule against eager, over several batches."""

    def check(eager: torch.nn.Module, *batches: Mapping[str, Any], tolerance: float = 2e-6) -> torch.nn.Module:
        ort = to_ort(eager)
        for batch in batches:
            losses = []
            for model in (eager, ort):
                model.zero_grad()
                losses.append(loss_of(model(**batch)))
                losses[-1].backward()
            torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance)
            of_ort = {name: parameter.grad for name, parameter in ort.named_parameters()}
            of_eager = {name: parameter.grad for name, parameter in eager.named_parameters()}
            assert {n for n, g in of_ort.items() if g is not None} == {n for n, g in of_eager.items() if g is not None}
            # Relative to the largest: a key's bias, say, has no gradient but rounding errors.
            largest = max(float(g.abs().max()) for g in of_eager.values() if g is not None)
            for name, gradient in of_eager.items():
                if gradient is not None:
                    error = float((of_ort[name] - gradient).abs().max())
                    assert error <= tolerance * largest, f"{name}: {error / largest:.1e}"
        assert session.is_active(ort)
        return ort

    return check


def loss_of(output: Any) -> torch.Tensor:
    """A scalar of which every output value has its own share."""
    if isinstance(output, torch.Tensor):
        weights = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
        return (output * output * weights).sum()
    if isinstance(output, tuple | list):
        return torch.stack([loss_of(value) for value in output if value.is_floating_point()]).sum()
    return output.loss


def operators(folder: Path) -> set[str]:
    """What the nodes of a saved training graph compute, and which of torch's operators they call."""
    graph = onnx.load(str(next(folder.glob("*execution_model_training.onnx")))).graph
    called = {one.s.decode() for node in graph.node for one in node.attribute if one.name == "operator"}
    return called | {node.op_type for node in graph.node}
