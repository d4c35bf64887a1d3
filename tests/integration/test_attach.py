"""Scripts that call `ortlaunch.attach()`: their numbers against plain torch, and where they may be started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.run.run import Run
from tests.support.nightly import first_in_ci
from tests.support.runs import Recorded
from tests.support.scripts import attached_alone, write_attached, write_failing
from tests.support.torchrun import run_probe
from tests.support.waiting import until

PROBE = Path(__file__).with_name("attach_probe.py")


def test_loops_of_many_manners_train_as_plain_torch_does(tmp_path: Path) -> None:
    for workers, trainer in ((1, "single"), (2, "ddp")):
        out = tmp_path / f"of-{workers}.json"
        run_probe(PROBE, out, trainer, workers=workers)
        found = json.loads(out.read_text())
        assert len(found) == 7
        assert {name: error for name, error in found.items() if error > 1e-12} == {}


@pytest.mark.nightly
def test_loops_train_alike_when_weights_are_sharded(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    # torch's FSDP has no second derivatives.
    names = ("plain", "gan", "distillation", "reinforcement", "own_accumulation", "by_key")
    run_probe(PROBE, out, "fsdp", *names)
    found = json.loads(out.read_text())
    assert found.keys() == set(names)
    assert {name: error for name, error in found.items() if error > 1e-12} == {}


ORT, NIGHTLY = ("plain", "gan"), ("distillation", "reinforcement", "own_accumulation", "by_key")


@pytest.mark.parametrize(
    ("workers", "names"),
    [
        (2, ORT),
        pytest.param(1, (*ORT, *NIGHTLY), marks=pytest.mark.nightly),
    ],
)
def test_loops_train_under_onnx_runtime_as_plain_torch_does(
    tmp_path: Path, workers: int, names: tuple[str, ...]
) -> None:
    out = tmp_path / "found.json"
    run_probe(PROBE, out, "ddp" if workers == 2 else "single", "backend=ort", *names, workers=workers)
    found = json.loads(out.read_text())
    assert found.keys() == set(names)
    # The weights are fp32, of size 1, and the others fp64.
    assert {name: error for name, error in found.items() if error > 1e-6} == {}
    for name in names:
        (folder,) = tmp_path.glob(f"runs/{name}/*")
        tags = StoredRun(folder).tags
        assert "ortlaunch.export_cache" in tags
        assert "ortlaunch.fallback_reason" not in tags


def test_a_gradient_penalty_under_onnx_runtime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"create_graph=True.*use backend=eager"):
        run_probe(PROBE, tmp_path / "found.json", "single", "backend=ort", "gradient_penalty", workers=1)


ENDS = {
    "strength = 2.0": (
        "backend=ort",
        "backend.recheck_every=2",
        r"WrongGradientsError: step 4: under ONNX Runtime the",
    ),
    "model(x, x)": ("backend=ort", "seed=0", "RequestError: the script calls its model in training in another way"),
    "sys.exit(3)": ("seed=0", "seed=0", "the script ended with exit code 3"),
    "raise OSError('gone')": ("seed=0", "seed=0", "OSError: gone"),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_script_that_fails_is_noted_as_failed(tmp_path: Path, what: str) -> None:
    write_failing(tmp_path, what)
    *keys, said = ENDS[what]
    assert _start(tmp_path, *keys) == {"sys.exit(3)": 3, "model(x, x)": 2}.get(what, 1)
    (folder,) = tmp_path.glob("runs/*/*-train-*")
    run = StoredRun(folder)
    assert run.status == "FAILED"
    (failure,) = [event for event in run.events if event["event"] == "failure"]
    assert re.search(said, json.dumps(failure)), failure


def _start(folder: Path, *keys: str, **variables: str) -> int:
    """Starts ``train.py`` as a user does who has no launcher; returns its exit code."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.run([sys.executable, "train.py", *keys], cwd=folder, env=environment).returncode


