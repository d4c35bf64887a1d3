"""A real tuning: its trials, its result, and what can be done with it afterwards."""

from __future__ import annotations

import json

import pytest


@pytest.mark.nightly
def test_a_real_tuning_of_a_small_model_ends_with_a_job_and_is_found_again(launch, tmp_path):
    words = ("model=mlp", "device=cpu", "backend=eager", "trainer=ddp,single", "--hold=micro-batch,checkpointing")
    more = ("train.steps=1000", "--minutes", "2", "--format", "json")
    first = launch(tmp_path, "tune", *words, *more)
    assert first.returncode == 0, first.report
    result = json.loads(first.stdout)
    assert result["winner"]["backend"] == "eager"
    assert result["score"] > 0
    assert {trial["cell"]["trainer"] for trial in result["trials"]} >= {"ddp"}
    assert result["job"].endswith("+jobs=tuned_mlp")
    again = launch(tmp_path, "tune", *words, *more)
    assert json.loads(again.stdout) == result
    compared = launch(tmp_path, "compare", "--sweep", result["folder"])
    assert compared.returncode == 0, compared.report
    assert "mlp-eager-ddp-w2-b4" in compared.stdout
