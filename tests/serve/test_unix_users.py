"""For whom the service acts, without a child."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortlaunch.base.user import name_of
from ortlaunch.serve.actor import Actor, Refused, own_user
from ortlaunch.serve.unfit import Unavailable


def test_a_list_that_others_may_write_is_refused_with_the_reason(tmp_path: Path) -> None:
    listed = tmp_path / "unix_users"
    listed.write_text("nobody\n")
    listed.chmod(0o666)
    with pytest.raises(Refused, match="can be written by every user"):
        Actor(tmp_path / "runs", listed).may_act_for("nobody")
    listed.chmod(0o600)
    assert Actor(tmp_path / "runs", listed).may_act_for("nobody")


def test_a_list_that_cannot_be_read_now_refuses_nobody_for_good(tmp_path: Path) -> None:
    (tmp_path / "unix_users").mkdir(mode=0o700)
    with pytest.raises(Unavailable, match="unix_users cannot be read: it is a folder"):
        Actor(tmp_path / "runs", tmp_path / "unix_users").call("nobody", "check", {})


def test_an_account_without_a_name_goes_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless(_user: int) -> str:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nameless)
    name_of.cache_clear()
    try:
        assert own_user() == str(os.geteuid())
    finally:
        name_of.cache_clear()


def test_no_variable_decides_whose_runs_start_without_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    """`runuser` and `su -m` keep the names of whoever called them."""
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "somebody-else")
    assert own_user() == name_of(os.geteuid()) != "somebody-else"
    assert not Actor(Path("/nowhere")).may_act_for("somebody-else")
