"""The service before a cluster: SLURM is the queue, and each run is submitted by the Unix user that it belongs to."""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import PATIENCE, Slurm
from tests.support.needs import needs
from tests.support.service import PASSWORD, Server, cookie_of, start
from tests.support.users import python_for_all

OTHER = "nobody"
KEYS = {"launcher": "slurm", "model": "mlp", "backend": "eager", "trainer": "single", "tracking": "none"}
KEYS |= {"launcher.time": "5", "launcher.preflight": False}
_SUDO = """#!/bin/sh
[ "$1 $2 $4" = "-n -u --" ] || exit 9
user=$3; shift 4
exec setpriv --reuid=$user --regid=$(id -g $user) --clear-groups env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" \\
  SLURM_CONF="$SLURM_CONF" HOME={home} "$@"
"""
"""Stands in for sudo with a rule that keeps these variables."""


def place_of(folder: Path) -> Path:
    """A run root in which the other user has a folder, and the service may act for that user."""
    own, home = folder / "runs" / OTHER, folder / "home"
    for place in (own, home):
        place.mkdir(parents=True)
        os.chown(place, pwd.getpwnam(OTHER).pw_uid, -1)
    (folder / "runs" / ".serve").mkdir(mode=0o700)
    (folder / "runs" / ".serve" / "unix_users").write_text(f"{OTHER}\n")
    sudo = folder / "bin" / "sudo"
    sudo.parent.mkdir()
    sudo.write_text(_SUDO.format(home=home))
    sudo.chmod(0o755)
    for above in (folder, *folder.parents):
        if above != Path("/") and above.owner() == "root":
            above.chmod(above.stat().st_mode | 0o055)
    return folder


def submit(server: Server, name: str, **changes: Any) -> dict[str, Any]:
    """Submits a run of this name, always the same one."""
    body = {"keys": KEYS | {"name": name, "train.steps": 100000} | changes}
    answer = server.ask("POST", "/api/runs", body, {"Idempotency-Key": name})
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


def wait_for(server: Server, run: str, state: str) -> dict[str, Any]:
    """Waits until a run is in a state, and returns its row."""
    deadline = time.monotonic() + PATIENCE
    while True:
        row: dict[str, Any] = server.ask("GET", f"/api/runs/{run}").json["row"]
        if row["state"] == state and (state != "running" or row["step"]):
            return row
        assert time.monotonic() < deadline, row
        time.sleep(0.5)


def test_each_run_is_submitted_once_by_its_own_unix_user(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(os.geteuid() == 0, "needs root")
    folder = place_of(tmp_path)
    python = python_for_all(folder)
    needs(python, f"needs a Python that the user {OTHER} may run")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    server = start(folder, python=python, SLURM_CONF=str(slurm.lab.conf))
    try:
        server.first_administrator()
        made = server.ask("POST", "/api/users", {"name": "ann", "role": "runner", "unix_user": OTHER}).json
        admin, server.cookie = server.cookie, ""
        link = {"link": made["link"].rpartition("/")[2], "name": "ann", "password": PASSWORD}
        ann = cookie_of(server.ask("POST", "/api/link", link))
        ids = {}
        for name, server.cookie in (("of-ann", ann), ("of-ada", admin)):
            ids[name] = submit(server, name)["id"]
        server.kill()
        server = start(folder, python=python, SLURM_CONF=str(slurm.lab.conf))
        for name, server.cookie in (("of-ann", ann), ("of-ada", admin)):
            assert submit(server, name)["id"] == ids[name]
            wait_for(server, ids[name], "running")
        jobs = slurm("squeue", "-h", "-o", "%u %j").split("\n")
        assert sorted(filter(None, jobs)) == [f"{OTHER} of-ann", "root of-ada"]
        server.cookie = ann
        assert server.ask("POST", f"/api/runs/{ids['of-ada']}/cancel").status == 403
        assert server.ask("POST", f"/api/runs/{ids['of-ann']}/cancel").status == 202
        assert wait_for(server, ids["of-ann"], "stopped")["reason"].startswith("at step ")
        [place] = (folder / "runs" / OTHER).glob("default/*of-ann*")
        assert place.owner() == OTHER
    finally:
        server.kill()
