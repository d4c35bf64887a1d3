"""Thirty kinds of secret in everything that a run is given; nothing of them in what it leaves and prints."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import stat
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config.hidden import check_whole
from ortlaunch.config.load import load_config, to_config, to_dict
from ortlaunch.config.schema import Config, MlflowConfig
from ortlaunch.launch import folder
from ortlaunch.launch.local.workers import WorkerGroup
from ortlaunch.launch.plan import Start
from ortlaunch.launch.planning import make_plan
from ortlaunch.run import failure, sweep
from ortlaunch.run.run import Run
from ortlaunch.tracking import trackers
from ortlaunch.tracking.destination import destinations_of
from ortlaunch.tracking.relay import sync
from ortlaunch.verbs.multirun import combination_name
from tests.support.cli import answer
from tests.support.planted import BY_NAME, BY_SHAPE, VARIABLES, found_in, left_in_files, public_files

ALL = "\n".join(BY_SHAPE.values())


def planted(store: MlflowConfig, run_root: Path) -> Config:
    """A configuration with a secret of each kind, under harmless names and under secrets' names."""
    config = to_config(compose(["model=mlp", "data=digits", "tracking=[mlflow,tensorboard]", f"run_root={run_root}"]))
    params = {f"note_{number}": value for number, value in enumerate(BY_SHAPE.values())}
    nested = {"deep": [{"of": list(BY_SHAPE.values())}, BY_NAME], "steps": 3, "pad_token": "<pad>"}
    model = dataclasses.replace(config.model, params=params | BY_NAME | nested)
    return dataclasses.replace(config, model=model, tracking=store, experiment="planted")


def words_of(config: Config) -> list[str]:
    """The command line of it."""
    given = {key: value for key, value in config.model.params.items() if isinstance(value, str)}
    words = [f"+model.params.{key}={value}" for key, value in given.items()]
    return [*words, "--password", "hunter2", "+model.params={a:1,api_key:hunter2}", "tracking.uri=http://a:hunter2@h"]


