"""Tracking URIs: the default, the check that MLflow accepts one, the resolution of relative ones, and their display."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import announced
from ortlaunch.base.secrets import redacted

if TYPE_CHECKING:
    from ortlaunch.config.schema import MlflowConfig

VARIABLE = "MLFLOW_TRACKING_URI"
"""MLflow's own variable for the default store."""

_SQLITE = re.compile(r"^(?P<scheme>sqlite(?:\+\w+)?):///(?P<path>[^?]+)(?P<query>\?.*)?$")
_NOT_IN_URIS = re.compile(r"[%?#&$*\\\x00-\x1f\x7f]")
"""Characters of a path that a URI, a parser of URIs, or a configuration file would read as something else."""
_HTTP = ("http", "https")
_DATABASES = ("postgresql", "mysql", "mssql")
_DATABRICKS = ("databricks", "databricks-uc", "uc")


def default_uri() -> str:
    """The store to use if the user names none: the environment variable's, else the schema's default."""
    from ortlaunch.config.schema import MlflowConfig

    return os.environ.get(VARIABLE) or MlflowConfig.uri


def compare_command(cfg: MlflowConfig, *words: str) -> str:
    """The command that compares runs of a store, to be typed in this folder.

    It names the store unless that is the default.

    Args:
        cfg: the store, with absolute paths.
        words: the arguments that choose the runs.
    """
    import shlex

    default = resolve_tracking(replace(cfg, uri=default_uri()), Path.cwd()).uri
    return shlex.join(["ortlaunch", "compare", *words, *([] if cfg.uri == default else ["--uri", redacted(cfg.uri)])])


def check_uri(uri: str, key: str | None = None) -> None:
    """Refuses a URI that MLflow would refuse, without importing MLflow.

    Args:
        uri: the tracking URI as the user gave it.
        key: the name of the option or variable that the URI comes from, for the message. None means the environment
            variable if that has this URI, else the key of the configuration.

    Raises:
        RequestError: the URI names a file store, has an unknown scheme, is incomplete or is none.
    """
    key = key or (VARIABLE if uri == os.environ.get(VARIABLE) else "tracking.uri")
    shown = f"{key}={redacted(uri)}"
    try:
        scheme = urlsplit(uri).scheme if "://" in uri or uri.startswith("file:") else ""
    except ValueError as error:
        raise RequestError(f"{shown} is no address: {error}") from None
    base = scheme.partition("+")[0]
    if is_databricks(uri):
        return
    if base == "sqlite":
        _check_sqlite(uri, shown)
    elif scheme in ("", "file"):
        _refuse_file_store(uri, shown)
    elif scheme in _HTTP:
        if not urlsplit(uri).hostname or not _has_port(uri):
            lacks = "no host" if not urlsplit(uri).hostname else "no port from 1 to 65535"
            raise RequestError(f"{shown} names {lacks}: write it as {scheme}://HOST:PORT")
    elif base not in _DATABASES and scheme not in _plugin_schemes():
        raise RequestError(
            f"{shown}: MLflow has no store of the kind {scheme}://. Use sqlite:///FILE.db for a file on this machine, "
            "http://HOST:PORT or https://HOST for a server, or a postgresql://, mysql:// or mssql:// database"
        )


def is_databricks(uri: str) -> bool:
    """Whether a URI is that of a Databricks workspace."""
    return uri.partition("://")[0] in _DATABRICKS


def _has_port(uri: str) -> bool:
    """Whether the port of a URI, if it names one, can be one."""
    try:
        return urlsplit(uri).port != 0
    except ValueError:
        return False


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
    advice = f"sqlite:///{_as_uri_path(folder.rstrip('/'))}/mlflow.db" if folder.strip("/") else "sqlite:///mlruns.db"
    raise RequestError(f"{shown} is a file store, which MLflow no longer writes: use a database, {_quoted(advice)}")


def _quoted(advice: str) -> str:
    return f"'{advice}'" if re.search(r"[^\w:/.+-]", advice) else advice


def _plugin_schemes() -> set[str]:
    return {entry.name for entry in announced("mlflow.tracking_store")}


def sqlite_path(uri: str) -> Path | None:
    """The database file of a sqlite URI; None for any other URI."""
    match = _SQLITE.match(uri)
    return Path(unquote(match["path"])) if match else None


def sqlite_uri(path: Path) -> str:
    """The sqlite URI of a database file."""
    return f"sqlite:///{_as_uri_path(str(path))}"


def _as_uri_path(path: str) -> str:
    """The path as it stands in a sqlite URI. Spaces and letters beyond ASCII stay readable, as in older runs' URIs."""
    return _NOT_IN_URIS.sub(lambda found: quote(found.group()), path)


def resolve_tracking(cfg: MlflowConfig, cwd: Path) -> MlflowConfig:
    """Makes a relative sqlite file and artifact folder absolute, so that they are the same for every process.

    Args:
        cfg: the tracking node as configured.
        cwd: the folder that relative paths start from.

    Returns:
        A copy. URIs of servers and absolute URIs are unchanged.
    """
    artifacts = cfg.artifacts if "://" in cfg.artifacts else _absolute(cfg.artifacts, cwd)
    if "$" in artifacts and "://" not in artifacts:
        artifacts = Path(artifacts).as_uri()  # A configuration file would take ${NAME} for the value of another key.
    match = _SQLITE.match(cfg.uri)
    if match is None or match["path"].startswith("/"):
        return replace(cfg, artifacts=artifacts)
    path = _as_uri_path(_absolute(unquote(match["path"]), cwd))
    return replace(cfg, uri=f"{match['scheme']}:///{path}{match['query'] or ''}", artifacts=artifacts)


def _absolute(path: str, cwd: Path) -> str:
    return os.path.normpath(cwd.absolute() / Path(path).expanduser())


def artifact_location(artifacts: str, experiment: str) -> str:
    """The URI of an experiment's artifacts in an embedded store: a file URI, or a URI below the given one."""
    name = experiment.replace("/", "_")
    if "://" in artifacts:
        return f"{artifacts.rstrip('/')}/{quote(name)}"
    return (Path(artifacts) / name).as_uri()
