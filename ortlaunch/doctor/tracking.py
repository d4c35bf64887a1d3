"""Checks the tracking server or file: whether it can be used, and its version."""

from __future__ import annotations

import base64
import importlib.metadata
import os
import shlex
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ortlaunch.base.secrets import redacted
from ortlaunch.base.text import counted
from ortlaunch.config.tracking_uri import check_uri, default_uri, sqlite_path
from ortlaunch.doctor.line import Level, Line
from ortlaunch.tracking import sqlite_store
from ortlaunch.tracking.sqlite_store import State

_SECONDS = 5


def mlflow(uri: str | None) -> Iterator[Line]:
    """Checks the MLflow store.

    Args:
        uri: the store; None takes the default of runs.

    Raises:
        RequestError: MLflow does not accept the URI.
    """
    installed = importlib.metadata.version("mlflow")
    chosen = uri or default_uri()
    check_uri(chosen, "--uri" if uri else None)
    if chosen.startswith(("http://", "https://")):
        yield from _server(chosen.rstrip("/"), installed)
    elif (database := sqlite_path(chosen)) is not None:
        yield _file(database.absolute(), installed)
    else:
        yield Line("mlflow", Level.ok, f"{installed}; {redacted(chosen)} was not looked at")


def _file(path: Path, installed: str) -> Line:
    try:
        store = sqlite_store.look(path)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            return Line("mlflow", Level.warning, f"{installed}; another process has {path} locked for a while")
        return _foreign(path, str(error))
    if store.state is State.ABSENT:
        return Line("mlflow", Level.ok, f"{installed}; the first run makes {path}")
    if store.state is State.FOREIGN:
        return _foreign(path, "it has no table of MLflow's")
    if store.state is State.NEWER:
        text = f"{path} was made by a newer MLflow than the installed {installed}: no run can use it"
        return Line("mlflow", Level.error, text, "pip install --upgrade mlflow")
    if store.problem:
        return Line("mlflow", Level.error, store.problem)
    return Line("mlflow", Level.ok, f"{installed}; {counted(store.runs, 'run')} in {path}")


def _foreign(path: Path, why: str) -> Line:
    # Moving the file away loses MLflow's copy of earlier runs; their folders still have the data.
    old, new = (shlex.quote(str(path) + suffix) for suffix in ("", ".broken"))
    fix = f"mv {old} {new} && ortlaunch sync --all"
    return Line("mlflow", Level.error, f"{path} is no store of MLflow's: {why}", fix)


def _server(uri: str, installed: str) -> Iterator[Line]:
    shown = redacted(uri)
    try:
        with _get(f"{uri}/health"):
            pass
    except (OSError, ValueError) as error:
        text = f"{shown} does not answer ({error}); runs go on, and what they journal is sent later"
        yield Line("mlflow", Level.warning, text, "ortlaunch sync --all")
        return
    yield from _version(uri, shown, installed)


def _version(uri: str, shown: str, installed: str) -> Iterator[Line]:
    try:
        with _get(f"{uri}/version") as answer:
            version = answer.read(100).decode(errors="replace").strip()
        # A server with passwords answers /version to everybody, but not a list of experiments.
        with _get(f"{uri}/api/2.0/mlflow/experiments/search?max_results=1"):
            pass
    except urllib.error.HTTPError as error:
        fixes = {
            401: ("it asks for a password", "export MLFLOW_TRACKING_USERNAME=… MLFLOW_TRACKING_PASSWORD=…"),
            403: (
                "this name is not allowed",
                "export MLFLOW_SERVER_ALLOWED_HOSTS=…  # for the server, then restart it",
            ),
        }
        why, fix = fixes.get(error.code, (str(error.reason), f"curl -i {shown}/version"))
        yield Line("mlflow", Level.error, f"{shown} refuses with {error.code}: {why}", fix)
        return
    except (OSError, ValueError) as error:
        yield Line("mlflow", Level.warning, f"{shown} breaks off: {error}")
        return
    if version.split(".")[:2] == installed.split(".")[:2]:
        yield Line("mlflow", Level.ok, f"{installed}; {shown} answers, version {version}")
    else:
        text = f"{shown} has version {version}, this environment {installed}: only equal ones were tested"
        yield Line("mlflow", Level.warning, text, f"pip install mlflow=={version}")


def _get(url: str) -> urllib.request.addinfourl:  # type: ignore[name-defined]
    request = urllib.request.Request(url)
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user and password is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode())
    return urllib.request.urlopen(request, timeout=_SECONDS)
