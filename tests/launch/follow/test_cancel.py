"""`ortlaunch cancel`, as far as it goes without a run: what is refused, and what it leaves for the run to find."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import TRUST
from ortlaunch.base.user import user_name
from ortlaunch.config.schema import Config, SlurmConfig
from ortlaunch.follow.cancel import cancel
from ortlaunch.launch.slurm import programs
from ortlaunch.launch.slurm.launcher import SlurmLauncher
from ortlaunch.run.identity import start_ticks
from tests.support.users import OTHER_USER, give_away, needs_root

ELSEWHERE = {"pid": 1, "host": "another-host", "start_ticks": 1}


def test_what_is_over_is_left_alone(make_run, capsys) -> None:
    run_dir = make_run("done")
    assert cancel(["done", "--now"]) == 0
    assert capsys.readouterr().out == "done (000001) is over already: finished\n"
    assert not (run_dir / "STOP").exists()


def test_a_run_of_another_machine_is_asked_and_never_killed(make_run, capsys) -> None:
    run_dir = make_run("there", end=None, launcher=ELSEWHERE)
    with pytest.raises(RequestError, match="runs on another-host: cancel it there"):
        cancel(["there", "--now"])
    assert not (run_dir / "STOP").exists()
    assert cancel(["there", "--wait", "0.5"]) == 1
    assert (run_dir / "STOP").read_text() == "cancel\n"
    assert "still goes on: stopping" in capsys.readouterr().out


def test_a_job_that_cannot_be_cancelled_from_here_is_said(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run_dir = make_run("queued", step=None, end=None, job={"scheduler": "slurm", "job_id": "5"})
    with pytest.raises(RequestError, match="scancel is not installed here: cancel job 5"):
        cancel(["5"])
    events = [json.loads(line)["event"] for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    assert "end" not in events


def test_a_scheduler_that_does_not_answer_has_ended_no_job(make_run, squeue_fails, capsys) -> None:
    run_dir = make_run("training", end=None, job={"scheduler": "slurm", "job_id": "5"})
    assert cancel(["5", "--wait", "0"]) == 1
    assert "training (000001, job 5) still goes on: unknown, squeue: Unable to contact" in capsys.readouterr().out
    events = [json.loads(line)["event"] for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    assert "end" not in events


def named(process: int) -> dict[str, object]:
    """A launcher.json that names a process of this machine."""
    return {"pid": process, "host": socket.gethostname(), "start_ticks": start_ticks(process)}


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with a run."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_process_that_is_no_launcher_is_not_signalled(make_run, bystander) -> None:
    run_dir = make_run("planted", end=None, launcher=named(bystander.pid))
    with pytest.raises(
        RequestError, match=rf"process {bystander.pid}, which .*launcher.json names, is not the launcher"
    ):
        cancel(["planted", "--now"])
    assert bystander.poll() is None and not (run_dir / "STOP").exists()


def test_the_launcher_of_another_run_is_not_signalled(make_run, tmp_path) -> None:
    other = make_run("other", end=None)
    with (other / "journal.jsonl").open("ab") as journal:
        process = subprocess.Popen(["sleep", "600"], stdout=journal)
    try:
        make_run("planted", end=None, launcher=named(process.pid))
        with pytest.raises(RequestError, match="is not the launcher"):
            cancel(["planted"])
        assert process.poll() is None
        # It is the launcher of the run whose journal it has open.
        (other / "launcher.json").write_text(json.dumps(named(process.pid)))
        threading.Timer(0.5, process.wait).start()
        assert cancel(["other", "--wait", "100"]) == 0
        assert process.wait(100) == -signal.SIGINT
    finally:
        process.kill()
        process.wait()


@needs_root
def test_a_process_of_another_user_is_not_signalled(make_run) -> None:
    run_dir = make_run("planted", end=None)
    with (run_dir / "journal.jsonl").open("ab") as journal:
        process = subprocess.Popen(["sleep", "600"], stdout=journal, user=OTHER_USER, cwd="/")
    try:
        (run_dir / "launcher.json").write_text(json.dumps(named(process.pid)))
        with pytest.raises(RequestError, match=r"belongs to another user: ask them to cancel the run"):
            cancel(["planted", "--now"])
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@needs_root
def test_a_run_of_another_user_is_left_alone(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run("theirs", end=None, launcher=ELSEWHERE)
    give_away(run_dir)
    with pytest.raises(RequestError, match=r"cancel: .* belongs to the user nobody"):
        cancel(["theirs"])
    assert not (run_dir / "STOP").exists()
    monkeypatch.setenv(TRUST, str(run_dir))
    assert cancel(["theirs", "--wait", "0.1"]) == 1
    assert (run_dir / "STOP").exists()


def test_a_job_id_that_is_none_reaches_no_program(make_run, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = tmp_path / "called"
    (tmp_path / "bin").mkdir()
    for program in ("scancel", "squeue", "sacct", "scontrol"):
        path = tmp_path / "bin" / program
        path.write_text(f'#!/bin/sh\necho "$*" >> {called}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    make_run("planted", step=None, end=None, job={"scheduler": "slurm", "job_id": "--user=root"})
    with pytest.raises(RequestError, match=r"job.json cannot be read: its job id has not the form of one: nothing"):
        cancel(["planted", "--wait", "0"])
    with pytest.raises(RequestError, match="'--user=root' is no job id of SLURM"):
        SlurmLauncher().cancel(["5", "--user=root"])
    with pytest.raises(RequestError, match="is no job id of SLURM"):
        SlurmLauncher().after(Config(launcher=SlurmConfig()), ["5,afterany:6"])
    assert SlurmLauncher().may_live("--user=root")
    SlurmLauncher().past_states(["--user=root", "7_2"], 0)
    calls = called.read_text() if called.exists() else ""
    assert "root" not in calls.replace(f"--user={user_name()}", "") and "7_2" in calls


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("120", True), ("120_3", True), ("120_[1-4%2]", True), ("120+1", True)]
    + [(text, False) for text in ("", "-1", "1 2", "1,2", "120_", "1\n2", "\uff11", "9" * 300, "all")],
)
def test_job_ids_of_slurm(text: str, is_one: bool) -> None:
    assert programs.is_job_id(text) is is_one
