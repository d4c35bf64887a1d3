"""The record of what surrounded a run holds what matters and no secrets."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ortlaunch.base.secrets import without_secrets
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.launch import environment, folder
from ortlaunch.launch.plan import Start
from ortlaunch.launch.planning import make_plan
from ortlaunch.tracking.journal import Journal, read_events

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "aws-hunter2-secret",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-hunter2",
    "HF_TOKEN": "hf_hunter2hunter2hunter2",
    "NCCL_MY_TOKEN": "nccl-hunter2",
    "ORTLAUNCH_API_KEY": "ort-hunter2",
    "TORCH_AUTH": "torch-hunter2",
    # Too short to be looked for elsewhere.
    "NCCL_PASSWORD": "hunter2",
    "ORTLAUNCH_TRACKING_URI": "https://ann:hunter2pass@mlflow.example/x",
    "TORCH_PROXY": "http://proxy.example/?api_token=hunter2query",
    "NCCL_HEADER": "Bearer hunter2hunter2",
    # A secret's value, in a variable that looks harmless.
    "NCCL_DEBUG_FILE": "/tmp/aws-hunter2-secret.log",
}


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def test_what_is_allowed_is_recorded_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JWT", "ey")
    monkeypatch.setenv("SOME_OTHER_VARIABLE", "1")
    record = environment.describe(["model=gpt2"])
    assert record["variables"]["NCCL_DEBUG"] == "INFO"
    assert environment.slurm_variables() == {"SLURM_JOB_ID": "42"}
    assert not {"SLURM_JWT", "SOME_OTHER_VARIABLE", "HOME", "PATH"} & record["variables"].keys()
    assert record["command"] == ["ortlaunch", "model=gpt2"]
    assert record["packages"]["deepspeed"]


def test_secrets_in_the_environment_are_not_recorded(secrets: None) -> None:
    text = json.dumps(environment.describe(["model=gpt2", "tracking.uri=https://ann:hunter2@host"]))
    assert "hunter2" not in text
    assert "NCCL_MY_TOKEN" not in text
    # What is not secret of it stays.
    assert "https://ann:***@mlflow.example/x" in text
    assert "/tmp/***.log" in text


def test_no_secret_reaches_folder_or_journal(secrets: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written at a run's start, the user having typed two of the secrets as well."""
    monkeypatch.chdir(tmp_path)
    words = ["model=mlp", "tracking.uri=https://ann:hunter2@mlflow.example", "name='a run'"]
    config = to_config(compose(words))
    plan = make_plan(config, arguments=[*words, "+note=aws-hunter2-secret"])
    start = Start(["torchrun", "--note=aws-hunter2-secret"], {"PROXY": "http://ann:hunter2@proxy.example"})
    folder.write_run_folder(plan, start)
    folder.journal_start(Journal(plan.journal), plan)
    written = [path for path in plan.run_dir.rglob("*") if path.is_file()]
    assert {"env.json", "packages.txt", "journal.jsonl"} <= {path.name for path in written}
    for path in written:
        assert b"hunter2" not in path.read_bytes(), path


def test_the_command_can_be_typed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=mlp", "name=it's a $run", "tracking=none"]
    config = to_config(compose(["model=mlp", "tracking=none"]))
    plan = make_plan(config, arguments=words)
    folder.write_run_folder(plan, Start(["torchrun"]))
    folder.journal_start(Journal(plan.journal), plan)
    events, _ = read_events(plan.journal, 0)
    (tags,) = [event["values"] for event in events if event["event"] == "tags"]
    assert shlex.split(tags["ortlaunch.command"]) == ["ortlaunch", *words]
    assert {event["path"] for event in events if event["event"] == "artifact"} == {
        *("config.yaml", "overrides.yaml", "env.json", "packages.txt")
    }


def test_short_values_and_paths_are_no_secrets() -> None:
    values = {"USE_AUTH": "1", "SSL_KEY": "/etc/ssl/private", "DB_PASSWORD": "correct horse"}
    text = "1 step under /etc/ssl/private with correct horse"
    assert without_secrets(text, values) == "1 step under /etc/ssl/private with ***"


def test_secrets_of_trackers_on_the_command_line_are_not_written_down() -> None:
    text = (
        "ortlaunch +trackers.mine.api_key=abc123 tracking.password=def model.params.tokenizer=x trackers.mine.user=me"
    )
    assert without_secrets(text, {}) == (
        "ortlaunch +trackers.mine.api_key=*** tracking.password=*** model.params.tokenizer=x trackers.mine.user=me"
    )


def test_every_package_is_listed_once_with_its_version() -> None:
    lines = environment.packages().splitlines()
    names = [line.partition("==")[0].lower() for line in lines]
    assert len(names) == len(set(names)) > 50
    assert names == sorted(names)
    assert any(line.startswith("psutil==") for line in lines)


class _Broken:
    """What an interrupted installation leaves."""

    def read_text(self, name: str) -> None:
        return None


class _Editable:
    version = "1.0"

    def read_text(self, name: str) -> str:
        if name == "METADATA":
            return f"Metadata-Version: 2.4\nName: Mine\nVersion: {self.version}\n\nName: not a field\n"
        return json.dumps({"url": "https://me:hunter2@git.example/mine", "vcs_info": {"commit_id": "abc"}})


def test_packages_of_no_index_say_where_they_are_from_and_broken_ones_are_passed_over() -> None:
    class Hidden(_Editable):
        version = "2.0"

    lines = environment._package_lines([_Broken(), _Editable(), Hidden()])  # type: ignore[list-item]
    assert lines == ["Mine==1.0 @ https://me:***@git.example/mine@abc"]
