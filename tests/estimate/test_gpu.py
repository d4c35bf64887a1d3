"""``ortlaunch estimate device=cuda`` where there is no GPU, beside runs that were measured on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.proof.memory import once, peaks
from tests.support.cli import answer
from tests.support.estimates import estimated

MEASURED: dict[str, dict[str, int]] = json.loads((Path(__file__).parent / "recorded" / "h200.json").read_text())
"""Peaks of runs of six steps with one worker on an H200 (torch 2.11): what torch had allocated and reserved."""
_WORKSPACES = 64
"""MiB of cuBLAS's workspaces, which the estimate counts to the libraries."""
_COMMON = ("backend=eager", "train.steps=6", "train.checkpoint_every=null", "train.save_weights=false", "device=cuda")
_IN_CI = "model=llama data.seq_len=512 train.batch_size=16 trainer=ddp"


@pytest.mark.parametrize(
    "words", [pytest.param(one, marks=[] if one == _IN_CI else pytest.mark.nightly) for one in MEASURED]
)
def test_it_is_near_what_was_measured(tmp_path: Path, words: str) -> None:
    report = estimated(tmp_path, *once((*_COMMON, *words.split())), "--quick", "--memory=80GiB")
    measured = MEASURED[words]
    allocated, reserved = (peak + _WORKSPACES for peak in peaks(report))
    (worker,) = report["workers"]
    if report["backend"] == "eager":
        # DDP's old buckets may be there beside the new ones. Convolutions take workspaces that are not known.
        buckets = worker["parts"]["trainer_buffers_bytes"] / 2**20 if report["trainer"] == "ddp" else 0
        least, most = (limit * measured["allocated_mib"] for limit in (0.96, 1.04))
        assert least - buckets - 8 < allocated < most
        assert reserved == pytest.approx(measured["reserved_mib"], rel=0.09, abs=32)
    assert worker["low_bytes"] / 2**20 < measured["allocated_mib"] + 619
    assert measured["reserved_mib"] + 1259 < worker["high_bytes"] / 2**20
    assert report["verdict"] == "fits"


def test_the_limit_is_that_of_a_gpu_and_a_change_makes_it_fit(tmp_path: Path) -> None:
    words = ("model=gpt2_nano", "model.params.n_layer=1", "data.seq_len=512", "train.batch_size=256", "trainer=ddp")
    words += ("launcher.workers_per_node=4", "device=cuda", "backend=eager")
    report = estimated(tmp_path, *words, "--memory=3GiB", code=1)
    # Each of the four workers has its own.
    assert report["machine"]["peak_bytes"] == report["workers"][0]["peak_bytes"] == report["workers"][3]["peak_bytes"]
    assert (report["machine"]["limit_bytes"], report["verdict"]) == (3 * 2**30, "tight")
    assert 0 < report["largest_batch_size"] < 256
    assert report["change"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["device=cuda", "model.params.n_positions=16"], "data.seq_len"),
        (["device=cuda", "trainer=deepspeed", "trainer.zero_stage=0", "trainer.offload_optimizer=true"], "zero_stage"),
        (["device=cuda", "--memory=100"], "without a unit is in MiB"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_requests_that_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    result = answer(tmp_path, capfd, "estimate", "model=gpt2_nano", "backend=eager", *words)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_run_still_needs_the_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = answer(tmp_path, capfd, "model=gpt2_nano", "device=cuda", "backend=eager")
    assert result.returncode == 2
    assert "shows no GPU" in result.stderr
