"""Which backend a run has if nobody names one, and what is refused in a Python without onnxruntime-training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose_with_reason
from ortlaunch.compose.rules import check
from ortlaunch.config import backends
from ortlaunch.config.default_options import default_options
from ortlaunch.config.load import save_config, to_config
from ortlaunch.config.schema import OrtConfig
from ortlaunch.doctor import stack
from ortlaunch.doctor.line import Level
from ortlaunch.export.verify_command import main as verify
from ortlaunch.launch import folder
from ortlaunch.launch.plan import Start
from ortlaunch.launch.planning import make_plan
from ortlaunch.launch.work import work_of
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from tests.support.cli import answer
from tests.support.ort import pretend_no_ort, pretend_ort

REFUSED = "needs onnxruntime-training, which is not here: "
ABSENCE = backends._absence


@pytest.fixture
def no_ort(ort_as_if_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_no_ort(monkeypatch)


@pytest.mark.parametrize(
    ("version", "installed", "words"),
    [
        ((3, 11), "onnxruntime/training/ortmodule/__init__.py", None),
        ((3, 12), "onnxruntime/training/ortmodule/__init__.py", None),
        ((3, 11), "onnxruntime/__init__.py", "the installed onnxruntime has no training part"),
        ((3, 11), "", "which is not installed"),
        ((3, 12), "", "which has wheels up to Python 3.11 only, and this is Python 3."),
        ((3, 13), "onnxruntime/__init__.py", "which has wheels up to Python 3.11 only"),
    ],
)
def test_what_is_installed_is_judged_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], installed: str, words: str | None
) -> None:
    if installed:
        (tmp_path / installed).parent.mkdir(parents=True)
        (tmp_path / installed).touch()
    folders = [tmp_path / "onnxruntime"] if installed else []
    monkeypatch.setattr(backends, "_absence", ABSENCE)
    monkeypatch.setattr(backends, "_folders_of", lambda _: folders)
    monkeypatch.setattr(sys, "version_info", (*version, 1, "final", 0))
    why = backends.why_no_ort("backend=ort")
    assert why is None if words is None else why is not None and words in why
    assert "\n" not in (why or "")
    assert ("use Python 3.11 and" in backends.remedy()) == (version > (3, 11))


def test_ort_is_the_default_where_it_is_installed() -> None:
    tree, reason = compose_with_reason([])
    assert (tree.backend.name, reason, default_options()["backend"]) == ("ort", None, "ort")
    assert "hydra" not in tree


@pytest.mark.usefixtures("no_ort")
def test_eager_is_the_default_elsewhere_and_the_reason_is_known() -> None:
    tree, reason = compose_with_reason([])
    check(to_config(tree))
    assert (tree.backend.name, default_options()["backend"]) == ("eager", "eager")
    assert reason == "backend=eager by default: backend=ort needs onnxruntime-training, which is not here"
    for word in ("backend=eager", "backend=compile", "+jobs=gpt2_eager"):
        assert compose_with_reason([word])[1] is None, word


@pytest.mark.usefixtures("no_ort")
@pytest.mark.parametrize(
    "words",
    [
        ["backend=ort"],
        ["backend=ort", "launcher.dry_run=true"],
        ["+jobs=gpt2_ort"],
        ["launcher=slurm", "backend=ort", "launcher.dry_run=true"],
        ["backend=ort", "train.steps=1,2", "--multirun"],
        ["bench", "backend=ort", "repeat=1"],
        ["check"],
        ["export", "onnx", "out=made"],
        ["export", "inference", "out=made"],
        ["export", "artifacts", "out=made"],
        ["export", "weights", "--from-artifacts", "exported", "--out", "made"],
    ],
)
def test_what_needs_ort_is_refused_before_anything_is_made(tmp_path, capfd, words: list[str]) -> None:
    result = answer(tmp_path, capfd, *words)
    assert result.returncode == 2
    assert REFUSED in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_ort")
def test_artifacts_cannot_be_verified_either() -> None:
    with pytest.raises(RequestError, match=REFUSED):
        verify(["exported"])


@pytest.mark.usefixtures("no_ort")
def test_a_run_of_ort_is_not_resumed_with_another_backend(tmp_path, capfd) -> None:
    run_dir = tmp_path / "runs" / "default" / "20260101-000000-gpt2_nano-ort-ddp-0a1b2c"
    run_dir.mkdir(parents=True)
    config = to_config(compose_with_reason(["device=cpu", "backend=eager", f"run_root={tmp_path}/runs"])[0])
    config.backend = OrtConfig()
    save_config(config, run_dir / "config.yaml")
    before = sorted(tmp_path.rglob("*"))
    result = answer(tmp_path, capfd, "resume", str(run_dir))
    assert result.returncode == 2
    assert "resume: backend=ort, which the run keeps, " + REFUSED in result.stderr
    assert "choose backend" not in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("no_ort")
def test_nodes_with_a_python_of_their_own_are_asked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("launcher.python=/opt/python3.11", "launcher.container.image=image.sqsh"):
        config = to_config(compose_with_reason(["backend=ort", "launcher=slurm", word])[0])
        check(config)
        assert work_of(config).missing_here() == ["backend=ort needs onnxruntime-training, which is not here"]
    pretend_ort(monkeypatch)
    assert work_of(config).missing_here() == []


@pytest.mark.parametrize(("warmup", "said"), [(9, ""), (10, "scheduler.warmup_steps=10"), (200, "train.steps=10,")])
def test_a_warm_up_that_does_not_end_is_said(warmup: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = to_config(compose_with_reason(["train.steps=10", f"scheduler.warmup_steps={warmup}"])[0])
    # The peak is reached in a step, or it is said that it is not.
    assert (max(config.scheduler.factor(done, 10) for done in range(10)) < 1) == bool(said)
    folder.say_notes(make_plan(config))
    told = capsys.readouterr().err
    assert said in told if said else not told


@pytest.mark.usefixtures("no_ort")
def test_the_default_is_said_and_recorded(tmp_path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ([], ["launcher=slurm"], ["train.steps=1,2", "--multirun"]):
        result = answer(tmp_path, capfd, "launcher.dry_run=true", *words)
        assert result.returncode == 0, result.stderr
        assert "backend=eager by default: backend=ort needs onnxruntime-training" in result.stdout + result.stderr
    chosen = answer(tmp_path, capfd, "backend=eager", "launcher.dry_run=true")
    assert "by default" not in chosen.stdout + chosen.stderr
    monkeypatch.chdir(tmp_path)
    tree, reason = compose_with_reason(["tracking=none", "device=cpu"])
    config = to_config(tree)
    plan = make_plan(config, reason)
    folder.write_run_folder(plan, Start([]))
    with Journal(plan.journal) as journal:
        folder.journal_start(journal, plan)
    folder.say_notes(plan)
    assert capfd.readouterr().err == f"note: {reason}\n"
    assert Run(plan.run_dir).state().tags["ortlaunch.backend_reason"] == reason


@pytest.mark.usefixtures("no_ort")
def test_doctor_says_what_this_python_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "_version", lambda _: None)
    for version, level, mend in [((3, 11), Level.warning, "pip install 'ortlaunch[ort]'"), ((3, 13), Level.ok, None)]:
        monkeypatch.setattr(sys, "version_info", (*version, 1, "final", 0))
        (python,), (ort,) = stack.python(), stack.packages()
        assert python.level is Level.ok
        assert ("need 3.11" in python.text) == (version > (3, 11))
        assert (ort.level, ort.fix) == (level, mend)
        assert "backend=eager by default" in ort.text
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    (python,) = stack.python()
    assert python.level is Level.error and "3.11 to 3.13" in python.text
