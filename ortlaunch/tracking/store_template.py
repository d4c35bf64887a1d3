"""An empty MLflow store in the user's cache, of which the next store is a copy.

MLflow takes some four seconds of processor time to make a store by its migrations, and for one release of MLflow the
result differs by one row only. So the first store that is made is kept as a template, and a copy of it is complete in
milliseconds. A template that another user may have written, that is damaged, or that holds anything else than an empty
store is not used.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

from ortlaunch.base.ownership import closed_to_others, why_foreign
from ortlaunch.base.user import user_cache

_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
"""Folders that MLflow writes into its row as they are."""
_DEFAULT = "experiment_id = 0 and name = 'Default' and workspace = 'default'"


def folder() -> Path:
    """Where the templates lie."""
    return user_cache() / "mlflow-stores"


def keep(store: Path, revision: str) -> None:
    """Keeps a copy of a store that was just made, if it is a plain one. Failures are ignored: the next one tries again.

    Args:
        store: a complete store that no other process knows of.
        revision: the newest of the installed MLflow's migrations.
    """
    template = _file(revision)
    part = template.with_name(f".{template.name}.{os.getpid()}")
    with suppress(OSError, sqlite3.Error), closed_to_others():
        template.parent.mkdir(parents=True, exist_ok=True)
        try:
            _copy(store, part)
            if _is_plain(part, revision):
                os.replace(part, template)
        finally:
            part.unlink(missing_ok=True)


def copy_to(new: Path, revision: str) -> bool:
    """Makes a store as a copy of the template.

    Args:
        new: the file to make, in a folder that exists.
        revision: the newest of the installed MLflow's migrations.

    Returns:
        Whether the store is complete. If not, the template cannot be used or the file not be written, and what is
        left of `new` is the caller's to remove.
    """
    template, artifacts = _file(revision), f"{Path.cwd()}/mlruns/0"
    if not _PLAIN.fullmatch(artifacts) or not template.is_file() or why_foreign(template) or why_foreign(folder()):
        return False
    try:
        _copy(template, new)
        if not _is_plain(new, revision):
            return False
        now = int(time.time() * 1000)
        with closing(sqlite3.connect(new)) as database, database:
            row = (artifacts, now, now)
            database.execute(
                "update experiments set artifact_location = ?, creation_time = ?, last_update_time = ?", row
            )
    except sqlite3.Error:
        return False
    return True


def _file(revision: str) -> Path:
    return folder() / f"{version('mlflow')}-{revision}.db"


def _copy(source: Path, target: Path) -> None:
    uri = f"{source.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


def _is_plain(store: Path, revision: str) -> bool:
    """Whether a store is undamaged and has nothing but MLflow's own first rows."""
    with closing(sqlite3.connect(store)) as database:
        if database.execute("pragma quick_check").fetchall() != [("ok",)]:
            return False
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        rows = {name: database.execute(f'select count(*) from "{name}"').fetchone()[0] for name in tables}
        return (
            {name: count for name, count in rows.items() if count}
            == {"alembic_version": 1, "experiments": 1, "workspaces": 1}
            and database.execute("select version_num from alembic_version").fetchall() == [(revision,)]
            and database.execute(f"select count(*) from experiments where {_DEFAULT}").fetchone() == (1,)
        )
