"""The file of an embedded MLflow store: what state it is in, and how a complete one appears in one step.

MLflow makes a store by some 60 migrations. They take seconds and are no transactions: a process that ends in between
leaves a file that no later process can use. A store is therefore made under another name, by a process that no Ctrl-C
reaches (see `ortlaunch.tracking.make_store`), and gets its own name when it is complete. The next one is a copy (see
`ortlaunch.tracking.store_template`). This module imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from urllib.parse import quote

import psutil

import ortlaunch
from ortlaunch.base.errors import RequestError
from ortlaunch.base.locks import exclusive
from ortlaunch.base.text import counted
from ortlaunch.config.tracking_uri import sqlite_uri
from ortlaunch.tracking import store_template

WAIT_SECONDS = 120.0
"""How long one process waits for another one that makes the store. On a busy machine it takes up to 40 seconds."""
_BUSY_SECONDS = 5.0
_TABLES = {"experiments", "runs", "alembic_version"}
_MAKER = (
    "import sys; sys.path.append(sys.argv.pop(1)); from ortlaunch.tracking.make_store import main; "
    "sys.exit(main(sys.argv[1:]))"
)
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
    def needs_repair(self) -> bool:
        """Whether MLflow cannot use it and `ortlaunch doctor --fix` makes it usable."""
        return self.state in (State.HALF_MADE, State.OUTDATED)

    @property
    def problem(self) -> str:
        """One line that names the store and says why it cannot be used; empty if it can."""
        if self.state is State.HALF_MADE:
            return f"{self.path} is only half made: the process that was making this MLflow store was ended"
        if self.state is State.OUTDATED:
            why = "an older MLflow made it, or its upgrade was cut off"
            return f"{self.path} does not fit the installed MLflow: {why} ({counted(self.runs, 'run')})"
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
    found = look(path)
    if found.needs_repair:
        fix = shlex.join(["ortlaunch", "doctor", "--fix", "--uri", sqlite_uri(found.path)])
        raise RequestError(f"{found.problem}. This puts it right: {fix}")


def ensure(path: Path) -> None:
    """Makes the store if there is none. Several processes may do so at once; all of them get the same store.

    Raises:
        RequestError: the store is half made or outdated.
        OSError: the store cannot be made. The message is the maker's.
        sqlite3.Error: as `look` does.
        TimeoutError: another process has been making it for `WAIT_SECONDS`.
    """
    if look(path).state is State.ABSENT:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _copied(path):
            _make(path)
    check(path)


def _copied(path: Path) -> bool:
    """Makes the store as a copy of the template; returns False if there is none that fits the installed MLflow."""
    revision = newest()
    if revision is None:
        return False
    with lock_of(path):
        if look(path).state is not State.ABSENT:
            return True
        remove_leftovers(path)
        new = other_name(path, "new")
        try:
            if not store_template.copy_to(new, revision):
                return False
            publish(new, path)
        finally:
            remove(new)
    return True


def _make(path: Path) -> None:
    """Makes the store in a process of its own session, which goes on when this process ends."""
    # Modules in the current folder must not be imported in place of Python's own, which `python -m` would do.
    package = str(Path(ortlaunch.__file__).parents[1])
    command = [sys.executable, "-P", "-c", _MAKER, package, str(path)]
    with tempfile.TemporaryFile() as said:
        # Its errors go to a file, because a pipe would break when this process ends.
        maker = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
        )
        code = maker.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    if code:
        why = next((line for line in reversed(lines) if line.strip(" :")), f"exit code {code}")
        raise OSError(f"{path} could not be made: {why}")


@contextlib.contextmanager
def lock_of(path: Path) -> Iterator[None]:
    """Lets only one process at a time make or repair a store.

    Raises:
        TimeoutError: another process has held the lock for `WAIT_SECONDS`.
    """
    with exclusive(path.with_name(f".{path.name}.lock"), WAIT_SECONDS) as held:
        if not held:
            raise TimeoutError(f"another process has been making {path} for {WAIT_SECONDS:.0f} s")
        yield


def remove(path: Path) -> None:
    """Removes a database and the files that SQLite keeps beside it."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).unlink()


def publish(new: Path, path: Path) -> None:
    """Gives a complete store its name, unless another process has been faster."""
    try:
        os.link(new, path)
    except FileExistsError:
        if path.stat().st_size == 0:
            os.replace(new, path)
    except OSError:
        # The file system has no hard links. The lock keeps others away.
        if not path.exists():
            os.replace(new, path)


def other_name(path: Path, word: str) -> Path:
    """The hidden name beside a store under which this process makes its file."""
    return path.with_name(f".{path.name}.{word}-{os.uname().nodename}-{os.getpid()}")


def remove_leftovers(path: Path) -> None:
    """Removes the files of makers on this machine that were killed."""
    beginning = f".{path.name}.new-{os.uname().nodename}-"
    for file in path.parent.iterdir():
        maker = re.match(r"\d+", file.name.removeprefix(beginning)) if file.name.startswith(beginning) else None
        if maker is not None and not psutil.pid_exists(int(maker[0])):
            with suppress(OSError):
                file.unlink()