@pytest.fixture
def left(store: MlflowConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, and of its sweep, that were given all of it and failed with all of it."""
    monkeypatch.chdir(tmp_path)
    for name, value in {**VARIABLES, "NCCL_NOTE": BY_SHAPE["gitlab"], "TORCH_PROXY": "http://a:hunter2@h"}.items():
        monkeypatch.setenv(name, value)
    config = planted(store, tmp_path / "runs")
    plan = make_plan(config)
    start = Start(["torchrun", "--token", "hunter2"], {"NOTE": BY_SHAPE["jwt"], "DB_PASS": "hunter2"})
    in_sweep = dataclasses.replace(plan, sweep=sweep.SweepTask(tmp_path / "runs/planted/multirun-1", 0))
    in_sweep.sweep.folder.mkdir(parents=True)
    text = json.dumps({"hydra": {"overrides": {"task": words_of(config)}}, "tracking": {"uri": "http://a:hunter2@h"}})
    (in_sweep.sweep.folder / sweep.HYDRA_FILE).write_text(text)
    public = trackers.public_settings(config)
    sweep.create(in_sweep.sweep.folder, "s", "planted", public["tracking"], ["ortlaunch", *words_of(config)])
    folder.write_run_folder(dataclasses.replace(in_sweep, arguments=tuple(words_of(config))), start)
    with Run(plan.run_dir).journal() as journal:
        folder.journal_start(journal, plan)
        journal.params({"model": {"params": config.model.params}})
        journal.tags({"ortlaunch.requeue_reason": ALL, "note": shlex.join(words_of(config))})
        journal.metrics(1, {"train/loss": 1.0, "throughput/tokens_per_second": 10.0})
        journal.rewind(1, ALL)
        journal.requeue(ALL, 1)
        journal.dataset(BY_SHAPE["npm"], "0", BY_SHAPE["password with @"])
        journal.failure(0, "host", f"Traceback\n{ALL}\nValueError: {BY_SHAPE['gitlab']}")
        journal.end("FAILED")
    failure.record(plan.run_dir, 0, ValueError(ALL))
    sent = sync(plan.run_dir, *trackers.chosen(config))
    assert sent.sent, sent.message
    return plan.run_dir


def run_verb(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    said = answer(Path.cwd(), capfd, *words)
    return said.stdout + said.stderr


def test_no_secret_is_left_in_any_file_or_shown_by_any_verb(
    left: Path,
    store: MlflowConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert len(BY_SHAPE) + len(BY_NAME) >= 60
    kept = Path(store.artifacts).parent
    assert {path.name for path in kept.rglob("*")} >= {"mlruns.db", "config.yaml", "overrides.yaml", "env.json"}
    assert left_in_files(tmp_path, kept) == {}
    assert public_files([tmp_path / "runs"]) == []
    shown = Run(left).config_file.read_text()
    assert "steps: 3" in shown and "<pad>" in shown
    run_id = Run(left).mlflow_run_id() or ""
    verbs = [
        *(["status", str(left)], ["status", str(left), "--json"], ["logs", str(left), "--log", "steps"]),
        *(["jobs", "--root", str(tmp_path / "runs"), *more] for more in ([], ["--json"])),
        *(["compare", run_id, "--uri", store.uri, "--format", one] for one in ("table", "json", "markdown")),
        ["cancel", str(left)],
    ]
    for words in verbs:
        said = run_verb(capfd, *words)
        assert said and found_in(said) == [], words


def test_an_error_shows_no_secret(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> int:
        raise RequestError(f"cannot: {ALL}")

    monkeypatch.setattr("ortlaunch.cli.dispatch", fail)
    said = run_verb(capfd, "run")
    assert "cannot" in said and found_in(said) == []


def test_the_configuration_that_is_shown_has_no_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "model=mlp",
        "+model.params.db_pass=two hunter2",
        "+model.params.note=https://a:hunter2@h/x",
        "train.steps=7",
    ]
    said = run_verb(capfd, *words, "--cfg", "job")
    assert "steps: 7" in said and "db_pass: ***" in said and found_in(said) == []


def test_workers_get_what_the_folder_does_not_hold(left: Path, store: MlflowConfig, tmp_path: Path) -> None:
    config = planted(store, tmp_path / "runs")
    stored = load_config(Run(left).config_file)
    with pytest.raises(RequestError, match=r"model\.params\.\w+, .*: .* set the variable ORTLAUNCH_SECRETS"):
        check_whole(to_dict(stored))
    variables = trackers.worker_environment(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(variables.items())))
        assert load_config(Run(left).config_file).model == config.model
    got = tmp_path / "got"
    group = WorkerGroup(Start(["sh", "-c", f"printenv ORTLAUNCH_SECRETS > {got}"], variables), tmp_path / "log", 0.0)
    group._process.wait(timeout=100)
    assert json.loads(got.read_text())["model.params.db_pass"] == "x-hunter2"


def test_a_variable_of_another_run_is_not_taken(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model.name": "other", "model.params.steps": "other", "train.steps": "other"}
    monkeypatch.setenv("ORTLAUNCH_SECRETS", json.dumps(values))
    assert load_config(Run(left).config_file).model.name == "mlp"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([f"name={BY_SHAPE['gitlab']}"], "name"),
        ([f"experiment={BY_SHAPE['openai']}"], "experiment"),
        ([f"run_root=/tmp/{BY_SHAPE['slack bot']}"], "run_root"),
        (["launcher=slurm", f"+launcher.env.NOTE={BY_SHAPE['hugging face']}"], r"launcher\.env\.NOTE"),
        (["launcher=slurm", "launcher.setup=['export DB_PASS=hunter2']"], r"launcher\.setup\.0"),
        (["launcher=slurm", "launcher.extra=['--comment=glpat-Hunter2Hunter2Hunter2']"], r"launcher\.extra\.0"),
        (["tracking.artifacts='s3://KEY:hunter2@bucket/x'"], r"tracking\.artifacts"),
    ],
)
def test_a_secret_in_what_must_be_written_is_refused(words: list[str], key: str) -> None:
    with pytest.raises(RequestError, match=rf"^{key}=") as refused:
        check(to_config(compose(["model=mlp", "data=digits", *words])))
    assert found_in(str(refused.value)) == []


@pytest.mark.parametrize(
    "word", ["export API_KEY=$(cat ~/.key)", "module load cuda", "export SSL_KEY=/etc/ssl/key.pem"]
)
def test_where_a_secret_lies_may_be_written(word: str) -> None:
    check(to_config(compose(["model=mlp", "data=digits", "launcher=slurm", f"launcher.setup=['{word}']"])))


def test_a_swept_secret_is_not_in_the_name() -> None:
    config = to_config(compose(["model=mlp", "backend=eager"]))
    name = combination_name(config, ["+model.params.api_key=hunter2,x"], ["+model.params.api_key=hunter2"])
    assert name == "mlp-eager-ddp-api_key=***"


@pytest.fixture
def with_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ORTLAUNCH_TRACKING_URI", raising=False)
    config = to_config(compose(["model=mlp", "data=digits", "tracking.uri='http://ann:p%40ss-hunter2@host.invalid'"]))
    plan = make_plan(config)
    folder.write_run_folder(plan, Start(["torchrun"]))
    with Run(plan.run_dir).journal() as journal:
        folder.journal_start(journal, plan)
    assert left_in_files(tmp_path) == {}
    return plan.run_dir


def test_a_run_is_not_sent_with_stars_for_its_password(
    with_password: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = run_verb(capfd, "sync", str(with_password))
    assert "without its password: set ORTLAUNCH_TRACKING_URI to the whole URI, or give it by --uri" in said
    uri = "http://ann:p%40ss-hunter2@host.invalid"
    monkeypatch.setenv("ORTLAUNCH_TRACKING_URI", uri)
    assert [cfg.uri for cfg in destinations_of(with_password)] == [uri]
    monkeypatch.setenv("ORTLAUNCH_TRACKING_URI", "http://ann:other@elsewhere.invalid")
    with pytest.raises(RequestError, match="without its password"):
        destinations_of(with_password)
    monkeypatch.setenv("ORTLAUNCH_SECRETS", json.dumps({"tracking.uri": uri}))
    assert [cfg.uri for cfg in destinations_of(with_password)] == [uri]


def test_one_run_without_its_password_does_not_keep_others_from_being_sent(
    with_password: Path, store: MlflowConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = to_config(compose(["model=mlp", "data=digits"]))
    other = make_plan(dataclasses.replace(config, tracking=store))
    folder.write_run_folder(other, Start(["torchrun"]))
    with Run(other.run_dir).journal() as journal:
        folder.journal_start(journal, other)
        journal.end("FINISHED")
    said = run_verb(capfd, "sync", "--all")
    assert "without its password" in said and f"{other.run_dir.name}" in said and "events sent" in said


def test_files_with_something_hidden_are_for_their_owner_alone(with_password: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in with_password.iterdir() if path.is_file()}
    assert modes["config.yaml"] == modes["journal.jsonl"] == 0o600
    assert modes["packages.txt"] == 0o644 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_batch_script_holds_no_secret_of_the_configuration(
    store: MlflowConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    from ortlaunch.launch.slurm.launcher import SlurmLauncher

    words = ["model=mlp", "data=digits", "launcher=slurm", "launcher.workers_per_node=1"]
    config = to_config(compose(words))
    given = planted(store, tmp_path / "runs")
    config = dataclasses.replace(config, model=given.model, tracking=given.tracking, experiment="planted")
    launcher = SlurmLauncher()
    config = launcher.settle(config)
    plan = make_plan(config, arguments=words_of(given))
    launcher.prepare(plan)
    launcher.write_script(plan.run_dir, launcher.script(plan))
    assert left_in_files(tmp_path) == {}
    carried = json.loads(launcher.environment(config)["ORTLAUNCH_SECRETS"])
    assert carried["model.params.db_pass"] == "x-hunter2"
