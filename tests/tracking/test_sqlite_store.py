"""An embedded store is complete or absent; one that is neither is noticed, named and repaired without losing runs."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compare.command import main as compare
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.config.tracking_uri import sqlite_path, sqlite_uri
from ortlaunch.doctor import tracking
from ortlaunch.doctor.fix import fix
from ortlaunch.doctor.line import Level
from ortlaunch.follow.sync import sync_main
from ortlaunch.run.journal import Journal
from ortlaunch.tracking import make_store, sqlite_store
from ortlaunch.tracking.sqlite_store import State, look
from tests.support.cli import ortlaunch
from tests.support.environment import environment
from tests.support.waiting import until

NewRun = Callable[..., tuple[Path, Journal]]


def half_made(path: Path) -> None:
    """Leaves what a process leaves that was killed while MLflow made a store: some tables, no migration done."""
    from mlflow.store.db.utils import create_sqlalchemy_engine
    from mlflow.store.tracking.dbmodels.initial_models import Base

    engine = create_sqlalchemy_engine(sqlite_uri(path))
    Base.metadata.create_all(engine)
    engine.dispose()


def size_of(path: Path) -> int:
    """The size of a file that SQLite may remove at any moment, as it does with its journal."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_the_newest_revision_is_mlflows_own() -> None:
    from mlflow.store.db.utils import _get_latest_schema_revision

    known, heads = sqlite_store.migrations()
    assert heads == {_get_latest_schema_revision()} and len(known) > 50


def test_no_signal_to_a_run_cuts_off_the_making_of_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two Ctrl-C and a kill of the whole process group, while MLflow migrates."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))  # No template.
    path = tmp_path / "mlruns.db"
    code = "import sys; from pathlib import Path; from ortlaunch.tracking import sqlite_store\n"
    code += "sqlite_store.ensure(Path(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], env=environment(), start_new_session=True, stderr=subprocess.DEVNULL
    )
    until(lambda: process.poll() is not None or any(map(size_of, tmp_path.glob(".mlruns.db.new-*"))))
    assert process.poll() is None
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
    assert process.wait(60) and not path.exists(), "it was cut off while the store was being made"
    until(path.exists)
    assert look(path).state is State.COMPLETE
    until(lambda: not list(tmp_path.glob(".mlruns.db.new-*")))


