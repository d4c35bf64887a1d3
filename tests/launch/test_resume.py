"""Keys that are changed when a run goes on: read as those of a run are, and refused in the same words."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import save_config, to_config
from ortlaunch.config.schema import GROUPS, Config, MlflowConfig, Precision, SlurmConfig
from ortlaunch.launch import folder
from ortlaunch.launch.folder import restore_configuration, write_run_folder
from ortlaunch.launch.local.launcher import LocalLauncher
from ortlaunch.launch.plan import LaunchPlan, Start
from ortlaunch.run import claim, manifest
from ortlaunch.run.checkpoints import Store
from ortlaunch.run.identity import Process
from ortlaunch.run.run import Run
from ortlaunch.run.state import FIRST_STEP, RunState
from ortlaunch.tracking import trackers
from ortlaunch.tracking.mlflow import TRACKING_URI
from ortlaunch.verbs import resume as verbs_resume
from ortlaunch.verbs.resume import _changed, _stored_config, resume


@pytest.fixture(scope="module")
def stored() -> Config:
    return to_config(compose(["model=mlp", "backend=eager", "launcher=slurm", "device=cpu"]))


def test_values_are_what_they_are_on_the_command_line_of_a_run(stored: Config) -> None:
    """YAML would take the time for 14400, and SLURM that for minutes."""
    words = [
        "launcher.time=4:00:00",
        "optimizer.lr=1e-4",
        "train.precision=bf16",
        "name='a, b'",
        "launcher.memory=null",
    ]
    config = _changed(stored, [*words, "+launcher.env.NCCL_DEBUG=INFO"], has_checkpoint=False)
    assert isinstance(config.launcher, SlurmConfig)
    assert (config.launcher.time, config.launcher.memory) == ("4:00:00", None)
    assert (config.optimizer.lr, config.train.precision, config.name) == (1e-4, Precision.bf16, "a, b")
    assert config.launcher.env == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.stpes=5", "train.stpes: no such key. Did you mean train.steps"),
        ("launcher.master_port=1", "the chosen launcher has no such key; it belongs to launcher=local"),
        ("train.steps=many", "train.steps"),
        ("train.steps=1,2", "one value"),
        ("train.steps=nan", "train.steps=nan: must be a whole number"),
        ("name=[a", "name=[a: not understood"),
        ("launcher=local", "a run keeps what it is made of"),
        ("model=gpt2", "a run keeps what it is made of"),
        ("train.steps", "KEY=VALUE"),
        ("~train.steps=5", "KEY=VALUE"),
        ("train.steps.x=5", "train.steps"),
        ("=5", "KEY=VALUE"),
        ("data={name:text}", "a run keeps what it is made of"),
        ("data.name=text", "data.name: a run keeps what it is made of (digits)"),
        ("++model.name=gpt2", "model.name: a run keeps what it is made of (mlp)"),
        ("model.target=a:b", "model.target: a run keeps what it is made of"),
        ("+model.params.width=3", "model.params: a run keeps what it is made of"),
        ("launcher.name=local", "launcher.name: a run keeps what it is made of (slurm)"),
        ("backend.name=ort", "backend.name: a run keeps what it is made of (eager)"),
        ("experiment=other", "experiment: a run keeps what it is made of (default)"),
        ("run_root=other", "run_root: a run keeps what it is made of"),
    ],
)
def test_what_cannot_be_changed_is_said_with_its_key(stored: Config, word: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        _changed(stored, [word], has_checkpoint=False)
    message = str(caught.value)
    assert message.startswith("resume: ") and said in message and "\n" not in message


def test_every_group_keeps_its_option(stored: Config) -> None:
    for group, options in GROUPS.items():
        other = next(name for name in options if name != getattr(getattr(stored, group), "name", None))
        with pytest.raises(RequestError, match=rf"^resume: .*{group}"):
            _changed(stored, [f"{group}.name={other}"], has_checkpoint=False)


def test_with_a_checkpoint_the_data_and_the_layout_of_the_state_stay_too() -> None:
    words = ["model=gpt2_nano", "backend=eager", "device=cpu", "data=text", "data.path=a", "trainer=deepspeed"]
    stored = to_config(compose(words))
    changes = [
        "data.seq_len=64",
        "trainer.zero_stage=2",
        "seed=1",
        "optimizer.decay_bias_and_norm=true",
        "train.precision=bf16",
        "data.path=moved",
        "data.workers=1",
        "optimizer.lr=1e-5",
    ]
    _changed(stored, changes, has_checkpoint=False)
    kept = ("data.seq_len", r"trainer: .*zero_stage=1", "seed", "optimizer.decay_bias_and_norm", "train.precision")
    for change, said in zip(changes, kept, strict=False):
        with pytest.raises(RequestError, match=f"^resume: {said}"):
            _changed(stored, [change], has_checkpoint=True)
    assert _changed(stored, changes[5:], has_checkpoint=True).data.workers == 1


def test_a_configuration_that_another_launcher_writes_at_this_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = to_config(compose(["model=mlp", "backend=eager", "device=cpu"]))
    with pytest.raises(RequestError, match=r"is no run folder: it has no config\.yaml"):
        _stored_config(tmp_path)
    monkeypatch.setattr(verbs_resume, "_REWRITTEN_SECONDS", 60.0)
    Run(tmp_path).journal_file.touch()
    writer = threading.Timer(0.3, save_config, (config, tmp_path / "config.yaml"))
    writer.start()
    assert _stored_config(tmp_path).model.name == "mlp"
    writer.join()


@pytest.mark.parametrize("word", ["optimizer.lr=nan", "train.clip_grad_norm=inf", "launcher.grace_seconds=0"])
def test_a_refused_change_leaves_the_run_folder_as_it_is(tmp_path: Path, word: str) -> None:
    save_config(to_config(compose(["model=mlp", "backend=eager", "device=cpu"])), tmp_path / "config.yaml")
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(RequestError, match=f"^{word}: must be "):
        resume([str(tmp_path), "train.steps=200", word])
    assert (tmp_path / "config.yaml").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_run_has_its_configuration_at_every_moment_of_a_launch(
    stored: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the folder at this moment would take one without it for no run."""
    run = Run(tmp_path / "default" / "20260101-120000-mlp-aaaaaa")
    seen: list[bool] = []

    def watched(path: Path, *rest: str, **named: str) -> None:
        seen.append(run.config_file.is_file() and run.environment_file.is_file())
        replace_text(path, *rest, **named)

    write_run_folder(LaunchPlan(stored, run.path, "aaaaaa", "mlp", 1), Start(["torchrun"]))
    before = run.config_file.read_text()
    monkeypatch.setattr(folder, "replace_text", watched)
    other = _changed(stored, ["train.steps=7"], has_checkpoint=False)
    for attempt in (1, 1):  # The first of the two may have been killed before it has journalled anything.
        write_run_folder(LaunchPlan(other, run.path, "aaaaaa", "mlp", 1, attempt=attempt), Start(["torchrun"]))
        assert len(seen) >= 4 and all(seen)
        assert (run.earlier_attempt(1) / "config.yaml").read_text() == before
        before = run.config_file.read_text()


