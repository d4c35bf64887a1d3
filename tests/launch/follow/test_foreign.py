"""Run folders that another user may have written: nothing of them is imported, signalled or continued unasked."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import TRUST
from ortlaunch.cli import dispatch
from ortlaunch.follow.rows import Survey
from ortlaunch.follow.state import State
from ortlaunch.launch.jobs import of_user
from ortlaunch.launch.slurm import cluster
from ortlaunch.run.checkpoints import Store
from ortlaunch.run.folders import folder_at
from ortlaunch.run.run import Run
from ortlaunch.run.state import STATE_TAG
from tests.launch.follow.conftest import Maker
from tests.support.users import give_away, needs_root, share

Verbs = Callable[[Path], list[list[str]]]
CONFIG = """\
experiment: default
name: theirs
model: {name: factory, target: "planted_nets:build"}
data: {name: digits}
backend: {name: eager}
trainer: {name: single}
optimizer: {name: adamw}
scheduler: {name: constant}
tracking: {name: none}
launcher: {name: local}
train: {batch_size: 4, steps: 8}
"""


@pytest.fixture
def theirs(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint, and with a model whose module leaves a trace where it is imported."""
    run_dir: Path = make_run("theirs", end="KILLED")
    (run_dir / "config.yaml").write_text(CONFIG)
    (tmp_path / "planted_nets.py").write_text("open('imported', 'w').close()\nbuild = None\n")
    (run_dir / "export.json").write_text("{}")
    store = Store(run_dir / "checkpoints", keep=1)
    store.begin(4)
    store.tidy(store.commit(4, {}))
    monkeypatch.syspath_prepend(tmp_path)
    return run_dir


def of_runs(run_dir: Path) -> list[list[str]]:
    """Every command that would build the run's model or continue the run."""
    return [
        ["resume", str(run_dir)],
        ["resume", "theirs"],
        ["cancel", "theirs"],
        ["export", "weights", str(run_dir)],
        ["export", "weights", str(run_dir / "checkpoints" / "latest"), "--out", "out"],
        ["export", "onnx", f"from_run={run_dir}", "out=out"],
        ["export", "inference", f"from_run={run_dir}/checkpoints/latest", "out=out"],
    ]


def of_artifacts(run_dir: Path) -> list[list[str]]:
    """Every command that would build the model of an export for ONNX Runtime."""
    return [
        ["export", "verify", str(run_dir)],
        ["export", "weights", "--from-artifacts", str(run_dir), "--out", "out"],
    ]


each_verb = pytest.mark.parametrize("verbs", [of_runs, pytest.param(of_artifacts, marks=pytest.mark.ort)])


def check_refused(verbs: Verbs, run_dir: Path, why: str, tmp_path: Path) -> None:
    for arguments in verbs(run_dir):
        with pytest.raises(RequestError, match=re.escape(why)) as caught:
            dispatch(arguments)
        assert str(run_dir) in str(caught.value) and TRUST in str(caught.value), arguments
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "imported").exists() and "planted_nets" not in sys.modules
    assert not (tmp_path / "out").exists()


@needs_root
@each_verb
def test_a_run_of_another_user_is_named_and_refused(verbs: Verbs, theirs: Path, tmp_path: Path) -> None:
    give_away(theirs)
    check_refused(verbs, theirs, "belongs to the user nobody", tmp_path)


@needs_root
@each_verb
def test_a_run_that_a_shared_group_may_write_is_refused(verbs: Verbs, theirs: Path, tmp_path: Path) -> None:
    share(theirs, 0o2775)
    check_refused(verbs, theirs, "can be written by the group", tmp_path)


@each_verb
def test_a_run_that_everybody_may_write_is_refused(verbs: Verbs, theirs: Path, tmp_path: Path) -> None:
    theirs.chmod(0o777)
    check_refused(verbs, theirs, "can be written by every user", tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints/step-00000004/manifest.json"])
def test_a_single_file_is_enough(theirs: Path, name: str) -> None:
    (theirs / name).chmod(0o666)
    with pytest.raises(RequestError, match=rf"resume: .*{name} can be written by every user"):
        dispatch(["resume", str(theirs)])


@needs_root
def test_a_run_that_is_trusted_goes_on(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(theirs)
    monkeypatch.setenv(TRUST, str(theirs.parents[1]))
    with pytest.raises(RequestError) as caught:
        dispatch(["resume", str(theirs), "launcher.workers_per_node=0"])
    assert "belongs to" not in str(caught.value)


@needs_root
def test_a_run_of_another_user_is_still_shown(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    give_away(theirs)
    for arguments in (["jobs"], ["status", "theirs"], ["logs", "theirs", "--log", "steps"]):
        assert dispatch(arguments) == 0
    assert re.search(r"^not yours: +it belongs to the user nobody$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("hidden", "state", "reason"),
    [
        ("accounts,jobs", State.QUEUED, "SLURM does not show the jobs of daemon to ortlaunch (PrivateData=jobs)"),
        ("none", State.KILLED, "SLURM no longer knows job 12, which had not begun"),
    ],
)
def test_a_job_that_slurm_hides_from_who_asks_is_not_taken_for_killed(
    make_run: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, state: State, reason: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, says in (("squeue", ":"), ("sacct", ":"), ("scontrol", f"echo 'PrivateData             = {hidden}'")):
        (programs / name).write_text(f"#!/bin/sh\n{says}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(cluster, "account_name", lambda: "ortlaunch")
    run = make_run(job={"scheduler": "slurm", "job_id": "12", "submitted": 1.0}, end=None, step=None)
    with Run(run).journal() as journal:
        journal.tags({STATE_TAG: "queued"})
    with of_user("daemon"):
        folder = folder_at(run)
        [row] = Survey([folder]).rows([folder])
    assert (row.state, row.is_over, row.reason) == (state, state is State.KILLED, reason)
