"""What the children say of runs, asked in this process: lost runs, absent folders, stops in the first seconds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.follow.status import Look, look
from ortlaunch.run.folders import RunFolder
from ortlaunch.run.identity import Process, machine, start_ticks
from ortlaunch.run.run import Run
from ortlaunch.serve.acts import starting
from ortlaunch.serve.acts.composing import require_one_machine
from ortlaunch.serve.acts.runs import cancel_run, delete, outcome
from ortlaunch.serve.runner import take
from tests.launch.follow.conftest import Maker

_ELSEWHERE = {"pid": 7, "host": "an-earlier-boot", "start_ticks": 1, "machine": "earlier"}


def job_of(run_dir: Path, **changes: Any) -> dict[str, Any]:
    job = {"id": "q1", "run_dir": str(run_dir), "token": "t", "attempt": 1, "resumes": False, "begun_before": 0}
    return {**job, **changes}


def found(make_run: Maker, *jobs: dict[str, Any]) -> dict[str, Any]:
    """The answer about the last job."""
    answers: dict[str, Any] = outcome({"root": str(make_run.root), "jobs": list(jobs)})["jobs"]
    return answers[jobs[-1]["id"]]


def lost_run(make_run: Maker) -> Path:
    """A run whose launcher belonged to an earlier boot, silent for an hour."""
    run_dir = make_run(end=None, launcher=_ELSEWHERE)
    silent = time.time() - 3600
    os.utime(run_dir / "journal.jsonl", (silent, silent))
    return run_dir


def test_a_run_of_several_machines_is_for_a_scheduler(make_run: Maker) -> None:
    several = ["model=mlp", "launcher.nodes=2"]
    with pytest.raises(RequestError, match=r"launcher\.nodes=2: the queue of this machine .*: choose another"):
        require_one_machine(to_config(compose(several)), "choose another")
    require_one_machine(to_config(compose([*several, "launcher=slurm"])), "choose another")
    require_one_machine(to_config(compose(several[:1])), "choose another")


def test_a_run_that_a_reboot_has_ended_is_over(make_run: Maker) -> None:
    said = found(make_run, job_of(lost_run(make_run)))
    assert (said["began"], said["is_over"], said["state"]) == (True, True, "killed")
    assert said["reason"].startswith("no sign of life from an-earlier-boot")


def test_a_run_elsewhere_that_was_heard_of_goes_on(make_run: Maker) -> None:
    run_dir = make_run(end=None, launcher=_ELSEWHERE)
    assert found(make_run, job_of(run_dir))["is_over"] is False
    with pytest.raises(RequestError, match="is running: stop it first"):
        delete({"root": str(make_run.root), "run_dir": str(run_dir)})


def test_a_run_that_a_reboot_has_ended_can_be_deleted(make_run: Maker) -> None:
    run_dir = lost_run(make_run)
    place = delete({"root": str(make_run.root), "run_dir": str(run_dir)})["place"]
    assert Path(place).is_dir()
    assert not run_dir.exists()


def started(make_run: Maker, said: str) -> dict[str, Any]:
    """A job whose command has printed something, and whose run folder is not there."""
    starts = make_run.root / ".starts"
    starts.mkdir(parents=True)
    (starts / "t.1.json").write_text("{}")
    (starts / "t.1.log").write_text(said)
    return job_of(make_run.root / "e" / "run")


def test_a_run_whose_folder_was_taken_away_has_begun(make_run: Maker) -> None:
    said = found(make_run, started(make_run, "ortlaunch: x\nrun folder: /x\n" + 30_000 * "a line\n"))
    assert (said["began"], said["is_over"], said["reason"]) == (True, True, "its run folder is gone")


def test_a_command_without_a_folder_says_why(make_run: Maker) -> None:
    said = found(make_run, started(make_run, "ortlaunch: no room\n"))
    assert (said["began"], said["refusal"]) == (False, "no room")


def test_nothing_is_said_of_a_run_whose_disk_is_not_mounted(make_run: Maker) -> None:
    make_run.root.mkdir()
    said = found(make_run, job_of(make_run.root / "e" / "run"))
    assert (said["began"], said["is_over"], said["state"]) == (True, False, "unknown")


def test_a_run_that_cannot_be_read_keeps_no_other_from_its_answer(
    make_run: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = job_of(make_run(), id="bad"), job_of(make_run(), id="good")

    def look_of(folder: RunFolder, max_age: float = 0.0) -> Look:
        if folder.place == bad["run_dir"]:
            raise PermissionError("no")
        return look(folder, max_age)

    monkeypatch.setattr("ortlaunch.serve.acts.runs.look", look_of)
    assert found(make_run, bad, good)["state"] == "finished"
    said = found(make_run, good, bad)
    assert (said["began"], said["is_over"], said["state"]) == (True, False, "unknown")


def test_a_start_that_is_refused_for_slowness_cannot_become_the_run(
    make_run: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_RECORD_SECONDS", 0.05)
    monkeypatch.setattr(starting, "_spawn", lambda record, request: None)
    request = {**started_request(make_run), "launcher": "local", "words": []}
    with pytest.raises(RequestError, match="could not be started"):
        starting.start(request)
    assert not take(starting.record_of(request)), "the slow child finds the record taken"


def started_request(make_run: Maker) -> dict[str, Any]:
    return {"root": str(make_run.root), **job_of(make_run.root / "e" / "run")}


def test_a_stop_reaches_a_run_that_goes_on_before_its_folder_says_so(make_run: Maker) -> None:
    run_dir = make_run(end="KILLED")
    with subprocess.Popen(["sleep", "600"]) as child:
        process = vars(Process(socket.gethostname(), child.pid, start_ticks(child.pid), machine()))
        request = {"root": str(make_run.root), "run_dir": str(run_dir), "process": process, "begun_before": 1}
        said = cancel_run(request)["said"]
        child.wait(120) if "asked" in said else child.kill()
    assert said == "it was asked to end before it had begun"
    assert "is over already" in cancel_run({**request, "begun_before": 0})["said"]


def test_two_stops_at_once_ask_the_run_once(make_run: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(end=None)
    asked: list[str] = []

    def slow_cancel(words: list[str]) -> None:
        time.sleep(0.2)
        asked.append(words[0])
        Run(run_dir).ask_to_stop("cancel")

    monkeypatch.setattr("ortlaunch.serve.acts.runs.cancel", slow_cancel)
    request = {"root": str(make_run.root), "run_dir": str(run_dir)}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cancel_run, [request, request]))
    assert asked == [str(run_dir)]


@pytest.mark.parametrize(("begun_before", "calls"), [(1, 1), (0, 0)], ids=["cut off before", "submitted"])
def test_a_resume_whose_submission_was_cut_off_is_submitted_again(
    make_run: Maker, monkeypatch: pytest.MonkeyPatch, begun_before: int, calls: int
) -> None:
    run_dir = make_run(job={"scheduler": "slurm", "job_id": "120"})
    request = {
        **started_request(make_run),
        **job_of(run_dir, resumes=True, begun_before=begun_before),
        "launcher": "slurm",
        "words": ["resume", str(run_dir)],
    }
    record = starting.record_of(request)
    record.parent.mkdir()
    record.write_text(json.dumps({"host": "h", "pid": 2**22 - 1, "start_ticks": 1}))
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(starting, "_call", called.append)
    assert starting.start(request)["scheduler_job"] == "120"
    assert len(called) == calls