def test_a_journal_that_is_no_file_is_refused(stored: Config, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "journal.jsonl")
    save_config(stored, tmp_path / "config.yaml")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RequestError, match=r"^resume: .*journal.jsonl is no plain file: move it away"):
        resume([str(tmp_path)])
    assert sorted(tmp_path.rglob("*")) == before


def test_what_the_workers_refuse_is_not_kept(stored: Config, tmp_path: Path) -> None:
    """Otherwise every later resume would be refused too."""
    run_dir = tmp_path / "default" / "20260101-120000-mlp-aaaaaa"
    other = _changed(stored, ["data.image_size=16"], has_checkpoint=False)
    first, again = (LaunchPlan(one, run_dir, "aaaaaa", "mlp", 1, attempt=at) for at, one in enumerate((stored, other)))
    write_run_folder(first, Start(["torchrun"]))
    before = (run_dir / "config.yaml").read_text()
    restore_configuration(Run(run_dir), first.attempt)
    assert (run_dir / "config.yaml").read_text() == before
    write_run_folder(again, Start(["torchrun"]))
    assert (run_dir / "config.yaml").read_text() != before
    changed = (run_dir / "config.yaml").read_text()
    restore_configuration(Run(run_dir), again.attempt)
    assert (run_dir / "config.yaml").read_text() == before
    # After a step there may be checkpoints of the new configuration, which the one before would misread.
    (run_dir / "config.yaml").write_text(changed)
    with Run(run_dir).journal() as journal:
        journal.start("e", "n", "aaaaaa")
        journal.metrics(0, {FIRST_STEP: 1.0})
    restore_configuration(Run(run_dir), again.attempt)
    assert (run_dir / "config.yaml").read_text() == changed


URI = "http://ada:geheim@team:5000"


def uri_of_resumed(run_dir: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """The tracking URI with which a run goes on whose folder holds the URI above without its password."""
    config = to_config(compose(["model=mlp", "backend=eager", "device=cpu", f"tracking.uri={URI}"]))
    save_config(trackers.public(config), run_dir / "config.yaml")
    assert "geheim" not in (run_dir / "config.yaml").read_text()
    submitted: list[Config] = []
    monkeypatch.setattr(LocalLauncher, "submit", lambda _, plan: submitted.append(plan.config) or 0)
    assert resume([str(run_dir), *words]) == 0
    tracking = submitted[0].tracking
    assert isinstance(tracking, MlflowConfig)
    return tracking.uri


def test_the_password_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACKING_URI, URI)
    assert uri_of_resumed(tmp_path, monkeypatch) == URI


def test_the_command_line_overrides_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACKING_URI, URI)
    assert uri_of_resumed(tmp_path, monkeypatch, "tracking.uri=http://ada:neu@team:5000") == "http://ada:neu@team:5000"


