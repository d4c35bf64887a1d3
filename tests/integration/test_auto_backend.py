"""Whole runs with backend=auto: what they take, that their numbers are those of that backend, and what stays."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ortlaunch.base.user import user_cache
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.devices import usable_cores
from ortlaunch.config.load import to_config
from ortlaunch.trainer.auto import kind
from ortlaunch.trainer.auto.rates import Rates
from tests.support.runs import journal

SMALL = ("model=mlp", "trainer=single", "train.log_every=1", "tracking=none")
NETS = """
import torch
from torch import nn

class Fitting(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, pixel_values):
        return self.out(pixel_values.flatten(1))
"""
UNFIT = NETS.replace("pixel_values.flatten(1))", "torch.fft.hfft(pixel_values.flatten(1), 64))")


def rates() -> dict[Path, dict[str, object]]:
    """The files of the cache of rates and what they hold."""
    return {path: json.loads(path.read_text()) for path in (user_cache() / "backend-rates").glob("*.json")}


def teach(path: Path, **step_seconds: float) -> None:
    """Makes earlier runs have measured these step times, with the same start."""
    rated = {
        name: {"step_seconds": one, "start_seconds": 1.0, "time": time.time()} for name, one in step_seconds.items()
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"backends": rated}))


def rates_of(*words: str, workers: int = 1) -> Path:
    """The file of the cache about runs of these words."""
    config = prepared(to_config(compose(list(words))))
    return Rates(kind.facts(config, world_size=workers, threads=max(1, usable_cores() // workers))).path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    for built in user_cache().glob("cpython-*"):
        (folder / built.name).symlink_to(built.resolve())
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(folder))


def test_a_short_run_stays_with_eager_says_so_and_leaves_its_rate(launch, tmp_path):
    result = launch(tmp_path, *SMALL, "backend=auto", "train.steps=12")
    assert result.returncode == 0, result.report
    assert "backend=auto begins with eager: no backend has been measured" in result.stdout
    assert "backend=auto stays with eager: " in result.stdout
    assert sorted(result.losses) == list(range(1, 13))
    assert result.tags["ortlaunch.backend"] == "eager"
    assert "too short to pay for a trial" in result.tags["ortlaunch.backend_reason"]
    (found,) = rates().values()
    assert list(found["backends"]) == ["eager"]
    assert 0 < found["backends"]["eager"]["step_seconds"] < found["backends"]["eager"]["start_seconds"]


def test_without_onnxruntime_training_it_goes_on_and_says_so_in_one_line(launch, tmp_path, monkeypatch):
    stub = tmp_path / "site" / "onnxruntime"
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(stub.parent))
    result = launch(tmp_path, *SMALL, "backend=auto", "train.steps=6")
    assert result.returncode == 0, result.report
    assert len(result.losses) == 6
    (line,) = [one for one in result.stdout.splitlines() if "onnxruntime-training" in one]
    assert line.startswith("backend=auto begins with eager: no backend has been measured for it on this machine; ")
    assert line.endswith(
        "; without ort: it needs onnxruntime-training, and the installed onnxruntime has no training part"
    )
    assert result.stderr == ""


@pytest.mark.ort
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "workers", "taken"),
    [
        (["trainer=deepspeed", "trainer.zero_stage=0"], 1, "ort"),
        (["trainer=deepspeed", "trainer.zero_stage=1"], 2, "ort"),
        (["trainer=ddp", "train.grad_accumulation=2"], 1, "ort"),
        (["trainer=fsdp"], 2, "eager"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_every_trainer_takes_the_fastest_of_what_it_goes_with(launch, tmp_path, words, workers, taken):
    words = (*SMALL, *words, f"launcher.workers_per_node={workers}", "backend=auto", "train.steps=6")
    teach(rates_of(*words, workers=workers), eager=0.01, compile=0.1, ort=0.001)
    result = launch(tmp_path, *words)
    assert result.returncode == 0, result.report
    assert f"backend=auto takes {taken}: " in result.stdout
    assert result.tags["ortlaunch.backend"] == taken
    assert result.tags["ortlaunch.ort_active"] == str(taken == "ort").lower()
    assert len(result.losses) == 6
    rule = "; without ort: backend=ort does not go with trainer=fsdp"
    assert (rule in result.tags["ortlaunch.backend_reason"]) == (taken == "eager")


@pytest.mark.ort
@pytest.mark.nightly
def test_a_run_that_is_resumed_by_another_number_of_workers_keeps_its_backend(launch, tmp_path):
    words = ("model=mlp", "trainer=ddp", "train.log_every=1", "tracking=none", "backend=auto", "train.steps=4")
    words = (*words, "launcher.workers_per_node=2", "train.checkpoint_every=2")
    teach(rates_of(*words, workers=2), eager=0.01, compile=0.1, ort=0.001)
    first = launch(tmp_path, *words)
    assert "backend=auto takes ort: " in first.stdout, first.report
    # For one worker eager is known to be the fastest. What the run is made of stays all the same.
    teach(rates_of(*words, workers=1), eager=0.001, compile=0.1, ort=0.01)
    one = ("launcher.workers_per_node=1", "train.steps=6")
    resumed = launch(tmp_path, "resume", str(first.run_dir), *one)
    assert resumed.returncode == 0, resumed.report
    assert "backend=auto keeps ort, which this run has begun with" in resumed.stdout
    assert {5, 6} <= set(resumed.losses)


@pytest.mark.ort
@pytest.mark.nightly
@pytest.mark.parametrize("fastest", ["eager", "compile", "ort"])
def test_a_run_takes_what_is_known_to_be_the_fastest_with_its_losses(launch, tmp_path, fastest):
    plain = launch(tmp_path, *SMALL, f"backend={fastest}", "train.steps=12")
    (path,) = rates()
    teach(path, **{name: 0.001 if name == fastest else 0.1 for name in ("eager", "compile", "ort")})
    result = launch(tmp_path, *SMALL, "backend=auto", "train.steps=12")
    assert f"backend=auto takes {fastest}: {fastest} 1.0 s" in result.stdout, result.report
    assert result.tags["ortlaunch.ort_active"] == str(fastest == "ort").lower()
    assert result.losses == plain.losses


@pytest.mark.ort
@pytest.mark.nightly
def test_a_run_begins_again_with_the_faster_backend_and_a_resumed_one_keeps_it(launch, start, tmp_path):
    """Two workers: trials, a change in the middle of eager's first steps, the losses of ort from step 1, resume."""
    words = ("model=gpt2_nano", "data.seq_len=128", "train.batch_size=8", "train.log_every=1", "tracking=none")
    plain = launch(tmp_path, *words, "backend=ort", "train.steps=12")
    (path,) = rates()
    # Eager is begun with, and ort alone is left to try.
    teach(path, eager=10.0, compile=1000.0)
    command = start(tmp_path, *words, "backend=auto", "train.steps=1000000", "train.checkpoint_every=500000")
    run_dir = _stopped_after(command, 12)
    text = command.process.communicate()[0]
    if "backend=auto begins again with ort" not in text:
        pytest.skip(f"the machine is too busy for ort to be the faster one here: {text[-500:]}")
    losses = {
        event["step"]: event["values"]["train/loss"]
        for event in journal(run_dir)
        if event["event"] == "metrics" and "train/loss" in event["values"]
    }
    assert {step: losses[step] for step in plain.losses} == plain.losses
    resumed = launch(tmp_path, "resume", str(run_dir), f"train.steps={max(losses) + 3}")
    assert resumed.returncode == 0, resumed.report
    assert "backend=auto keeps ort, which this run has begun with" in resumed.stdout


