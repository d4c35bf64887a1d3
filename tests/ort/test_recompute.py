"""Activation checkpointing: ORTModule's memory optimizer under ORT, the model's own elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import CompileConfig, EagerConfig, ModelConfig, OrtConfig, OrtDebugConfig, TrainConfig
from ortlaunch.models.registry import build_model
from ortlaunch.trainer.wrapping import wrap_backend

_LEVEL = "ORTMODULE_MEMORY_OPT_LEVEL"


def gpt(dropout: float = 0.2) -> torch.nn.Module:
    torch.manual_seed(0)
    params = {"vocab_size": 32, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return build_model(
        ModelConfig(name="gpt2_nano", params={**params, "resid_pdrop": dropout, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    )


def losses(model: torch.nn.Module) -> list[float]:
    ids = torch.arange(64).reshape(2, 32) % 32
    torch.manual_seed(3)
    seen = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        seen.append(loss.item())
    return seen


def wrapped(recompute: bool, folder: Path, torch_kernels: bool, dropout: float) -> torch.nn.Module:
    cfg = OrtConfig(torch_kernels=torch_kernels, debug=OrtDebugConfig(save_onnx=True))
    return wrap_backend(
        gpt(dropout), cfg, threads=1, onnx_dir=folder, train=TrainConfig(activation_checkpointing=recompute)
    )


@pytest.mark.parametrize("torch_kernels", [True, False])
def test_ort_recomputes_to_the_same_losses(
    torch_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_LEVEL, "2")
    # ONNX Runtime's own dropout draws other masks in another graph; PyTorch's draws the same.
    dropout = 0.2 if torch_kernels else 0.0
    kept = losses(wrapped(False, tmp_path / "kept", torch_kernels, dropout))
    again = losses(wrapped(True, tmp_path / "again", torch_kernels, dropout))
    assert again == pytest.approx(kept, abs=1e-6)
    assert recomputed(tmp_path / "kept") == []
    assert recomputed(tmp_path / "again")


def test_recomputed_dropout_of_orts_own_drops_what_the_first_did(tmp_path: Path) -> None:
    losses(wrapped(True, tmp_path, False, 0.2))
    again = recomputed(tmp_path)
    seeds = {node.name: node.attribute[0].i for node in nodes(tmp_path) if node.op_type == "Dropout"}
    pairs = [(seeds[name.removesuffix("_recompute")], seeds[name]) for name in again if name in seeds]
    assert len(pairs) == 4
    assert all(first == second for first, second in pairs)
    assert len({first for first, _ in pairs}) == 4


def recomputed(folder: Path) -> list[str]:
    """Names of the nodes that the graphs compute a second time."""
    return [node.name for node in nodes(folder) if node.name.endswith("_recompute")]


def nodes(folder: Path) -> list[onnx.NodeProto]:
    graphs = [onnx.load(path, load_external_data=False).graph for path in folder.glob("*execution_model_training.onnx")]
    assert graphs
    return [node for graph in graphs for node in graph.node]


def test_no_level_is_left_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_LEVEL, "2")
    wrapped(True, tmp_path, True, 0.0)
    assert _LEVEL not in os.environ


@pytest.mark.parametrize("cfg", [EagerConfig(), CompileConfig()])
def test_other_backends_have_the_model_do_it(cfg: EagerConfig | CompileConfig) -> None:
    train = TrainConfig(activation_checkpointing=True)
    if isinstance(cfg, CompileConfig) and torch.__version__.startswith("2.6."):
        with pytest.raises(RequestError, match="cannot compile the models of the installed transformers"):
            wrap_backend(gpt(), cfg, threads=1, onnx_dir=None, train=train)
        return
    model = wrap_backend(gpt(), cfg, threads=1, onnx_dir=None, train=train)
    assert model.is_gradient_checkpointing
    if isinstance(cfg, EagerConfig):
        assert losses(model) == pytest.approx(losses(gpt()), abs=1e-6)
    assert not wrap_backend(gpt(), cfg, threads=1, onnx_dir=None).is_gradient_checkpointing


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_a_model_that_cannot_says_so(name: str) -> None:
    train = TrainConfig(activation_checkpointing=True)
    with pytest.raises(RequestError, match=r"train\.activation_checkpointing: .*train\.grad_accumulation"):
        wrap_backend(build_model(ModelConfig(name=name)), EagerConfig(), threads=1, onnx_dir=None, train=train)