@pytest.mark.parametrize("carried", [None, "http://ada:geheim@elsewhere:5000"], ids=["unset", "another server"])
def test_a_missing_password_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carried: str | None) -> None:
    """The stars of the run folder are no password, and the variable may be left from another run."""
    monkeypatch.delenv(TRACKING_URI, raising=False)
    if carried is not None:
        monkeypatch.setenv(TRACKING_URI, carried)
    with pytest.raises(RequestError, match=rf"^tracking\.uri: .*tracking\.uri=VALUE, or set {TRACKING_URI} to it$"):
        uri_of_resumed(tmp_path, monkeypatch)


@pytest.fixture
def stopped(tmp_path: Path) -> Run:
    """A run that was launched once and has ended."""
    config = to_config(compose(["model=mlp", "backend=eager", "device=cpu", "tracking=none"]))
    save_config(config, tmp_path / "config.yaml")
    claim.take(Run(tmp_path)).release()
    return Run(tmp_path)


def test_a_run_is_this_commands_from_the_request_to_its_end(stopped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[claim.Owner | None] = []
    monkeypatch.setattr(LocalLauncher, "submit", lambda *_: owners.append(claim.owner(stopped)) or 0)
    assert resume([str(stopped.path)]) == 0
    (owner,) = owners
    assert owner is not None and owner.process == Process.this() and not owner.is_released
    assert claim.number(stopped) == 2
    after = claim.owner(stopped)
    assert after is not None and after.is_released


def test_a_run_that_was_launched_while_the_request_was_judged_is_refused(
    stopped: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other launch may have ended already: the steps and the checkpoint are no longer those that were read."""
    submitted: list[int] = []
    monkeypatch.setattr(LocalLauncher, "submit", lambda *_: submitted.append(1) or 0)
    monkeypatch.setattr(Run, "state", lambda run: claim.take(run).release() or RunState())
    with pytest.raises(RequestError, match="was launched by another process meanwhile"):
        resume([str(stopped.path)])
    assert not submitted


def test_a_run_folder_that_takes_no_claim_is_refused(stopped: Run) -> None:
    for path in (stopped.claims / "1", stopped.claims):
        path.unlink() if path.is_file() else path.rmdir()
    stopped.claims.touch()
    with pytest.raises(RequestError, match="cannot be written: File exists"):
        resume([str(stopped.path)])


@pytest.mark.parametrize("words", [["launcher.dry_run=true"], ["optimizer.lr=nix"]], ids=["dry run", "refused"])
def test_what_is_not_launched_claims_nothing(stopped: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(LocalLauncher, "submit", lambda *_: 0)
    try:
        resume([str(stopped.path), *words])
    except RequestError:
        assert words == ["optimizer.lr=nix"]
    assert claim.number(stopped) == 1


@pytest.mark.parametrize("damaged", [False, True])
def test_fewer_steps_than_the_newest_checkpoint_has_are_refused_before_the_launch(
    stopped: Run, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """The run stays stopped. A damaged checkpoint is left to the workers, who take the one before it."""
    checkpoint = stopped.checkpoints / "step-00000313"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text("{}")
    manifest.seal(checkpoint)
    if damaged:
        (checkpoint / "run.json").write_text("")
    monkeypatch.setattr(LocalLauncher, "submit", lambda *_: 7)
    assert resume([str(stopped.path), "train.steps=313"]) == 7
    if damaged:
        assert resume([str(stopped.path), "train.steps=312"]) == 7
        return
    launches = claim.number(stopped)
    with pytest.raises(RequestError, match=r"step-00000313 was written after step 313, and train\.steps=312 is less"):
        resume([str(stopped.path), "train.steps=312"])
    assert claim.number(stopped) == launches


def test_a_run_folder_may_have_an_equals_sign_in_its_path(stopped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    place = stopped.path / "lr=0.1"
    place.mkdir()
    for path in (stopped.config_file, stopped.claims):
        path.rename(place / path.name)
    monkeypatch.setattr(LocalLauncher, "submit", lambda *_: 7)
    assert resume([str(place)]) == 7
    with pytest.raises(RequestError, match="name the run"):
        resume(["train.steps=5"])


@pytest.mark.parametrize(("checkpoint", "code"), [(None, 0), (50, 0), (100, 7)])
def test_a_run_that_was_killed_after_its_last_step_makes_no_step_again(
    stopped: Run, monkeypatch: pytest.MonkeyPatch, checkpoint: int | None, code: int
) -> None:
    """Its launcher had no time to journal the end. From a checkpoint of the last step, it has only the rest to do."""
    with stopped.journal() as journal:
        journal.start("e", "n", "aaaaaa")
    stopped.note_done(100)
    gone = asdict(Process.this()) | {"start_ticks": 1}
    stopped.launcher_file.write_text(json.dumps(gone))
    stopped.workers_lock.touch()
    if checkpoint is not None:
        store = Store(stopped.checkpoints, keep=2)
        store.begin(checkpoint)
        store.commit(checkpoint, {"step": checkpoint})
    monkeypatch.setattr(LocalLauncher, "submit", lambda *_: 7)
    assert resume([str(stopped.path), "train.steps=100"]) == code
    assert stopped.state().ended == ("FINISHED" if code == 0 else None)