@pytest.mark.ort
@pytest.mark.nightly
def test_a_model_that_the_known_backend_refuses_goes_on_without_it(launch, tmp_path):
    """Both workers give ort up, also the one that waits for the other; the next run knows."""
    (tmp_path / "nets.py").write_text(UNFIT)
    words = ("model=factory", "model.target=nets:Fitting", "data=digits", "train.steps=12", "tracking=none")
    launch(tmp_path, *words, "backend=eager")
    (path,) = rates()
    teach(path, eager=0.1, compile=0.2, ort=0.0001)
    result = launch(tmp_path, *words, "backend=auto")
    assert result.returncode == 0, result.report
    assert "backend=auto goes on without ort: " in result.stdout
    assert "backend=auto takes eager: " in result.stdout
    assert "without ort: it failed: " in result.tags["ortlaunch.backend_reason"]
    assert result.tags["ortlaunch.backend"] == "eager"
    assert "hfft" in rates()[path]["backends"]["ort"]["unfit"]
    again = launch(tmp_path, *words, "backend=auto")
    assert "goes on without" not in again.stdout
    assert "; without ort: " in again.stdout


def _stopped_after(command, step: int) -> Path:
    """Asks the run to stop once it has journalled a step."""
    run_dir = command.wait_for_training()
    while command.process.poll() is None:
        if any(event.get("step", 0) >= step for event in journal(run_dir) if event["event"] == "metrics"):
            (run_dir / "STOP").touch()
            break
        time.sleep(0.2)
    return run_dir
