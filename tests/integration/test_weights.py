"""Weights that a run leaves behind, read by others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tests.support.nightly import first_in_ci
from tests.support.ort import runnable

SMALL = ("model=gpt2_nano", "model.params.n_layer=2", "data.seq_len=32", "train.batch_size=2", "tracking=none")
SHORT = ("backend=eager", "train.steps=4", "train.checkpoint_every=4", "train.log_every=1")
# Those of ONNX Runtime under ZeRO 3 are read in test_resume.py, which has such a run.
KINDS = runnable(
    {
        "ddp": ("trainer=ddp",),
        "ort": ("trainer=ddp", "backend=ort"),
        "zero3": ("trainer=deepspeed", "trainer.zero_stage=3"),
        "fsdp-bf16": ("trainer=fsdp", "train.precision=bf16", "train.ema=0.5"),
        "zero2-bf16": ("trainer=deepspeed", "trainer.zero_stage=2", "train.precision=bf16"),
    }
)

# What follows runs without ortlaunch, which is made impossible to import.
READER = """
    import json, sys
    sys.modules["ortlaunch"] = None
    import torch
    from transformers import AutoModelForCausalLM

    def read(left, exported):
        model, other = (AutoModelForCausalLM.from_pretrained(path) for path in (left, exported))
        torch.manual_seed(0)
        ids = torch.randint(256, (2, 32))
        same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
        return {
            "loss": float(model(input_ids=ids, labels=ids).loss), "same": same,
            "dtypes": sorted({str(value.dtype) for value in model.state_dict().values()}),
            "names": sorted(name for name, _ in model.named_parameters()),
        }

    print(json.dumps([read(*pair) for pair in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def trained(table_of, folder):
    return table_of(folder, {kind: (*SMALL, *SHORT, *words) for kind, words in KINDS.items()})


@pytest.fixture(scope="module")
def exported(trained, folder):
    """Exports the weights of each kind to a folder beside: all in one process, whose output this is."""
    commands = []
    for kind in KINDS:
        assert trained[kind].status == "FINISHED", trained[kind].report
        commands.append(["export", "weights", str(trained[kind].run_dir), "--out", str(folder / f"out-{kind}")])
    code = "import json, sys; from ortlaunch.cli import dispatch; sys.exit(any(map(dispatch, json.loads(sys.argv[1]))))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def found(trained, exported, folder):
    """What transformers alone reads: of what each run left, and of what was exported from its last checkpoint."""
    pairs = [(str(trained[kind].run_dir / "weights"), str(folder / f"out-{kind}")) for kind in KINDS]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READER), json.dumps(pairs)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(zip(KINDS, json.loads(ran.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_read_by_transformers_alone(trained, exported, found, kind):
    """What the run leaves, and what is exported from its last checkpoint, are the same model to the bit."""
    assert (exported.returncode, exported.stderr) == (0, "")
    which = "the average of the weights (train.ema)" if "train.ema=0.5" in KINDS[kind] else "weights"
    assert f"out-{kind}: {which} after step 4\n" in exported.stdout
    left = trained[kind].run_dir / "weights"
    assert (left / "model.safetensors").stat().st_mode & 0o777 == (left / "config.json").stat().st_mode & 0o777
    assert found[kind]["same"]
    assert found[kind]["dtypes"] == ["torch.float32"]
    assert not any("module." in name or "_torch_module" in name for name in found[kind]["names"])


def test_what_is_there_is_not_overwritten(trained, ask, folder):
    over = ask(folder, "export", "weights", str(trained["ddp"].run_dir))
    assert over.returncode == 2 and f"{trained['ddp'].run_dir / 'weights'} is not empty" in over.stderr


@pytest.mark.parametrize("kind", first_in_ci(["zero3", "ddp", "fsdp-bf16"], 1))
def test_another_run_begins_with_what_was_learnt(trained, train, folder, kind):
    """Of one piece, and gathered."""
    words = (*KINDS[kind], f"model.weights={trained[kind].run_dir / 'weights'}", "train.steps=1", "optimizer.lr=1e-9")
    again = train(folder, *SMALL, *SHORT, *words)
    assert again.status == "FINISHED", again.report
    assert again.losses[1] < trained[kind].losses[1] - 0.1


def test_weights_of_another_shape_are_refused(ask, train, folder):
    result = train(folder, *SMALL, *SHORT, "train.checkpoint_every=null")
    assert result.status == "FINISHED", result.report
    words = (*SMALL, *SHORT, f"model.weights={result.run_dir / 'weights'}")
    wider = train(folder, *words, "model.params.n_embd=64")
    deeper = train(folder, *words, "model.params.n_layer=3")
    assert wider.is_request and deeper.is_request
    assert "transformer.h.0.ln_1.bias: (128,) there, (64,) in the model" in wider.error
    assert "there is no transformer.h.2." in deeper.error
    nothing = ask(folder, "export", "weights", str(result.run_dir), "--out", str(folder / "nothing"))
    assert nothing.returncode == 2
    assert "no complete checkpoint" in nothing.stderr
    assert f"the weights at the run's end are in {result.run_dir / 'weights'}" in nothing.stderr


@pytest.mark.ort
def test_a_model_of_ones_own_is_plain_safetensors(train, folder):
    from safetensors.torch import load_file

    result = train(folder, "model=mlp", "backend=ort", "train.steps=2", "tracking=none")
    assert result.status == "FINISHED", result.report
    weights = load_file(result.run_dir / "weights" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "fc1.weight": (256, 64),
        "fc1.bias": (256,),
        "fc2.weight": (10, 256),
        "fc2.bias": (10,),
    }
