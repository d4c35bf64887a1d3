"""Makes or repairs the file of an embedded MLflow store: ``python -m ortlaunch.tracking.make_store [--repair] FILE``.

A launcher starts it in its own session, so that neither a Ctrl-C nor the launcher's end cuts off the migrations.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import counted
from ortlaunch.config.tracking_uri import sqlite_uri
from ortlaunch.tracking import store_template
from ortlaunch.tracking.sqlite_store import State, lock_of, look, newest, other_name, publish, remove, remove_leftovers
from ortlaunch.tracking.store import connect, quiet_mlflow

_NOT_COPIED = ("alembic_version",)


def main(arguments: list[str]) -> int:
    """Makes the store, or repairs one that MLflow cannot use.

    Returns:
        The exit code: 0 if the store is complete, 1 if it is not; the last line on standard error says why.
    """
    parser = argparse.ArgumentParser(prog="make_store", description=__doc__)
    parser.add_argument("--repair", action="store_true", help="replace a store that MLflow cannot use")
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    path: Path = options.file.absolute()
    try:
        with lock_of(path):
            remove_leftovers(path)
            if options.repair:
                print(repair(path))
            elif look(path).state is State.ABSENT:
                make(path)
    except (OSError, sqlite3.Error, RequestError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def make(path: Path) -> None:
    """Makes the store under another name and gives it its own name when it is complete."""
    new = other_name(path, "new")
    try:
        _migrate(new)
        if (revision := newest()) is not None:
            store_template.keep(new, revision)
        publish(new, path)
    finally:
        remove(new)


def repair(path: Path) -> str:
    """Replaces a store that MLflow cannot use by a usable one with the same runs. The old file is kept.

    Returns:
        What was done, in one line.
    """
    found = look(path)
    if not found.needs_repair:
        return f"{path} needs no repair"
    new = other_name(path, "new")
    try:
        if found.state is State.OUTDATED:
            _copy(path, new)
            _upgrade_or_rescue(path, new)
        else:
            _migrate(new)
        kept = _kept(path)
        os.replace(new, path)
    finally:
        remove(new)
    after = look(path)
    return f"{path} is complete and holds {counted(after.runs, 'run')}; the old file is {kept}"


def _upgrade_or_rescue(path: Path, new: Path) -> None:
    """Upgrades the copy. If an earlier upgrade was cut off, MLflow cannot go on: then its rows go into a new store."""
    try:
        _migrate(new)
    except Exception as error:
        print(f"MLflow cannot upgrade it ({type(error).__name__}): its rows are copied", file=sys.stderr)
        remove(new)
        _migrate(new)
        _copy_rows(path, new)


def _migrate(path: Path) -> None:
    """Lets MLflow make or upgrade a store that no other process knows of."""
    quiet_mlflow()
    from mlflow.store.db.utils import _upgrade_db, create_sqlalchemy_engine

    if path.exists():
        engine = create_sqlalchemy_engine(sqlite_uri(path))
        _upgrade_db(engine)
        engine.dispose()
    if "'" in str(Path.cwd()):
        # MLflow writes this folder into a statement of SQL as it is. As a URI it holds no quotation mark.
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        SqlAlchemyStore(sqlite_uri(path).replace("sqlite:", "sqlite+pysqlite:", 1), (Path.cwd() / "mlruns").as_uri())
    connect(sqlite_uri(path))


def _copy(source: Path, target: Path) -> None:
    """Copies a database as it is at one moment, with what is still in its write-ahead log."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
    shutil.copymode(source, target)


def _copy_rows(source: Path, target: Path) -> None:
    """Copies all rows into a new store, by the columns that both have."""
    with closing(sqlite3.connect(target)) as new, new:
        new.execute("pragma foreign_keys = off")
        new.execute("attach database ? as old", (str(source),))
        old_tables = {name for (name,) in new.execute("select name from old.sqlite_master where type = 'table'")}
        tables = [name for (name,) in new.execute("select name from main.sqlite_master where type = 'table'")]
        for table in tables:
            if table not in old_tables or table in _NOT_COPIED:
                continue
            columns = _columns(new, "main", table)
            names = ", ".join(f'"{column}"' for column in _columns(new, "old", table) if column in columns)
            new.execute(f'insert or replace into main."{table}" ({names}) select {names} from old."{table}"')


def _columns(database: sqlite3.Connection, schema: str, table: str) -> list[str]:
    # Columns that SQLite computes cannot be written; table_info leaves them out.
    return [row[1] for row in database.execute(f'pragma {schema}.table_info("{table}")')]


def _kept(path: Path) -> Path:
    """Gives the old file a second name, so that its own name never stands for nothing; returns it."""
    names = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(1))
    name = next(name for name in names if not name.exists())
    try:
        os.link(path, name)
    except OSError:  # The file system has no hard links.
        shutil.copy2(path, name)
    return name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
