"""Which URIs are taken, where they point, and that none shows its password."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import is_hidden, redacted, scrubbed
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.config.tracking_uri import (
    VARIABLE,
    artifact_location,
    check_uri,
    compare_command,
    default_uri,
    resolve_tracking,
    sqlite_path,
)
from ortlaunch.follow.sync import sync_main
from ortlaunch.tracking.mlflow import MlflowTracker


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///mlruns.db",
        "sqlite:////a b/ü.db?timeout=5",
        "http://127.0.0.1:5000",
        "https://user:pw@host/prefix",
        "postgresql+psycopg2://u:p@h/db",
        "mysql://h/db",
        "mssql+pyodbc://h/db",
        "databricks",
        "databricks://profile",
    ],
)
def test_good_uris_pass(uri: str) -> None:
    check_uri(uri)


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("mlruns", "sqlite:///mlruns/mlflow.db"),
        ("/data/mlruns/", "sqlite:////data/mlruns/mlflow.db"),
        ("file:///data/m%20x", "'sqlite:////data/m x/mlflow.db'"),
        ("file:///data/100%25", "'sqlite:////data/100%25/mlflow.db'"),
        ("file:mlruns", "sqlite:///mlruns/mlflow.db"),
        ("", "sqlite:///mlruns.db"),
        ("localhost:5000", "http://localhost:5000"),
        ("http:///x", "http://HOST:PORT"),
        ("http://host:99999", "names no port from 1 to 65535"),
        ("https://host:0/x", "https://HOST:PORT"),
        ("http://[host", "is no address: Invalid IPv6 URL"),
        ("postgresql://[host/db", "is no address: Invalid IPv6 URL"),
        ("sqlite://mlruns.db", "sqlite:///FILE.db"),
        ("sqlite:///:memory:", "sqlite:///FILE.db"),
        ("sqlite:///", "sqlite:///FILE.db"),
        ("htpp://host", "http://HOST:PORT"),
        ("s3://bucket/x", "sqlite:///FILE.db"),
    ],
)
def test_bad_uris_are_refused_with_advice(uri: str, advice: str) -> None:
    with pytest.raises(RequestError) as raised:
        check_uri(uri)
    assert advice in str(raised.value) and "tracking.uri=" in str(raised.value)


def test_a_refusal_names_the_variable_that_holds_the_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "mlruns")
    with pytest.raises(RequestError, match=r"^MLFLOW_TRACKING_URI=mlruns is a file store"):
        check_uri(default_uri())
    with pytest.raises(RequestError, match=r"^tracking\.uri=others"):
        check_uri("others")


@pytest.mark.parametrize(
    ("variable", "uri"), [(None, "sqlite:///mlruns.db"), ("", "sqlite:///mlruns.db"), ("http://h", "http://h")]
)
def test_the_store_of_who_names_none(monkeypatch: pytest.MonkeyPatch, variable: str | None, uri: str) -> None:
    if variable is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, variable)
    assert default_uri() == uri


@pytest.mark.parametrize(
    ("variable", "uri", "command"),
    [
        ("", "sqlite:///mlruns.db", "ortlaunch compare --sweep 'a b'"),
        ("", "sqlite:////elsewhere/m.db", "ortlaunch compare --sweep 'a b' --uri sqlite:////elsewhere/m.db"),
        ("", "http://h:1", "ortlaunch compare --sweep 'a b' --uri http://h:1"),
        ("", "http://u:geheim@h", "ortlaunch compare --sweep 'a b' --uri 'http://u:***@h'"),
        ("http://h:1", "http://h:1", "ortlaunch compare --sweep 'a b'"),
        ("http://h:1", "sqlite:///mlruns.db", "ortlaunch compare --sweep 'a b' --uri sqlite:///{cwd}/mlruns.db"),
    ],
)
def test_the_command_that_compares_names_a_store_that_is_not_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, uri: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, variable)
    cfg = resolve_tracking(MlflowConfig(uri=uri), tmp_path)
    assert compare_command(cfg, "--sweep", "a b") == command.format(cwd=tmp_path)


def test_refusal_hides_the_password() -> None:
    with pytest.raises(RequestError) as raised:
        check_uri("htpp://user:geheim@host")
    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize(
    ("uri", "resolved"),
    [
        ("sqlite:///mlruns.db", "sqlite:////a b/ü/mlruns.db"),
        ("sqlite:///../x/m.db?timeout=3", "sqlite:////a b/x/m.db?timeout=3"),
        ("sqlite:////abs/../m.db", "sqlite:////abs/../m.db"),
        ("http://h:1", "http://h:1"),
        ("postgresql://u:p@h/db", "postgresql://u:p@h/db"),
    ],
)
def test_relative_sqlite_files_become_absolute(uri: str, resolved: str) -> None:
    cfg = resolve_tracking(MlflowConfig(uri=uri, flush_seconds=7), Path("/a b/ü"))
    assert (cfg.uri, cfg.artifacts, cfg.flush_seconds) == (resolved, "/a b/ü/mlartifacts", 7)


PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("/", "")
FOLDERS = [
    PRINTABLE,
    *(
        "a%20b",
        "50%",
        "%2e%2e",
        "?x=1",
        "#1",
        "ä ö/ü",
        "日本",
        "a@b:c",
        "&token=x",
        "${oc.env:HOME}",
        "a\\nb",
        "***",
        "a\nb",
    ),
]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("query", ["", "?timeout=5"])
def test_every_folder_has_a_uri_that_leads_back_to_it(folder: str, query: str) -> None:
    from sqlalchemy.engine import make_url

    cfg = resolve_tracking(MlflowConfig(uri=f"sqlite:///mlruns.db{query}"), Path("/top") / folder)
    check_uri(cfg.uri)
    assert sqlite_path(cfg.uri) == Path("/top") / folder / "mlruns.db"
    assert make_url(cfg.uri).database == f"/top/{folder}/mlruns.db"
    # What the run folder keeps of it is the whole URI.
    assert redacted(cfg.uri) == cfg.uri and not is_hidden(cfg.uri)
    assert resolve_tracking(cfg, Path("/elsewhere")).uri == cfg.uri
    assert "$" not in cfg.uri + cfg.artifacts, "a configuration file would take it for a reference"
    assert url2pathname(urlsplit(artifact_location(cfg.artifacts, "e")).path) == f"/top/{folder}/mlartifacts/e"


def test_artifacts_stay_where_they_are_told() -> None:
    resolve = lambda artifacts: resolve_tracking(MlflowConfig(artifacts=artifacts), Path("/w")).artifacts  # noqa: E731
    assert [resolve("/abs"), resolve("s3://bucket/x"), resolve("a/../b")] == ["/abs", "s3://bucket/x", "/w/b"]


def test_artifact_location_is_a_uri() -> None:
    assert artifact_location("/a b/ü", "exp/1") == "file:///a%20b/%C3%BC/exp_1"
    assert artifact_location("s3://bucket/x/", "my exp") == "s3://bucket/x/my%20exp"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://user:geheim@host:1/x", "http://user:***@host:1/x"),
        ("https://geheim@host", "https://***@host"),
        ("postgresql://u:ge@heim@host/db", "postgresql://u:***@host/db"),
        ("postgresql://u:ge/heim@host/db", "postgresql://u:***@host/db"),
        ("postgresql://h/db?user=u&password=geheim&x=1", "postgresql://h/db?user=u&password=***&x=1"),
        ("http://host:5000/team@home", "http://host:5000/team@home"),
        ("sqlite:////a@b/c:d@e.db", "sqlite:////a@b/c:d@e.db"),
        ("databricks", "databricks"),
    ],
)
def test_redacted(uri: str, shown: str) -> None:
    assert redacted(uri) == shown


def test_scrubbed_finds_the_password_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "zeichen")
    uri = "http://user:ge%40heim@host"
    text = f"{uri} failed for ge@heim, ge%40heim and zeichen; see https://a:b@c/d"
    assert scrubbed(text, uri) == "http://***@host failed for ***, *** and ***; see https://***@c/d"


@pytest.mark.parametrize(
    ("content", "said"), [(None, "is a folder: name a file"), (b"garbage", "is no SQLite database")]
)
def test_a_file_that_is_no_database_is_refused_before_the_run(tmp_path: Path, content: bytes | None, said: str) -> None:
    store = tmp_path / "mlruns.db"
    if content is None:
        store.mkdir()
    else:
        store.write_bytes(content)
    tracker = MlflowTracker("mlflow")
    with pytest.raises(RequestError, match=said):
        tracker.check(MlflowConfig(uri=f"sqlite:///{store}"))
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "later.db")
    with pytest.raises(RequestError, match=f"name that file itself, tracking.uri=sqlite:///{tmp_path}/later.db"):
        tracker.check(MlflowConfig(uri=f"sqlite:///{link}"))
    if content is not None:
        for good in (b"", b"SQLite format 3\0 and pages"):
            store.write_bytes(good)
            tracker.check(MlflowConfig(uri=f"sqlite:///{store}"))


@pytest.mark.parametrize("kind", ["FIFO", "below a file", "of another program"])
def test_a_place_where_mlflow_can_make_no_store_is_refused(tmp_path: Path, kind: str) -> None:
    store = tmp_path / "store.db"
    if kind == "FIFO":
        os.mkfifo(store)
    elif kind == "below a file":
        store.touch()
        store /= "mlruns.db"
    else:
        with closing(sqlite3.connect(store)) as database:
            database.execute("create table addresses (name)")
    said = {
        "FIFO": f"{store} is no plain file",
        "below a file": f"{store.parent} is no folder",
        "of another program": "of another program",
    }
    with pytest.raises(RequestError, match=f"^tracking.uri=.*{said[kind]}"):
        MlflowTracker("mlflow").check(MlflowConfig(uri=f"sqlite:///{store}"))
    before = list(tmp_path.iterdir())
    with pytest.raises(RequestError, match=f"^--uri=.*{said[kind]}"):
        sync_main(["--all", str(tmp_path), "--uri", f"sqlite:///{store}"])
    assert list(tmp_path.iterdir()) == before
