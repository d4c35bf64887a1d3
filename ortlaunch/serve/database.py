"""The service's database: users, tokens, the queue and the audit.

Run folders stay the truth about runs. What only the database knows is who may do what, and which requests wait.
"""

from __future__ import annotations

import importlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import DeclarativeBase, Session

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import PRIVATE
from ortlaunch.base.ownership import require_own

VERSION = 7
"""The number of the latest migration. It stands in SQLite's `user_version` too, where any ortlaunch looks first."""
TABLE_MODULES = ("ortlaunch.serve.tables", "ortlaunch.serve.queue.tables")
"""The modules that declare tables."""
_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_SECONDS = 10
_WRITES = "ortlaunch_writes"
_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "ceph", "gpfs", "beegfs", "afs", "ncpfs", "pvfs2")
)
_NETWORK_FUSE = (
    "fuse.sshfs",
    "fuse.glusterfs",
    "fuse.ceph",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "fuse.rclone",
    "fuse.juicefs",
)


class Base(DeclarativeBase):
    """The base of all tables."""


def open_database(path: Path) -> Engine:
    """Opens the database, makes it with all tables if it does not exist, and carries on the tables of an older one.

    Args:
        path: its file. The folder is made for the owner alone (0700), the file too (0600).

    Raises:
        RequestError: it is on a network file system, others can write it, it is no database, or it was written by a
            later version or another program. The file is then as it was.
    """
    check_database(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite would make the file with the umask's mode; its journals take the mode of the file.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE))
        path.chmod(PRIVATE)
    except OSError as error:
        raise RequestError(f"serve: the database {path} cannot be opened: {error.strerror}") from None
    # Who can write the folder can put another database there, with users of their own.
    require_own(path.parent, path, use="serve")
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False},
        # Each thread has one at most. A bound would let requests wait for each other while the database is locked.
        max_overflow=-1,
    )
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    try:
        _make_tables(engine)
    except DatabaseError as error:
        engine.dispose()
        raise RequestError(f"serve: {path} cannot be used as a database: {error.orig}") from None
    return engine


def check_database(path: Path) -> None:
    """Refuses what `open_database` would refuse of a file that exists, before anything is made beside it.

    Raises:
        RequestError: as for `open_database`.
    """
    _require_local(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise RequestError(f"serve: the database {path} is no regular file: name another one with --database")
    require_own(path.parent, path, use="serve")
    for module in TABLE_MODULES:
        importlib.import_module(module)
    _require_ours(path)


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """Yields a session that sees the database as it was at its first question."""
    with Session(engine, expire_on_commit=False) as session:
        yield session


@contextmanager
def writing(engine: Engine) -> Iterator[Session]:
    """Yields a session that may write. It commits at the end of the block, and undoes everything after an error.

    The write lock is taken at the beginning, so that what the block reads cannot change before it writes.
    """
    with Session(engine.execution_options(**{_WRITES: True}), expire_on_commit=False) as session, session.begin():
        yield session


def schema_version(path: Path) -> int:
    """Returns the version of the tables in a database file; 0 for an empty one.

    Raises:
        sqlite3.DatabaseError: it is no database.
    """
    with closing(_opened_to_read(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _opened_to_read(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=_BUSY_SECONDS, uri=True)


def _require_ours(path: Path) -> None:
    """Refuses a database that is not ours, before anything is changed in it, such as its mode or its journal.

    A program such as MLflow has a table `runs` too.
    """
    try:
        if not path.is_file() or not path.stat().st_size:
            return
        with closing(_opened_to_read(path)) as connection:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
            columns = {
                name: {row[1] for row in connection.execute(f"PRAGMA table_info({table.name})")}
                for name, table in Base.metadata.tables.items()
                if name in tables
            }
    except (OSError, sqlite3.Error) as error:
        raise RequestError(f"serve: {path} cannot be used as a database: {error}") from None
    other = "name another file with --database"
    if version > VERSION:
        raise RequestError(
            f"serve: {path} has tables of version {version}, this ortlaunch has version {VERSION}: "
            f"start the ortlaunch that wrote it, or {other}"
        )
    if 0 < version < VERSION:
        return
    if version == 0 and tables:
        raise RequestError(f"serve: {path} is the database of another program ({min(tables)}, …): {other}")
    for name, found in columns.items():
        if missing := [one.name for one in Base.metadata.tables[name].columns if one.name not in found]:
            raise RequestError(
                f"serve: the table {name} of {path} lacks {', '.join(missing)}: an ortlaunch from before the first "
                f"release has made it, or another program. Start that one, or {other}"
            )


def _make_tables(engine: Engine) -> None:
    """Runs the migrations that the database lacks, all of them or none."""
    with engine.execution_options(**{_WRITES: True}).begin() as connection:
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        if version == VERSION:
            return
        # It takes a second, which a database of today need not wait for.
        from alembic import command
        from alembic.config import Config

        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(_MIGRATIONS))
        if version == 1:
            # It was made before there were migrations.
            command.stamp(config, "0001")
        command.upgrade(config, "head")
        connection.exec_driver_sql(f"PRAGMA user_version = {VERSION}")


def _prepare(connection: Any, _record: Any) -> None:
    # The driver would open transactions by itself, and only before the first write: see `_begin`.
    connection.isolation_level = None
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(_WRITES) else "BEGIN")


def _require_local(path: Path) -> None:
    kind = file_system(path)
    if kind in _NETWORK or kind.startswith(_NETWORK_FUSE):
        raise RequestError(
            f"serve: {path} is on a network file system ({kind}), where SQLite's locks are not safe: "
            "name a file on a local disk with --database"
        )


def file_system(path: Path) -> str:
    """Returns the kind of file system that a path is on, such as ``ext4``; empty if it is not known."""
    import psutil

    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    place = place.resolve()
    found, longest = "", -1
    for part in psutil.disk_partitions(all=True):
        mount = Path(part.mountpoint)
        if place.is_relative_to(mount) and len(mount.parts) >= longest:
            found, longest = part.fstype, len(mount.parts)
    return found
