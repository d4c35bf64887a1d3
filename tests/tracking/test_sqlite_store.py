"""An embedded store is complete or absent; one that is neither is noticed, named and left as it is."""

from __future__ import annotations

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
from ortlaunch.doctor.line import Level
from ortlaunch.follow.sync import sync_main
from ortlaunch.run.journal import Journal
from ortlaunch.tracking import sqlite_store, store
from ortlaunch.tracking.sqlite_store import State, look
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


def test_a_killed_maker_leaves_no_store_and_the_next_one_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))  # No template.
    path = tmp_path / "mlruns.db"
    code = "import sys; from pathlib import Path; from ortlaunch.tracking import store\n"
    code += "store.ensure(Path(sys.argv[1]))"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment(), stderr=subprocess.DEVNULL)
    until(lambda: process.poll() is not None or size_of(tmp_path / ".mlruns.db.new") > 0)
    process.kill()
    assert process.wait(60) and not path.exists(), "it was killed while the store was being made"
    store.ensure(path)
    assert look(path).state is State.COMPLETE
    assert sorted(one.name for one in tmp_path.iterdir()) == [".mlruns.db.lock", "cache", "mlruns.db"]


def test_a_half_made_store_is_named_by_everything_and_changed_by_nothing(
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
    assert f"{path} is only half made" in said.out and "ortlaunch sync --all" in said.out
    assert "sql" not in said.out.lower().replace("sqlite:", "") and said.err == ""
    with pytest.raises(RequestError, match="is only half made") as raised:
        compare([], uri, "half")
    assert len(str(raised.value).splitlines()) == 1
    assert path.read_bytes() == before, "nobody has changed it"
    (line,) = tracking.mlflow(uri)
    assert line.level is Level.error and "is only half made" in line.text
    path.rename(path.parent / "mlruns.db.old")
    assert sync_main([str(run_dir), "--uri", uri]) == 0
    assert [run.data.metrics for run in client(uri).search_runs(["0", "1"])] == [{"a": 1}]


def test_an_older_store_is_left_to_mlflows_own_upgrade(
    tmp_path: Path, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow must not migrate a store in a process that may be ended."""
    from ortlaunch.tracking.relay import sync

    monkeypatch.setattr("ortlaunch.tracking.relay._BACKOFF_SECONDS", (0.01, 0.01))
    path = tmp_path / "mlruns.db"
    cfg = MlflowConfig(uri=sqlite_uri(path), artifacts=str(tmp_path / "artifacts"))
    run_dir, journal = new_run("upgraded")
    (run_dir / "config.yaml").write_text("tracking: {name: mlflow}\n")
    journal.metrics(1, {"a": 1})
    assert sync(run_dir, cfg).mlflow_run_id is not None
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("update alembic_version set version_num = '0584bdc529eb'")
    found = look(path)
    assert (found.state, found.runs) == (State.OUTDATED, 1)
    assert "(1 run)" in found.problem and f"mlflow db upgrade {cfg.uri}" in found.problem
    journal.end("FINISHED")
    assert not sync(run_dir, cfg).sent


def test_a_store_that_cannot_be_made_is_one_line_at_once(tmp_path: Path) -> None:
    """MLflow alone would try for minutes."""
    (tmp_path / "file").touch()
    began = time.monotonic()
    with pytest.raises(OSError, match="Not a directory"):
        store.ensure(tmp_path / "file" / "mlruns.db")
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
