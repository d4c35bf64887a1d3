"""The file of an embedded MLflow store: what state it is in, and how a complete one appears in one step.

MLflow makes a store by some 60 migrations. They take seconds and are no transactions: a process that ends in between
leaves a file that no later process can use. A store is therefore made under another name and gets its own when it is
complete. The next one is a copy (see `ortlaunch.tracking.store_template`). This module imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from urllib.parse import quote

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import counted
from ortlaunch.config.tracking_uri import sqlite_uri

_BUSY_SECONDS = 5.0
_TABLES = {"experiments", "runs", "alembic_version"}
_REVISION = re.compile(r"^(down_)?revision\b[^=\n]*=\s*(.+)$", re.MULTILINE)
_NAME = re.compile(r"[\"']([0-9a-zA-Z_]+)[\"']")


class State(Enum):
    """What a store's file is."""

    ABSENT = "absent"
    """There is no file, or an empty one."""
    COMPLETE = "complete"
    HALF_MADE = "half made"
    """The process that was making it has ended before it was complete. It holds no run."""
    OUTDATED = "outdated"
    """An older MLflow made it, or its upgrade was cut off. It holds runs."""
    NEWER = "newer"
    """A newer MLflow than the installed one made it."""
    FOREIGN = "foreign"
    """A database without MLflow's tables."""


@dataclass(frozen=True)
class Store:
    """A store's file as it is at this moment."""

    path: Path
    state: State
    runs: int = 0

    @property
    def problem(self) -> str:
        """One line that names the store, says why MLflow cannot use it and what to do; empty if it can."""
        aside = "move it away, then: ortlaunch sync --all"
        if self.state is State.HALF_MADE:
            return f"{self.path} is only half made: the process that was making this store was ended: {aside}"
        if self.state is State.OUTDATED:
            why = f"an older MLflow made {self.path}, or its upgrade was cut off ({counted(self.runs, 'run')})"
            return f"{why}: copy it, then: {shlex.join(['mlflow', 'db', 'upgrade', sqlite_uri(self.path)])}; or {aside}"
        return ""


def look(path: Path) -> Store:
    """Finds out what a store's file is, without changing it.

    Raises:
        sqlite3.Error: the file is no database, cannot be read, or has been locked for a while.
    """
    try:
        if path.stat().st_size == 0:
            return Store(path, State.ABSENT)
    except FileNotFoundError:
        return Store(path, State.ABSENT)
    with closing(_opened(path)) as database:
        tables = _tables(database)
        revisions = {str(name) for (name,) in _rows(database, tables, "alembic_version", "version_num")}
        runs = sum(int(count) for (count,) in _rows(database, tables, "runs", "count(*)"))
    known, heads = migrations()
    if _is_others(tables):
        return Store(path, State.FOREIGN)
    if not heads or revisions == heads:
        return Store(path, State.COMPLETE, runs)
    if revisions - known:
        return Store(path, State.NEWER, runs)
    return Store(path, State.OUTDATED if runs else State.HALF_MADE, runs)


def is_foreign(path: Path) -> bool:
    """Whether a database has tables, and none of MLflow's: that of another program, which MLflow would change.

    Raises:
        sqlite3.Error: as `look`.
    """
    with closing(_opened(path)) as database:
        tables = _tables(database)
    return _is_others(tables)


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}


def _is_others(tables: set[str]) -> bool:
    return bool(tables) and not _TABLES & tables


def has_run(path: Path, run_id: str) -> bool:
    """Whether a store has a run. A store that cannot be read now counts as having it, so that nothing is sent twice."""
    try:
        if path.stat().st_size == 0:
            return False
        with closing(_opened(path)) as database:
            return database.execute("select 1 from runs where run_uuid = ?", (run_id,)).fetchone() is not None
    except FileNotFoundError:
        return False
    except (OSError, sqlite3.Error):
        return True


def _opened(path: Path) -> sqlite3.Connection:
    uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS)


def _rows(database: sqlite3.Connection, tables: set[str], table: str, columns: str) -> list[tuple[str | int, ...]]:
    return database.execute(f"select {columns} from {table}").fetchall() if table in tables else []


@cache
def migrations() -> tuple[frozenset[str], frozenset[str]]:
    """The installed MLflow's revisions of a store, and the newest of them; both empty where they cannot be read.

    The migrations' files are read and not imported, because MLflow's own function takes seconds to import.
    """
    spec = importlib.util.find_spec("mlflow")
    revisions: set[str] = set()
    earlier: set[str] = set()
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in (Path(folder) / "store" / "db_migrations" / "versions").glob("*.py"):
            for down, value in _REVISION.findall(file.read_text(encoding="utf-8")):
                (earlier if down else revisions).update(_NAME.findall(value))
    return frozenset(revisions), frozenset(revisions - earlier)


def newest() -> str | None:
    """The installed MLflow's newest revision of a store; None if it cannot be read."""
    _, heads = migrations()
    return next(iter(heads)) if len(heads) == 1 else None


def check(path: Path) -> None:
    """Refuses a store that MLflow cannot use, before MLflow tries to migrate it in this process.

    Raises:
        RequestError: the store is half made or outdated. The message is one line with the remedy.
        sqlite3.Error: as `look` does.
    """
    problem = look(path).problem
    if problem:
        raise RequestError(problem)
