"""Weights that a run leaves behind, read by others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

SMALL = ("model=gpt2_nano", "model.params.n_layer=2", "data.seq_len=32", "train.batch_size=2", "tracking=none")
SHORT = ("backend=eager", "train.steps=4", "train.checkpoint_every=4", "train.log_every=1")
KINDS = {
    "ddp": ("trainer=ddp",),
    "ort": ("trainer=ddp", "backend=ort"),
    **{f"zero{stage}": ("trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in (0, 3)},
    "zero3-ort": ("trainer=deepspeed", "trainer.zero_stage=3", "backend=ort"),
    "zero2-bf16": ("trainer=deepspeed", "trainer.zero_stage=2", "train.precision=bf16"),
}

# What follows runs without ortlaunch, which is made impossible to import.
READER = """
    import json, sys
    sys.modules["ortlaunch"] = None
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    other = AutoModelForCausalLM.from_pretrained(sys.argv[2])
    torch.manual_seed(0)
    ids = torch.randint(256, (2, 32))
    same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
    print(json.dumps({
        "loss": float(model(input_ids=ids, labels=ids).loss), "same": same,
        "dtypes": sorted({str(value.dtype) for value in model.state_dict().values()}),
        "names": sorted(name for name, _ in model.named_parameters()),
    }))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


def read(folder, *paths):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READER), *map(str, paths)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_read_by_transformers_alone(launch, folder, kind):
    """What the run leaves, and what is exported from its last checkpoint, are the same model to the bit."""
    result = launch(folder, *SMALL, *SHORT, *KINDS[kind])
    assert result.returncode == 0, result.report
    exported = launch(folder, "export", "weights", str(result.run_dir), "--out", str(folder / f"out-{kind}"))
    assert exported.returncode == 0, exported.report
    assert "weights after step 4" in exported.stdout
    assert exported.stderr == ""
    left = result.run_dir / "weights"
    found = read(folder, left, folder / f"out-{kind}")
    assert (left / "model.safetensors").stat().st_mode & 0o777 == (left / "config.json").stat().st_mode & 0o777
    assert found["same"]
    assert found["dtypes"] == ["torch.float32"]
    assert not any("module." in name or "_torch_module" in name for name in found["names"])
    if kind == "ddp":
        over = launch(folder, "export", "weights", str(result.run_dir))
        assert over.returncode == 2 and f"{left} is not empty" in over.stderr
    if kind in ("ddp", "zero3"):  # Of one piece, and gathered: another run begins with what was learnt.
        words = (*KINDS[kind], f"model.weights={left}", "train.steps=1", "optimizer.lr=1e-9")
        again = launch(folder, *SMALL, *SHORT, *words)
        assert again.returncode == 0, again.report
        assert again.losses[1] < result.losses[1] - 0.1


def test_weights_of_another_shape_are_refused(launch, folder):
    result = launch(folder, *SMALL, *SHORT, "train.checkpoint_every=null")
    assert result.returncode == 0, result.report
    words = (*SMALL, *SHORT, f"model.weights={result.run_dir / 'weights'}")
    wider = launch(folder, *words, "model.params.n_embd=64")
    deeper = launch(folder, *words, "model.params.n_layer=3")
    assert (wider.returncode, deeper.returncode) == (2, 2)
    assert "transformer.h.0.ln_1.bias: (128,) there, (64,) in the model" in wider.stderr
    assert "there is no transformer.h.2." in deeper.stderr
    nothing = launch(folder, "export", "weights", str(result.run_dir), "--out", str(folder / "nothing"))
    assert nothing.returncode == 2
    assert "no complete checkpoint" in nothing.stderr
    assert f"the weights at the run's end are in {result.run_dir / 'weights'}" in nothing.stderr


def test_a_model_of_ones_own_is_plain_safetensors(launch, folder):
    from safetensors.torch import load_file

    result = launch(folder, "model=mlp", "backend=ort", "train.steps=2", "tracking=none")
    assert result.returncode == 0, result.report
    weights = load_file(result.run_dir / "weights" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "fc1.weight": (256, 64),
        "fc1.bias": (256,),
        "fc2.weight": (10, 256),
        "fc2.bias": (10,),
    }
