"""Every model of ours, small, as an ONNX file: what the plain exporter makes of it runs and equals PyTorch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ortlaunch.cli import dispatch
from ortlaunch.export.record import load_record

FAMILIES = {
    "mlp": (),
    "resnet": (),
    "vit": (),
    "gpt2_nano": ("model.params.n_layer=1", "data.seq_len=16"),
    "gpt2": ("model.params.n_layer=1", "model.params.n_embd=32", "model.params.n_head=2", "data.seq_len=16"),
    "bert": ("model.params.num_hidden_layers=1", "model.params.hidden_size=24", "data.seq_len=16"),
    "llama": ("model.params.num_hidden_layers=1", "data.seq_len=16"),
}
VERBS = ("inference", "onnx", "artifacts")
IN_CI = {*((name, "inference") for name in FAMILIES if name != "gpt2"), ("gpt2_nano", "artifacts")}


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        pytest.param(*case, marks=[] if case in IN_CI else [pytest.mark.nightly])
        for case in itertools.product(FAMILIES, VERBS)
    ],
)
def test_a_model_of_ours_is_exported(name: str, verb: str, tmp_path: Path) -> None:
    """The export compares the file with PyTorch on batches of several sizes, and fails where they differ."""
    out = tmp_path / "out"
    assert dispatch(["export", verb, f"model={name}", *FAMILIES[name], f"out={out}"]) == 0
    assert load_record(out, verb).files
    assert (out / "model.onnx").stat().st_size > 1000
