"""Tracking URIs: which one is meant, which ones MLflow takes, where a relative one points, how to show one."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import redacted

if TYPE_CHECKING:
    from ortlaunch.config.schema import MlflowConfig

VARIABLE = "MLFLOW_TRACKING_URI"
"""MLflow's own: the store of who names none."""

_SQLITE = re.compile(r"^(?P<scheme>sqlite(?:\+\w+)?):///(?P<path>[^?]+)(?P<query>\?.*)?$")
_HTTP = ("http", "https")
_DATABASES = ("postgresql", "mysql", "mssql")
_DATABRICKS = ("databricks", "databricks-uc", "uc")


def default_uri() -> str:
    """The store of runs, and of what reads them, where nobody names one: the environment's, else the schema's."""
    from ortlaunch.config.schema import MlflowConfig

    return os.environ.get(VARIABLE) or MlflowConfig.uri


def compare_command(cfg: MlflowConfig, *words: str) -> str:
    """The command that compares runs of a store, to be typed in this folder; it names a store that is not the default.

    Args:
        cfg: The store, its places made absolute.
        words: Which runs.
    """
    try:
        default = resolve_tracking(replace(cfg, uri=default_uri()), Path.cwd()).uri
    except RequestError:
        default = ""  # No URI can name a file in this folder.
    return shlex.join(["ortlaunch", "compare", *words, *([] if cfg.uri == default else ["--uri", redacted(cfg.uri)])])


def check_uri(uri: str, key: str | None = None) -> None:
    """Refuses what MLflow would refuse, without importing it.

    Args:
        uri: The tracking URI as the user gave it.
        key: How the user calls it, for the message; None for the environment's or that of the configuration.

    Raises:
        RequestError: For a file store, an unknown scheme, or an incomplete URI.
    """
    key = key or (VARIABLE if uri == os.environ.get(VARIABLE) else "tracking.uri")
    shown = f"{key}={redacted(uri)}"
    scheme = urlsplit(uri).scheme if "://" in uri or uri.startswith("file:") else ""
    base = scheme.partition("+")[0]
    if uri in _DATABRICKS:
        return
    if base == "sqlite":
        _check_sqlite(uri, shown)
    elif scheme in ("", "file"):
        _refuse_file_store(uri, shown)
    elif scheme in _HTTP:
        if not urlsplit(uri).hostname:
            raise RequestError(f"{shown} names no host: write it as {scheme}://HOST:PORT")
    elif base not in (*_DATABASES, *_DATABRICKS) and scheme not in _plugin_schemes():
        raise RequestError(
            f"{shown}: MLflow has no store of the kind {scheme}://. Use sqlite:///FILE.db for a file on this machine, "
            "http://HOST:PORT or https://HOST for a server, or a postgresql://, mysql:// or mssql:// database"
        )


def _check_sqlite(uri: str, shown: str) -> None:
    match = _SQLITE.match(uri)
    if match is None or match["path"] == ":memory:":
        raise RequestError(
            f"{shown} names no database file: write sqlite:///FILE.db for a file in the folder where ortlaunch is "
            "started, sqlite:////FOLDER/FILE.db for an absolute path"
        )


def _refuse_file_store(uri: str, shown: str) -> None:
    if re.match(r"^[\w.-]+:\d+(/.*)?$", uri):
        raise RequestError(f"{shown} has no scheme: write it as http://{uri}")
    folder = unquote(urlsplit(uri).path) if uri.startswith("file:") else uri
    advice = f"sqlite:///{folder.rstrip('/')}/mlflow.db" if folder.strip("/") else "sqlite:///mlruns.db"
    raise RequestError(f"{shown} is a file store, which MLflow no longer writes: use a database, {_quoted(advice)}")


def _quoted(advice: str) -> str:
    return f"'{advice}'" if re.search(r"[^\w:/.+-]", advice) else advice


def _plugin_schemes() -> set[str]:
    from importlib.metadata import entry_points  # 11 ms, a thirtieth of a command that asks for none

    return {entry.name for entry in entry_points(group="mlflow.tracking_store")}


def sqlite_path(uri: str) -> Path | None:
    """The database file of a sqlite URI, None for any other URI."""
    match = _SQLITE.match(uri)
    return Path(match["path"]) if match else None


def resolve_tracking(cfg: MlflowConfig, cwd: Path) -> MlflowConfig:
    """Makes a relative sqlite file and artifact folder absolute, so that every process means the same ones.

    Args:
        cfg: The tracking node as configured.
        cwd: The folder that relative paths are taken from.

    Returns:
        A copy; server and absolute URIs in it are as they were.

    Raises:
        RequestError: If the folder's name cannot be written in a sqlite URI.
    """
    artifacts = cfg.artifacts if "://" in cfg.artifacts else _absolute(cfg.artifacts, cwd)
    match = _SQLITE.match(cfg.uri)
    if match is None or match["path"].startswith("/"):
        return replace(cfg, artifacts=artifacts)
    path = _absolute(match["path"], cwd)
    if "?" in path:
        raise RequestError(f"tracking.uri={cfg.uri}: no sqlite URI can name a folder with a '?' in its name ({cwd})")
    return replace(cfg, uri=f"{match['scheme']}:///{path}{match['query'] or ''}", artifacts=artifacts)


def _absolute(path: str, cwd: Path) -> str:
    return os.path.normpath(cwd.absolute() / Path(path).expanduser())


def artifact_location(artifacts: str, experiment: str) -> str:
    """Where an embedded store keeps an experiment's artifacts: a file URI, or below the URI given."""
    name = experiment.replace("/", "_")
    if "://" in artifacts:
        return f"{artifacts.rstrip('/')}/{quote(name)}"
    return (Path(artifacts) / name).as_uri()
