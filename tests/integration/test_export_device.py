"""From a trained run to the device: real runs, exported, trained on without torch, and brought back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import ortlaunch
from tests.support.needs import needs

ROOT = Path(ortlaunch.__file__).parents[1]
DEVICE = ROOT / "docs" / "device"
TRAINED = ("train.steps=12", "train.checkpoint_every=12", "train.log_every=6", "train.batch_size=8")
ZERO2 = ("trainer=deepspeed", "trainer.zero_stage=2")
RUNS = {
    "mlp-ddp": ("model=mlp", "trainer=ddp", *TRAINED),
    "resnet-zero2": ("model=resnet", *ZERO2, *TRAINED),
    "gpt2_nano-zero2": ("model=gpt2_nano", "model.params.n_layer=1", "data.seq_len=16", *ZERO2, *TRAINED),
}


HEAD = ("loss=cross_entropy", "trainable=classifier.*", "--prefix", "h_", "--nominal-checkpoint")
EXPORTS = {
    "mlp-ddp-phone": ("mlp-ddp", "artifacts"),
    "resnet-zero2-phone": ("resnet-zero2", "artifacts"),
    "head": ("resnet-zero2", "artifacts", *HEAD),
    "gpt2_nano-zero2-phone": ("gpt2_nano-zero2", "artifacts"),
    "server": ("gpt2_nano-zero2", "inference", "--quantize"),
}
"""The run of each, which export, and what it is told."""


@dataclass(frozen=True)
class Export:
    """What an export has left, and what was said."""

    out: Path
    words: tuple[str, ...]
    exported: Any
    verified: Any
    """None of an export for inference."""


@pytest.fixture(scope="module")
def work() -> Iterator[ThreadPoolExecutor]:
    """Start-up is most of each command and one core wide: several at once."""
    with ThreadPoolExecutor(max_workers=3) as pool:
        yield pool


@pytest.fixture(scope="module")
def runs(fleet_of, tmp_path_factory):
    """The runs by name, all in one folder and one MLflow store."""
    fleet = fleet_of(tmp_path_factory.mktemp("device"), RUNS, ahead=0)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def exports(runs, launch):
    """Gives the exports by name: each made once and, where it trains, verified."""
    made: dict[str, Export] = {}

    def make(name: str) -> Export:
        run, kind, *further = EXPORTS[name]
        result, out = runs[run], runs.folder / name
        assert result.returncode == 0, result.report
        words = ("export", kind, f"from_run={result.run_dir}", f"out={out}", *further)
        exported = launch(runs.folder, *words)
        assert exported.returncode == 0, exported.report
        short = ("export", "verify", str(out), "--steps", "4", "--batch-size", "8", "--format", "json")
        return Export(out, words, exported, launch(runs.folder, *short) if kind == "artifacts" else None)

    def get(name: str) -> Export:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return get


IN_CI = "resnet-zero2"
CASES = [pytest.param(name, marks=[pytest.mark.nightly] * (name != IN_CI)) for name in RUNS]


@pytest.mark.parametrize("name", CASES)
def test_a_trained_run_trains_on_as_in_pytorch_and_keeps_the_artifacts(runs, exports, mlflow_run, name) -> None:
    found = exports(f"{name}-phone")
    out, verified = found.out, found.verified
    assert "checkpoints/step-00000012, after step 12" in found.exported.stdout
    assert verified.returncode == 0, verified.report
    report = json.loads((out / "verify.json").read_text())
    assert report["ok"] and report["steps"] == 4
    assert max(report["loss_difference"], report["weight_difference"], report["eval_loss_difference"]) <= 1e-4
    assert report["inference_error"] <= 1e-4 and report["frozen_unchanged"]
    assert report["dropout_active"] is (True if name.startswith("gpt2") else None)
    assert report["step_seconds"] > 0 and report["files"]["checkpoint"] > 10_000
    # It is the run's weights that were exported, not fresh ones.
    first = runs[name].losses[1]
    assert report["losses"][0][0] < first - 0.05
    client, run = mlflow_run(runs[name])
    logged = {one.path for one in client.list_artifacts(run.info.run_id, f"export/{out.name}")}
    files = {
        "training_model.onnx",
        "eval_model.onnx",
        "optimizer_model.onnx",
        "checkpoint",
        "export.json",
        "verify.json",
    }
    assert {f"export/{out.name}/{file}" for file in files} <= logged
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize("name", CASES)
def test_a_plain_runtime_has_every_operator(exports, name) -> None:
    files = list(exports(f"{name}-phone").out.glob("*.onnx"))
    assert len(files) == 4
    for path in files:
        made = onnx.load(path)
        assert made.ir_version <= 10
        assert {node.domain for node in made.graph.node} <= {"", "com.microsoft"}, path


BLOCKED = """
import runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ortlaunch"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Blocked())
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""This Python as one in which torch and ortlaunch are not installed."""


@pytest.fixture(scope="module", params=["blocked", pytest.param("missing", marks=pytest.mark.nightly)])
def device_python(request, tmp_path_factory, work) -> Future[tuple[tuple[Path | str, ...], str]]:
    """A Python without torch, as a device has it, and why there is none; it is made while the runs train."""
    if request.param == "blocked":
        made: Future[tuple[tuple[Path | str, ...], str]] = Future()
        made.set_result(((sys.executable, "-c", BLOCKED), ""))
        return made
    return work.submit(_without_torch, tmp_path_factory.mktemp("venv"))


def _without_torch(folder: Path) -> tuple[tuple[Path | str, ...], str]:
    # Without a pip of its own, whose installation takes as long as that of the packages.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=240)
    python = folder / "bin" / "python"
    wheels = ["onnxruntime-training-cpu==1.19.2", "numpy", "-c", str(ROOT / "constraints.txt")]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *wheels]
    installed = subprocess.run(pip, capture_output=True, text=True, timeout=480)
    if installed.returncode != 0:
        return (python,), f"needs a package index: {installed.stderr.strip().splitlines()[-1]}"
    there = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in there.stderr
    return (python,), ""


def run_python(python: tuple[Path | str, ...], script: Path, *arguments: object) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ran = subprocess.run(
        [*map(str, (*python, script, *arguments))], env=environment, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_device_without_torch_trains_saves_and_goes_on(exports, work, device_python, launch, ask, tmp_path) -> None:
    out, data, trained = exports("resnet-zero2-phone").out, tmp_path / "digits.npz", tmp_path / "trained"
    python, missing = device_python.result()
    needs(not missing, missing)
    run_python((sys.executable,), DEVICE / "digits.py", data)
    script = DEVICE / "train_on_device.py"
    said = run_python(python, script, out, "--data", data, "--out", trained, "--epochs", "2")
    assert "torch loaded: False" in said
    losses = [float(line.rpartition(" ")[2]) for line in said.splitlines() if "held-out loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    assert float(said.splitlines()[-1].split()[1].rstrip("%")) > 85
    back = tmp_path / "back"
    words = ("--from-artifacts", str(out), "--checkpoint", str(trained / "checkpoint"), "--out", str(back))
    bringing = work.submit(launch, tmp_path, "export", "weights", *words)
    again = run_python(
        python, script, out, "--data", data, "--out", tmp_path / "on", "--epochs", "0",
        "--checkpoint", trained / "checkpoint",
    )  # fmt: skip
    assert abs(float(again.splitlines()[0].rpartition(" ")[2]) - losses[-1]) < 1e-3
    brought = bringing.result()
    assert brought.returncode == 0, brought.report
    _check_in_pytorch(back, trained / "inference.onnx", np.load(data))
    taken = ask(tmp_path, "export", "weights", *words)
    assert taken.returncode == 2 and "is not empty" in taken.stderr


def _check_in_pytorch(weights: Path, inference: Path, data) -> None:
    """What the device has trained computes the same in transformers and in the device's own inference model."""
    from transformers import ResNetForImageClassification

    from ortlaunch.ort.runtime import Graph

    model = ResNetForImageClassification.from_pretrained(weights).eval()
    pixels = torch.from_numpy(data["pixel_values"][:64])
    with torch.no_grad():
        expected = model(pixels).logits
    torch.testing.assert_close(Graph(inference)({"pixel_values": pixels})["logits"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_the_head_alone_with_a_prefix_and_a_nominal_checkpoint(exports) -> None:
    found = exports("head")
    assert "trains 2 parameters, 18 frozen" in found.exported.stdout
    assert found.verified.returncode == 0, found.verified.report
    report = json.loads(found.verified.stdout)
    assert report["frozen_unchanged"] and report["weight_difference"] <= 1e-4
    assert (found.out / "h_nominal_checkpoint").stat().st_size < 5000


@pytest.mark.nightly
def test_for_servers_plain_and_quantized(runs, exports, launch) -> None:
    server = exports("server")
    out = server.out
    found = json.loads((out / "export.json").read_text())["findings"]
    assert found["largest_error"] < 1e-4 and 0 < found["quantized"]["largest_error"] < 0.1
    assert (out / "model.int8.onnx").stat().st_size < 0.5 * (out / "model.onnx").stat().st_size
    kept = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = launch(runs.folder, *server.words)
    assert again.returncode == 2 and "--force" in again.stderr and len(again.stderr.strip().splitlines()) == 1
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == kept
