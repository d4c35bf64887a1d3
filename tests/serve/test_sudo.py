"""Runs of several Unix users by real sudo, with the documentation's own rule. It makes its users and removes them."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.needs import needs
from tests.support.service import PASSWORD, Server, cookie_of, start
from tests.support.users import folder_for_all, needs_root, python_for_all

pytestmark = [pytest.mark.nightly, needs_root]
PROGRAMS = ("sudo", "visudo", "useradd", "userdel", "setpriv")
DOCS = Path(__file__).parents[2] / "docs" / "serve.md"
KEYS = {"model": "mlp", "backend": "eager", "trainer": "single", "tracking": "none", "device": "cpu"}
PATIENCE = 120
_DOCTOR = "from ortlaunch.doctor.service import service; print(*(line.text for line in service()), sep='\\n')"


@dataclass
class House:
    """A machine with an account of the service, and people with accounts of their own."""

    folder: Path
    python: str
    service: str
    people: tuple[str, str]
    rules: Path

    def as_user(self, user: str, *words: str) -> list[str]:
        """A command as one of the users, without root's rights."""
        return [
            "setpriv",
            f"--reuid={user}",
            f"--regid={user}",
            "--init-groups",
            "env",
            f"HOME={self.folder}/home/{user}",
            *words,
        ]

    def allow(self, *people: str) -> None:
        """Writes the documentation's rule for some of the people."""
        found = re.search(r"^    (ortlaunch ALL=.*)$", DOCS.read_text(), re.MULTILINE)
        assert found is not None
        changes = {"ortlaunch ALL": f"{self.service} ALL", "anna,bernd": ",".join(people)}
        rule = found[1].replace("/opt/ortlaunch/bin/python", self.python)
        for old, new in changes.items():
            assert rule.count(old) == 1, rule
            rule = rule.replace(old, new)
        # The tests import a tree that is not installed.
        text = f'{rule}\nDefaults:{self.service} env_keep += "PYTHONPATH"\n'
        self.rules.unlink(missing_ok=True)
        self.rules.touch(mode=0o440)
        self.rules.write_text(text)
        subprocess.run(["visudo", "-c", "-q", "-f", str(self.rules)], check=True)

    def doctor(self) -> str:
        """What the doctor says of the service, as the service's account."""
        words = self.as_user(self.service, self.python, "-c", _DOCTOR)
        result = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False, timeout=200)
        assert result.returncode == 0, result.stderr
        return result.stdout


def remove(users: tuple[str, ...]) -> None:
    """Ends all processes of some users, and removes the users."""
    for process in psutil.process_iter(["username"]):
        if process.info["username"] in users:
            with suppress(psutil.Error):
                process.kill()
    for user in users:
        subprocess.run(["userdel", "--force", user], capture_output=True, check=False)


@pytest.fixture
def house() -> Iterator[House]:
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    needs(not lacking, f"needs {', '.join(lacking)}")
    with folder_for_all() as folder:
        yield from house_in(folder)


def house_in(folder: Path) -> Iterator[House]:
    """A machine with its users in a folder."""
    python = python_for_all(folder)
    needs(python, "needs a Python with the packages of the tests that every user may run")
    service, *people = (f"ort{os.getpid()}{letter}" for letter in "sab")
    rules = Path("/etc/sudoers.d") / f"ortlaunch-test-{os.getpid()}"
    try:
        for user in (service, *people):
            home = ["--create-home", "--home-dir", str(folder / "home" / user)]
            (folder / "home").mkdir(exist_ok=True)
            subprocess.run(["useradd", "--user-group", *home, user], check=True, capture_output=True)
        made = House(folder, python or "", service, (people[0], people[1]), rules)
        root = folder / "runs"
        for owner, place in ((service, root), *((user, root / user) for user in people), (service, root / ".serve")):
            place.mkdir(mode=0o700 if place.name == ".serve" else 0o755)
            shutil.chown(place, owner, owner)
        listed = root / ".serve" / "unix_users"
        listed.write_text("".join(f"{user}\n" for user in people))
        shutil.chown(listed, service, service)
        yield made
    finally:
        rules.unlink(missing_ok=True)
        remove((service, *people))


def add(server: Server, name: str, unix_user: str) -> str:
    """Adds a user as the administrator does, and returns the session of this user."""
    made = server.ask("POST", "/api/users", {"name": name, "role": "runner", "unix_user": unix_user})
    assert made.status == 201, made.body
    link = {"link": made.json["link"].rpartition("/")[2], "password": PASSWORD}
    admin, server.cookie = server.cookie, ""
    session = cookie_of(server.ask("POST", "/api/link", link))
    server.cookie = admin
    return session


def submit(server: Server, name: str, steps: int) -> Any:
    keys = KEYS | {"name": name, "train.steps": steps}
    return server.ask("POST", "/api/runs", {"keys": keys}, {"Idempotency-Key": name})


def wait_for(server: Server, run: str, state: str) -> dict[str, Any]:
    """Waits until a run is in a state, and returns its row; a running one has made a step."""
    deadline = time.monotonic() + PATIENCE
    while True:
        row: dict[str, Any] = server.ask("GET", f"/api/runs/{run}").json["row"]
        if row["state"] == state and (state != "running" or row["step"]):
            return row
        assert time.monotonic() < deadline, row
        time.sleep(0.5)


def owners(folder: Path) -> set[str]:
    """The users who own a run folder and what is in it."""
    return {pwd.getpwuid(one.lstat().st_uid).pw_name for one in (folder, *folder.rglob("*"))}


def workers(folder: Path) -> set[str]:
    """The users as whom the processes of a run work."""
    found = psutil.process_iter(["username", "cmdline"])
    return {one.info["username"] for one in found if str(folder) in shlex.join(one.info["cmdline"] or [])}


def test_each_run_belongs_to_the_user_who_has_sent_it(house: House) -> None:
    anna, bernd = house.people
    house.allow(anna)
    prefix = house.as_user(house.service)
    server = start(house.folder, "--slots=2", prefix=prefix, python=house.python)
    try:
        server.first_administrator()
        assert f"sudo cannot act for {bernd}" in house.doctor()
        ann, bob, eve = (add(server, name, user) for name, user in (("ann", anna), ("bob", bernd), ("eve", "nobody")))
        server.cookie = eve
        refused = submit(server, "of-eve", 5)
        assert refused.status in (403, 409, 422), refused.body
        assert "may not start runs as the Unix user nobody" in refused.body.decode()
        server.cookie = bob
        refused = submit(server, "of-bob", 5)
        assert refused.status == 503 and "sudo" in refused.body.decode(), refused.body
        house.allow(anna, bernd)
        assert "sudo may act for 2 users" in house.doctor()
        ids = {}
        for name, server.cookie in (("of-ann", ann), ("of-bob", bob)):
            answer = submit(server, name, 1_000_000)
            assert answer.status == 201, answer.body
            ids[name] = answer.json["id"]
        for name, user in (("of-ann", anna), ("of-bob", bernd)):
            wait_for(server, ids[name], "running")
            (place,) = (house.folder / "runs" / user).glob(f"default/*{name}*")
            assert (owners(place), workers(place)) == ({user}, {user})
        assert server.ask("POST", f"/api/runs/{ids['of-ann']}/cancel").status == 403
        for name, server.cookie in (("of-ann", ann), ("of-bob", bob)):
            assert server.ask("POST", f"/api/runs/{ids[name]}/cancel").status == 202
            assert wait_for(server, ids[name], "stopped")["reason"].startswith("at step ")
    finally:
        server.kill()
