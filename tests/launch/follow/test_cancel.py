"""`ortlaunch cancel`, as far as it goes without a run: what is refused, and what it leaves for the run to find."""

from __future__ import annotations

import json

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.follow.cancel import cancel

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
