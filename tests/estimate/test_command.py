"""`ortlaunch estimate` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import answer, ortlaunch
from tests.support.estimates import estimated

PARAMETERS = 4 * 19_210
WORDS = ("model=mlp", "backend=eager", "device=cpu")
BRANCHES = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, pixel_values, labels):
        out = self.layer(pixel_values.flatten(1))
        if out.sum() > 0:
            out = out * 2
        return torch.nn.functional.cross_entropy(out, labels)
"""


def test_ddp_keeps_its_buckets_and_every_worker_is_counted(tmp_path: Path) -> None:
    three = ("trainer=ddp", "launcher.workers_per_node=3", "data.workers=1")
    report = estimated(tmp_path, *WORDS, *three, "--quick", "--memory=64GiB")
    first, *others = report["workers"]
    assert len(others) == 2
    assert first["parts"]["trainer_buffers_bytes"] == pytest.approx(PARAMETERS, rel=0.05)
    assert first["low_bytes"] < first["peak_bytes"] < first["high_bytes"]
    assert "end" in first["phases"]
    assert "end" not in others[0]["phases"]
    machine = report["machine"]
    assert 0 < machine["loaders_bytes"] == machine["peak_bytes"] - sum(one["peak_bytes"] for one in report["workers"])
    assert (machine["limit_bytes"], report["verdict"]) == (64 * 2**30, "fits")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.ort
def test_a_fits_holds_for_whatever_backend_is_chosen(tmp_path: Path) -> None:
    words = ("model=gpt2_nano", "train.batch_size=64", "device=cpu", "trainer=single", "--quick")
    eager, ort, auto = (
        estimated(tmp_path, f"backend={one}", *words, "--memory=64GiB") for one in ("eager", "ort", "auto")
    )
    assert "backend=auto may take eager, compile or ort" in auto["note"]
    highs = {one["backend"]: one["machine"]["high_bytes"] for one in (eager, ort)}
    auto_high = auto["machine"]["high_bytes"]
    assert max(highs.values()) <= 1.05 * auto_high
    # Between the high figures of the better backend and of auto, that backend alone would fit.
    better = min(highs, key=highs.__getitem__)
    between = (highs[better] + auto_high) // 2 // 2**20
    assert estimated(tmp_path, f"backend={better}", *words, f"--memory={between}MiB")["verdict"] == "fits"
    assert estimated(tmp_path, "backend=auto", *words, f"--memory={between}MiB", code=1)["verdict"] == "tight"


def test_a_model_that_branches_on_its_data_is_tried(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(BRANCHES)
    words = ("model=factory", "model.target=nets:Net", "data=digits", "trainer=single", *WORDS[1:], "--memory=100MiB")
    report = estimated(tmp_path, *words, code=1)
    assert report["method"] == "real steps with micro-batches 2 and 4"
    assert "cannot be traced on tensors without content" in report["note"]
    assert report["verdict"] == "does not fit"
    assert [one.name for one in tmp_path.iterdir() if one.name != "__pycache__"] == ["nets.py"]
    refused = ortlaunch(tmp_path, "estimate", *words, "--quick")
    assert refused.returncode == 2
    assert "is not known without real steps, which --quick leaves out" in refused.stderr


@pytest.mark.nightly
def test_the_change_that_is_named_makes_the_run_fit(tmp_path: Path) -> None:
    words = ("model=gpt2_nano", *WORDS[1:], "trainer=single", "--memory=1GiB")
    report = estimated(tmp_path, *words, "train.batch_size=128", code=1)
    assert report["change"].startswith("train.")
    assert report["largest_batch_size"] > 4
    better = estimated(tmp_path, *words, "train.batch_size=128", *report["change"].split())
    assert better["verdict"] == "fits"


@pytest.mark.nightly
def test_a_smaller_micro_batch_that_cannot_train_does_not_end_the_estimate(tmp_path: Path) -> None:
    # Batch normalization refuses a single image of 8x8.
    report = estimated(tmp_path, "model=resnet", *WORDS[1:], "trainer=single", "--memory=100MiB", code=1)
    assert (report["verdict"], report["largest_batch_size"]) == ("does not fit", 0)
    assert report["change"].startswith("none of")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "weights", "state"),
    [
        (["trainer=fsdp"], 0.5, 1),
        (["trainer=deepspeed", "trainer.zero_stage=0"], 1, 2),
        (["trainer=deepspeed", "trainer.zero_stage=1"], 1, 1.5),
        (["trainer=deepspeed", "trainer.zero_stage=2"], 1, 1.5),
        (["trainer=deepspeed", "trainer.zero_stage=3"], 0.5, 1),
    ],
    ids=["fsdp", "zero0", "zero1", "zero2", "zero3"],
)
def test_a_worker_holds_its_share(tmp_path: Path, words: list[str], weights: float, state: float) -> None:
    size = 4 * 957_184
    parts = estimated(tmp_path, "model=gpt2_nano", *WORDS[1:], *words, "--quick")["workers"][0]["parts"]
    assert parts["parameters_bytes"] == pytest.approx(weights * size, rel=0.03)
    assert parts["optimizer_state_bytes"] == pytest.approx(state * size, rel=0.03)