def test_a_half_made_store_is_named_by_everything_and_repaired(
    tmp_path: Path, new_run: NewRun, client: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortlaunch.tracking.relay._BACKOFF_SECONDS", (0.01, 0.01))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    path = tmp_path / "it's 100%" / "mlruns.db"
    path.parent.mkdir()
    half_made(path)
    uri = sqlite_uri(path)
    before = path.read_bytes()
    run_dir, journal = new_run("half")
    journal.metrics(1, {"a": 1})
    journal.end("FINISHED")
    (run_dir / "config.yaml").write_text("tracking: {name: mlflow}\n")
    assert sync_main([str(run_dir), "--uri", uri]) == 1
    said = capfd.readouterr()
    assert f"{path} is only half made" in said.out and "ortlaunch doctor --fix --uri" in said.out
    assert "sql" not in said.out.lower().replace("sqlite:", "") and said.err == ""
    with pytest.raises(RequestError, match="is only half made") as raised:
        compare([], uri, "half")
    assert len(str(raised.value).splitlines()) == 1
    assert path.read_bytes() == before, "nobody has changed it"
    (line,) = tracking.mlflow(uri)
    assert line.level is Level.error and "is only half made" in line.text and not line.by_hand
    assert fix([line]) == 1
    (line,) = tracking.mlflow(uri)
    assert line.level is Level.ok, capfd.readouterr()
    assert (path.parent / "mlruns.db.old-1").read_bytes() == before
    assert sync_main([str(run_dir), "--uri", uri]) == 0
    assert [run.data.metrics for run in client(uri).search_runs(["0", "1"])] == [{"a": 1}]


def test_an_upgrade_that_was_cut_off_loses_no_run(
    tmp_path: Path, new_run: NewRun, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow cannot go on with the migrations: what they make is there already."""
    from ortlaunch.tracking.relay import sync

    monkeypatch.setattr("ortlaunch.tracking.relay._BACKOFF_SECONDS", (0.01, 0.01))
    path = tmp_path / "mlruns.db"
    cfg = MlflowConfig(uri=sqlite_uri(path), artifacts=str(tmp_path / "artifacts"))
    run_dir, journal = new_run("upgraded")
    (run_dir / "config.yaml").write_text("tracking: {name: mlflow}\n")
    journal.params({"lr": 0.1})
    journal.metrics(1, {"a": 1})
    journal.metrics(2, {"a": 2})
    journal.dataset("text", "d", "data.path=x")
    run_id = sync(run_dir, cfg).mlflow_run_id
    assert run_id is not None
    with closing(sqlite3.connect(path)) as database, database:
        # An earlier revision, although everything of the later ones is there.
        database.execute("update alembic_version set version_num = '0584bdc529eb'")
    found = look(path)
    assert (found.state, found.runs) == (State.OUTDATED, 1) and "(1 run)" in found.problem
    journal.end("FINISHED")
    assert not sync(run_dir, cfg).sent, "MLflow must not migrate a store in a process that may be ended"
    assert "holds 1 run;" in make_store.repair(path)
    assert look(path).state is State.COMPLETE
    # SQLite keeps this process, which has the old file open, from writing to it.
    assert not sync(run_dir, cfg).sent
    result = ortlaunch(tmp_path, "sync", str(run_dir), "--uri", cfg.uri)
    assert result.returncode == 0, result.stdout
    opened = client(f"{cfg.uri}?timeout=9")  # MLflow would use the open file again for the same URI.
    run = opened.get_run(run_id)
    assert (run.data.params, run.data.metrics, run.info.status) == ({"lr": "0.1"}, {"a": 2}, "FINISHED")
    assert [used.dataset.name for used in run.inputs.dataset_inputs] == ["text"]
    assert len(opened.get_metric_history(run_id, "a")) == 2


def test_what_a_killed_maker_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_store, "make", lambda path: path.write_text("made"))
    path = tmp_path / "mlruns.db"
    gone = tmp_path / f".mlruns.db.new-{os.uname().nodename}-999999999-journal"
    mine = tmp_path / f".mlruns.db.new-{os.uname().nodename}-{os.getpid()}"
    others = tmp_path / ".mlruns.db.new-elsewhere-999999999"
    for file in (gone, mine, others):
        file.touch()
    assert make_store.main([str(path)]) == 0
    assert (gone.exists(), mine.exists(), others.exists(), path.read_text()) == (False, True, True, "made")


@pytest.mark.parametrize("content", ["absent", "empty", "taken"])
def test_a_store_gets_its_name_only_if_no_other_has_it(tmp_path: Path, content: str) -> None:
    new, path = tmp_path / "new", tmp_path / "mlruns.db"
    new.write_text("mine")
    if content != "absent":
        path.write_text("" if content == "empty" else "theirs")
    sqlite_store.publish(new, path)
    assert path.read_text() == ("theirs" if content == "taken" else "mine")


def test_a_store_that_cannot_be_made_is_one_line_at_once(tmp_path: Path) -> None:
    """MLflow alone would try for minutes."""
    (tmp_path / "file").touch()
    began = time.monotonic()
    with pytest.raises(OSError, match="Not a directory"):
        sqlite_store.ensure(tmp_path / "file" / "mlruns.db")
    assert time.monotonic() - began < 90


def test_states_of_other_files(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    assert look(path).state is State.ABSENT
    path.touch()
    assert look(path).state is State.ABSENT
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table mine (x)")
        database.commit()
        assert look(path).state is State.FOREIGN
        database.executescript(
            "create table runs (x); create table experiments (x); create table alembic_version (version_num text);"
            "insert into alembic_version values ('of_the_future')"
        )
        assert look(path).state is State.NEWER
    path.write_text("no database " * 100)
    with pytest.raises(sqlite3.DatabaseError):
        look(path)
    assert sqlite_path(sqlite_uri(path)) == path