def test_a_script_that_is_killed_within_an_epoch_goes_on_to_the_bit(tmp_path: Path) -> None:
    write_attached(tmp_path)
    assert _start(tmp_path, "train.checkpoint_async=false", KILLED_AT="7") == -signal.SIGKILL
    (folder,) = tmp_path.glob("runs/*/*-train-*")
    assert _start(tmp_path, ORTLAUNCH_RUN_DIR=str(folder)) == 0
    again = StoredRun(folder)
    assert again.status == "FINISHED"
    logged = again.logged
    assert [step for step, _ in logged] == [*range(1, 8), *range(5, 15)]
    assert logged[4:7] == logged[7:10]
    # Another number of threads rounds otherwise.
    assert [values for _, values in logged[:4] + logged[7:]] == [
        pytest.approx(one, rel=1e-12) for one in attached_alone()
    ]


def test_a_launched_script_that_is_stopped_goes_on_to_the_bit(
    start: Callable[..., Any],
    launch: Callable[..., Any],
    mlflow_run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    write_attached(tmp_path)
    monkeypatch.setenv("SECONDS_A_STEP", "0.6")
    keys = ("launcher.workers_per_node=1", "train.keep_checkpoints=3", "script.signal=SIGUSR1")
    running = start(tmp_path, *keys, "--", "train.py")
    (folder,) = until(lambda: list(tmp_path.glob("runs/*/*-train-*")))
    log = folder / "logs" / "rank-0.log"
    until(lambda: log.exists() and "step 3" in log.read_text(), said=lambda: running.process.poll())
    running.process.send_signal(signal.SIGTERM)
    stopped = running.finish()
    assert (stopped.returncode, stopped.status) == (143, "KILLED"), stopped.report
    noted = Run(folder).stopped()
    assert noted is not None
    assert Path(noted.checkpoint).name == f"step-{noted.step:08}"
    monkeypatch.setenv("SECONDS_A_STEP", "0")
    result = launch(tmp_path, "resume", str(folder))
    assert (result.returncode, result.status) == (0, "FINISHED"), result.report
    logged = StoredRun(folder).logged
    assert logged == [(step, pytest.approx(one, rel=1e-12)) for step, one in enumerate(attached_alone(), 1)]
    client, run = mlflow_run(result)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(step, loss) for step, (loss, _) in logged]
    assert run.data.params.items() >= {("train.keep_checkpoints", "3"), ("backend.name", "eager")}
    assert run.data.metrics["summary/peak_memory_gib"] > 0.1


# How far losses and weights may be from those of plain torch in fp64; the weights are of size 1.
KILLED = {
    ("fsdp",): 1e-12,
    ("deepspeed", "trainer.zero_stage=1"): 1e-6,
    ("deepspeed", "trainer.zero_stage=2"): 1e-6,
    ("deepspeed", "trainer.zero_stage=3"): 1e-6,
    ("fsdp", "train.precision=bf16"): 1e-2,
    ("fsdp", "backend=compile"): 1e-12,
    ("ddp", "backend=compile"): 1e-12,
}


@pytest.mark.parametrize("keys", first_in_ci(KILLED, 1))
def test_workers_that_are_killed_go_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    monkeypatch.setenv("KILLED_AT", "6")
    out = tmp_path / "found.json"
    run_probe(PROBE, out, *keys, "train.log_every=1", "train.checkpoint_async=false", "plain", restarts=1)
    assert json.loads(out.read_text())["plain"] < KILLED[keys]
    (folder,) = tmp_path.glob("runs/plain/*")
    logged = StoredRun(folder).logged
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5, 6, 5, 6]
    assert logged[4:6] == logged[6:]


class StoredRun(Recorded):
    """A run, given by its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def run_dir(self) -> Path:
        return self._folder

    @property
    def logged(self) -> list[tuple[int, tuple[float, float]]]:
        """Step, loss and the script's own number of each log step in the order of the journal."""
        found = [(step, values) for step, values in self._metrics() if "train/loss" in values]
        return [(step, (values["train/loss"], values["train/own"])) for step, values in found]
