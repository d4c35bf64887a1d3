"""Checks what `ortlaunch serve` needs, and the database of the service in this folder."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pwd
import shlex
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ortlaunch.base.locks import is_held
from ortlaunch.base.ownership import why_foreign
from ortlaunch.base.text import counted
from ortlaunch.doctor.line import Level, Line
from ortlaunch.serve.command import NEEDED
from ortlaunch.serve.settings import Settings
from ortlaunch.serve.unix_users import listed_users

_SUDO_SECONDS = 5


def service(database: Path | None = None) -> Iterator[Line]:
    """Checks the packages of the service, its database, and the Unix users whom it may act for.

    Args:
        database: the database's file; None takes that of the run root in this folder.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        text = f"ortlaunch serve lacks {', '.join(missing)}; nothing else needs them"
        yield Line("service", Level.warning, text, "pip install 'ortlaunch[serve]'")
        return
    settings = Settings(database_path=database)
    path = settings.database
    installed = f"FastAPI {importlib.metadata.version('fastapi')}, uvicorn {importlib.metadata.version('uvicorn')}"
    if database is not None and not path.is_file():
        yield Line("service", Level.error, f"{installed}; --database {path}: there is no such file")
        return
    if not path.exists():
        text = f"{installed}; none was started in {path.parent.parent.parent} (--database FILE looks at another)"
        yield Line("service", Level.ok, text)
        return
    yield _database(path, settings.lock_file, installed)
    yield from _users(settings.unix_users)


def _database(path: Path, lock: Path, installed: str) -> Line:
    from ortlaunch.serve.database import VERSION, schema_version

    try:
        version = schema_version(path)
    except sqlite3.Error as error:
        return Line("service", Level.error, f"{installed}; {path} cannot be read: {error}")
    if version > VERSION:
        text = f"{installed}; {path} has tables of version {version}, this ortlaunch has version {VERSION}"
        return Line("service", Level.error, text)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        text = f"{installed}; others can read {path}"
        return Line("service", Level.error, text, f"chmod 600 {shlex.quote(str(path))}")
    state = {True: "a service runs on", False: "no service runs on", None: "a service may run on"}[is_held(lock)]
    return Line("service", Level.ok, f"{installed}; {state} {path}")


def _users(path: Path) -> Iterator[Line]:
    """Checks that sudo lets this account act for each user of the list, without a password."""
    if not path.exists():
        return
    why = why_foreign(path)
    if why is not None:
        yield Line("service users", Level.error, f"{path} {why}, and names the accounts of runs")
        return
    names = listed_users(path)
    if shutil.which("sudo") is None:
        text = f"{path} lists users, and there is no sudo"
        yield Line("service users", Level.error, text, "apt-get install sudo")
        return
    wrong = [f"{name} ({problem})" for name in names if (problem := _problem(name))]
    if wrong:
        yield Line("service users", Level.error, f"sudo cannot act for {', '.join(wrong)}", "visudo")
    else:
        yield Line("service users", Level.ok, f"sudo may act for {counted(len(names), 'user')} of {path}")


def _problem(name: str) -> str:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return "no such user"
    # Asks whether the very command of the service is allowed; nothing is run.
    command = ["sudo", "-n", "-l", "-u", name, "--", sys.executable, "-P", "-m", "ortlaunch.serve.act", "check"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_SUDO_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return "sudo gave no answer"
    return "" if result.returncode == 0 else (result.stderr.strip().splitlines() or ["sudo refuses"])[-1]