def test_deepspeed_is_traced_with_evaluations_of_a_model_with_buffers(tmp_path: Path) -> None:
    """Workers compare their buffers before an evaluation, which tensors without content cannot."""
    words = ("model=resnet", *WORDS[1:], "train.batch_size=4", "trainer=deepspeed", "trainer.zero_stage=1")
    report = estimated(tmp_path, *words, "train.eval_every=1", "data.eval_fraction=0.1", "--quick")
    assert (report["method"], report["note"]) == ("fake tensors", "")


@pytest.mark.nightly
def test_under_deepspeed_the_first_worker_alone_copies_the_model_for_a_checkpoint(tmp_path: Path) -> None:
    # The last checkpoint is written without a copy.
    every = ("train.steps=100", "train.checkpoint_every=50")
    words = ("model=gpt2_nano", *WORDS[1:], *every, "train.save_weights=false", "--quick")
    of_stage = {
        stage: estimated(tmp_path, *words, "trainer=deepspeed", f"trainer.zero_stage={stage}")["workers"]
        for stage in (0, 3)
    }
    first, other = of_stage[0]
    size = 4 * 957_184
    copied = first["phases"]["checkpoint"]["tensors_bytes"]
    less = copied - other["phases"]["checkpoint of the other workers"]["tensors_bytes"]
    # Weights and both moments.
    assert less == pytest.approx(3 * size, rel=0.05)
    phases = ["data", "build", "start", "step", "checkpoint", "step beside its copy"]
    assert [list(one["phases"]) for one in of_stage[3]] == [phases] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["compile", pytest.param("ort", marks=pytest.mark.ort)])
def test_a_backend_is_tried(tmp_path: Path, backend: str) -> None:
    words = ("model=mlp", f"backend={backend}", "device=cpu", "trainer=ddp", "launcher.workers_per_node=2")
    quick, tried = (estimated(tmp_path, *words, *more) for more in (("--quick",), ()))
    assert "which --quick leaves out" in quick["note"]
    assert (tried["probed_batch_sizes"], tried["note"]) == ([2, 4], "")
    assert "by real steps with micro-batches 2 and 4" in tried["method"]
    assert tried["workers"][0]["high_bytes"] < quick["workers"][0]["high_bytes"]
    assert (tried["machine"]["compilers_bytes"] > 0) is (backend == "compile")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format=xml"], "--format takes one of"),
        (["--memory=lots"], "--memory=lots: not a size of memory"),
        ([f"--memory={2**31}TiB"], "no machine has so much memory"),
        (["train.stepz=3"], "train.stepz"),
        (["train.steps=3,4", "--multirun"], "one configuration"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_requests_that_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    result = answer(tmp_path, capfd, "estimate", *words)
    assert result.returncode == 2
    assert message in result.stderr
