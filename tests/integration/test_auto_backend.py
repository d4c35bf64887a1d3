"""A whole run with ``backend=auto``: its trials, their rates, and that a resumed run keeps its backend."""

from __future__ import annotations

import re

import pytest
import yaml

from ortlaunch.base.user import user_cache

WORDS = ("model=gpt2_nano", "device=cpu", "backend=auto", "train.log_every=100", "launcher.workers_per_node=2")
RUN = (*WORDS, "tracking=none", "train.save_weights=false", "train.steps=800", "train.checkpoint_every=700")


@pytest.mark.ort
@pytest.mark.nightly
def test_the_first_run_of_a_kind_makes_trials_the_next_none_and_a_resumed_one_keeps_its_backend(
    launch, tmp_path, monkeypatch
):
    folder = tmp_path / "cache"
    folder.mkdir()
    for built in user_cache().glob("cpython-*"):
        (folder / built.name).symlink_to(built.resolve())
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(folder))
    first = launch(tmp_path, *RUN)
    assert first.returncode == 0, first.report
    assert "backend=auto tries eager, compile and ort for this kind of run" in first.stderr
    (taken,) = re.findall(r"note: backend=auto takes (\w+): .* for 800 steps, by trials that took \d+ s", first.stderr)
    assert yaml.safe_load((first.run_dir / "config.yaml").read_text())["backend"]["name"] == taken
    assert first.tags["ortlaunch.backend"] == taken
    assert first.tags["ortlaunch.backend_reason"].startswith(f"backend=auto takes {taken}: ")
    assert first.tags["ortlaunch.ort_active"] == str(taken == "ort").lower()
    assert list((tmp_path / "runs").glob("*/*")) == [first.run_dir], "a trial leaves no run"
    again = launch(tmp_path, *RUN, "launcher.dry_run=true")
    assert re.search(r"# backend=auto takes \w+: .*, by earlier runs of this kind", again.stdout), again.report
    resumed = launch(tmp_path, "resume", str(first.run_dir), "train.steps=810")
    assert resumed.returncode == 0, resumed.report
    assert "backend=auto" not in resumed.stderr
    assert yaml.safe_load((first.run_dir / "config.yaml").read_text())["backend"]["name"] == taken
    assert max(resumed.losses) == 810
