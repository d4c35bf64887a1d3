"""The model that is exported, and where its weights come from."""

from __future__ import annotations

import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.export import source
from ortlaunch.export.request import Request
from ortlaunch.trainer.weights import save_weights


def test_fresh_weights_and_real_batches(tmp_path) -> None:
    config = to_config(compose(["model=mlp"]))
    found = source.open_source(Request("onnx", config, tmp_path / "out"))
    assert found.weights == "new weights, seed 0"
    assert [list(batch["pixel_values"].shape) for batch in found.batches] == [[4, 1, 8, 8]] * 3
    again = source.open_source(Request("onnx", config, tmp_path / "out"))
    assert torch.equal(found.model.fc1.weight, again.model.fc1.weight)


def test_weights_from_a_folder(tmp_path) -> None:
    config = to_config(compose(["model=mlp"]))
    other = source.built(to_config(compose(["model=mlp", "seed=5"])))
    save_weights(other.state_dict(), other, tmp_path / "weights")
    request = Request("onnx", config, tmp_path / "out", from_weights=tmp_path / "weights")
    assert torch.equal(source.open_source(request).model.fc1.weight, other.fc1.weight)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match=r"no \.safetensors"):
        source.open_source(Request("onnx", config, tmp_path / "out", from_weights=tmp_path / "empty"))


def test_a_run_that_has_left_nothing(tmp_path) -> None:
    config = to_config(compose(["model=mlp"]))
    with pytest.raises(RequestError, match="neither a complete checkpoint nor weights/"):
        source.open_source(Request("onnx", config, tmp_path / "out", from_run=tmp_path))


def test_a_batch_norm_that_averages_over_all_steps_is_refused(tmp_path, monkeypatch) -> None:
    lines = ["from torch import nn", "def build():", "    return nn.Sequential(nn.BatchNorm2d(2, momentum=None))"]
    # A name that no other test gives to a module: it stays among those of the process.
    (tmp_path / "momentum_nets.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError, match="0: a BatchNorm with momentum=None"):
        source.built(to_config(compose(["model=factory", "model.target=momentum_nets:build"])))
