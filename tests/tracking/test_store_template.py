"""A new MLflow store as a copy of one that was made before."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ortlaunch.config.tracking_uri import sqlite_uri
from ortlaunch.tracking import sqlite_store, store, store_template
from ortlaunch.tracking.sqlite_store import State, look


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of MLflow's own migrations, and in the cache beside it its template."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAUNCH_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        store.ensure(folder / "mlruns.db")
    return folder / "mlruns.db"


@pytest.fixture
def template(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A template of this test's own, in the cache; MLflow makes no store here."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (kept,) = (made.parent / "cache").glob("*/*.db")
    store_template.folder().mkdir(parents=True)
    copy = store_template.folder() / kept.name
    copy.write_bytes(kept.read_bytes())
    monkeypatch.setattr(store, "_migrate", lambda path: path.write_text("by MLflow"))
    monkeypatch.setattr(sqlite_store, "check", lambda path: None)
    return copy


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return list(database.iterdump())


def test_a_copy_differs_from_what_mlflow_makes_by_place_and_time_alone(made: Path, template: Path) -> None:
    path = Path("mlruns.db").absolute()
    store.ensure(path)
    assert look(path).state is State.COMPLETE
    ours, theirs = dump(path), dump(made)
    unlike = [(one, other) for one, other in zip(ours, theirs, strict=True) if one != other]
    (((one, other)),) = unlike
    assert f"'{path.parent}/mlruns/0'" in one and f"'{made.parent}/mlruns/0'" in other
    assert sorted(path.name for path in Path().iterdir()) == [".mlruns.db.lock", "cache", "mlruns.db"]


def test_mlflow_writes_to_it(template: Path) -> None:
    from mlflow import MlflowClient

    path = Path("mlruns.db").absolute()
    store.ensure(path)
    client = MlflowClient(sqlite_uri(path))
    run = client.create_run(client.create_experiment("mine"))
    client.log_metric(run.info.run_id, "loss", 1.5)
    assert client.get_run(run.info.run_id).data.metrics == {"loss": 1.5}
    assert client.get_experiment("0").artifact_location.endswith("/mlruns/0")


def another(text: str) -> Callable[[Path], None]:
    def change(template: Path) -> None:
        with closing(sqlite3.connect(template)) as database, database:
            database.execute(text)

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda template: template.unlink(), id="absent"),
        pytest.param(lambda template: template.write_bytes(template.read_bytes()[:50_000]), id="cut off"),
        pytest.param(lambda template: template.write_text("no database " * 1000), id="text"),
        pytest.param(lambda template: template.write_bytes(b""), id="empty"),
        pytest.param(lambda template: template.chmod(0o666), id="writable for all"),
        pytest.param(lambda template: template.parent.chmod(0o777), id="in a folder that all may write"),
        pytest.param(another("insert into tags values ('k', 'v', 'r')"), id="with a tag"),
        pytest.param(another("update experiments set name = 'theirs'"), id="with another experiment"),
        pytest.param(another("update alembic_version set version_num = 'older'"), id="of another revision"),
    ],
)
def test_what_is_no_empty_store_of_the_users_own_is_not_used(template: Path, change: Callable[[Path], None]) -> None:
    change(template)
    path = Path("mlruns.db").absolute()
    store.ensure(path)
    assert path.read_text() == "by MLflow"
    assert sorted(path.name for path in Path().iterdir()) == [".mlruns.db.lock", "cache", "mlruns.db"]


def test_in_a_folder_that_mlflow_would_quote_it_is_not_used(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ann's").mkdir()
    monkeypatch.chdir(tmp_path / "ann's")
    store.ensure(Path("mlruns.db").absolute())
    assert Path("mlruns.db").read_text() == "by MLflow"


def test_a_store_that_has_rows_is_no_template(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    store = tmp_path / "used.db"
    store.write_bytes(made.read_bytes())
    another("insert into experiments (experiment_id, name, workspace) values (7, 'mine', 'default')")(store)
    store_template.keep(store, sqlite_store.newest() or "")
    assert list(store_template.folder().iterdir()) == []
