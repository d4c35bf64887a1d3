"""Opens a store for reading; nothing is created, and errors name the store without its credentials."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import redacted, scrubbed
from ortlaunch.base.text import library_error
from ortlaunch.config.tracking_uri import check_uri, sqlite_path
from ortlaunch.tracking.store import open_client

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TIMEOUT_SECONDS = 30


@contextmanager
def opened(uri: str) -> Iterator[MlflowClient]:
    """Yields a client of the store at an absolute tracking URI.

    Raises:
        RequestError: the store does not exist or cannot be read.
    """
    check_uri(uri)
    _check_database(uri)
    try:
        yield open_client(uri, _TIMEOUT_SECONDS)
    except RequestError as error:
        raise RequestError(f"{redacted(uri)}: {scrubbed(str(error), uri)}") from None
    except Exception as error:
        text = scrubbed(f"{type(error).__name__}: {library_error(error)}", uri)
        raise RequestError(f"cannot read the MLflow store {redacted(uri)}: {text}") from None


def _check_database(uri: str) -> None:
    """Refuses a missing or foreign database, because MLflow would create the one and change the other."""
    path = sqlite_path(uri)
    if path is None:
        return
    if not path.is_file():
        raise RequestError(f"there is no MLflow store at {path}: start a run first, or name another store by --uri")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
            database.execute("SELECT 1 FROM experiments LIMIT 1")
    except sqlite3.DatabaseError as error:
        raise RequestError(f"{path} is no MLflow store ({error}): name another one by --uri") from None
