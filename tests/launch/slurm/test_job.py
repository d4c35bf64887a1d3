"""What a batch script does beside its workers, in a real run folder; where SLURM is silent."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import save_config, to_config
from ortlaunch.launch.queue import attempt, history
from ortlaunch.launch.slurm import job
from ortlaunch.launch.slurm.launcher import SlurmLauncher
from ortlaunch.launch.slurm.plan import settled
from ortlaunch.run import failure, sweep
from ortlaunch.run.run import Run, Stopped
from ortlaunch.run.state import FIRST_STEP
from ortlaunch.tracking.journal import Journal, read_events
from tests.support.environment import environment


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """The folder of a run that was just submitted, and the variables of its job."""
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    made = settled(to_config(compose(["launcher=slurm", "launcher.max_restarts=1", "tracking=none"])))
    save_config(made, folder / "config.yaml")
    journal = Journal(folder / "journal.jsonl")
    journal.start("default", "name", "abc123")
    journal.close()
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "ORTLAUNCH_ATTEMPT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    # There is no scontrol here.
    monkeypatch.setenv("PATH", str(tmp_path))
    return folder


def ended(folder):
    """How the journal says that the run ended."""
    return [event["status"] for event in read_events(folder / "journal.jsonl", 0)[0] if event["event"] == "end"]


def tags(folder):
    """The latest value of each tag."""
    events = read_events(folder / "journal.jsonl", 0)[0]
    return {key: value for event in events if event["event"] == "tags" for key, value in event["values"].items()}


def test_an_attempt_clears_what_the_one_before_said_of_itself(run_dir, capsys):
    (run_dir / "STOP").write_text("requeue\n")
    (run_dir / "stopped.json").write_text("{}")
    failure.record(run_dir, 0, ValueError("old"))
    (run_dir / "preflight").mkdir()
    assert job.begin(run_dir) == 0
    assert capsys.readouterr().out.strip() == "0"
    assert not any((run_dir / name).exists() for name in ("STOP", "stopped.json", "failures", "preflight"))
    assert (run_dir / "preflight.token").read_text() == "7-0-0"
    assert (tags(run_dir)["ortlaunch.state"], tags(run_dir)["slurm.nodes"]) == ("running", "n[1-2]")
    job.begin(run_dir)
    assert capsys.readouterr().out.strip() == "1"


@pytest.mark.parametrize("module", ["ortlaunch.launch.slurm.job begin", "ortlaunch.launch.queue.job"])
def test_a_job_that_begins_on_a_full_disk_says_so_in_one_line(run_dir, module):
    full = ["/bin/sh", "-c", f'ulimit -f 0; exec "$0" -m {module} "$1"', sys.executable, str(run_dir)]
    done = subprocess.run(full, capture_output=True, text=True, env=environment() | {"SLURM_JOB_ID": "7"}, timeout=200)
    assert done.returncode == 2, done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith("---")]
    said = f"ortlaunch: {run_dir} cannot be written: File too large: when it can, ortlaunch resume {run_dir}"
    assert told == [said]


def test_the_jobs_variables_are_kept_and_its_secrets_are_not(run_dir, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_PARTITION", "gpu")
    monkeypatch.setenv("SLURM_JWT", "hunter2")
    job.begin(run_dir)
    assert json.loads((run_dir / "slurm-0.json").read_text()) == {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_PARTITION": "gpu",
    }
    events = read_events(run_dir / "journal.jsonl", 0)[0]
    kept = [event for event in events if event["event"] == "artifact"]
    assert [(event["path"], event["artifact_path"]) for event in kept] == [("slurm-0.json", "ortlaunch")]


def test_what_a_tracker_prints_is_no_part_of_the_answer(run_dir, monkeypatch, capsys):
    """The script would take it for a part of the number of attempts or of the exit code."""
    monkeypatch.setattr(attempt, "_remove_earlier_files", lambda _: print("syncing"))
    job.begin(run_dir)
    assert capsys.readouterr().out == "0\n"
    (run_dir / "done.json").write_text("{}")
    monkeypatch.setattr(attempt, "_end", lambda *_: print("synced 5 files"))
    job.decide(run_dir, 0, [])
    assert capsys.readouterr().out == "end 0\n"


def test_what_is_done_does_not_begin(run_dir):
    """Where the job was killed after the last step, before it could journal the end, the next one journals it."""
    (run_dir / "done.json").write_text("{}")
    assert job.begin(run_dir) == 3
    assert (ended(run_dir), tags(run_dir)["ortlaunch.state"]) == (["FINISHED"], "finished")
    before = (run_dir / "journal.jsonl").read_text()
    assert job.begin(run_dir) == 3
    assert (run_dir / "journal.jsonl").read_text() == before


@pytest.mark.parametrize("text", ["", "cancel\n"])
def test_what_a_person_stopped_in_the_queue_does_not_begin(run_dir, text):
    (run_dir / "STOP").write_text(text)
    assert job.begin(run_dir) == 3
    assert ended(run_dir) == ["KILLED"]


def test_a_resumed_job_begins_while_the_former_one_leaves_its_nodes(run_dir, monkeypatch):
    """`ortlaunch cancel` says that a run has ended as soon as its journal does; SLURM takes its time."""
    job.begin(run_dir)
    Run(run_dir).note_stopped(Stopped(3, "step-00000003", "cancel"))
    job.decide(run_dir, 0, [])
    assert ended(run_dir) == ["KILLED"]
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    monkeypatch.setattr(SlurmLauncher, "is_over", lambda *_: False)
    monkeypatch.setattr(attempt, "_LEAVING_SECONDS", 0.0)
    assert job.begin(run_dir) == 0


def test_a_job_that_finds_another_one_at_its_run_fails(run_dir, monkeypatch, capsys):
    """Not as one that has nothing to do: the runs that come after it would begin."""
    job.begin(run_dir)
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    monkeypatch.setattr(SlurmLauncher, "is_over", lambda *_: False)
    monkeypatch.setattr(attempt, "_LEAVING_SECONDS", 0.0)
    monkeypatch.setattr(attempt, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(sys, "argv", ["job", "begin", str(run_dir)])
    assert job.main() == 2
    assert "belongs to job" in capsys.readouterr().err


def test_crashes_are_counted_over_attempts(run_dir, capsys):
    for expected in ("again", "end 1"):
        job.begin(run_dir)
        time.sleep(0.01)
        failure.record(run_dir, 3, ValueError("the cause"), host="n2")
        (run_dir / "logs" / "torchrun-1.log").touch()
        capsys.readouterr()
        job.decide(run_dir, 1, [])
        assert capsys.readouterr().out.strip() == expected
    assert ended(run_dir) == ["FAILED"]
    past = history.load(run_dir)
    assert [one.is_crash for one in past.attempts] == [True, True]
    assert past.attempts[0].why == "crashed (srun ended with 1): rank 3 on n2: ValueError: the cause"
    assert "the cause" in tags(run_dir)["ortlaunch.requeue_reason"]
    failures = [event for event in read_events(run_dir / "journal.jsonl", 0)[0] if event["event"] == "failure"]
    assert [(event["rank"], event["host"]) for event in failures] == [(3, "n2")]


@pytest.mark.parametrize("has_trained", [False, True])
def test_what_the_workers_of_a_resumed_run_refuse_is_not_kept(run_dir, capsys, has_trained):
    """Otherwise every later resume would be refused too. A configuration that has trained is no wrong one."""
    new = (run_dir / "config.yaml").read_text()
    (run_dir / "attempts" / "1").mkdir(parents=True)
    (run_dir / "attempts" / "1" / "config.yaml").write_text(f"# before the resume\n{new}")
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.start("default", "name", "abc123")
        job.begin(run_dir)
        if has_trained:
            journal.metrics(1, {FIRST_STEP: 1.0})
    failure.record(run_dir, 0, RequestError("the data has 5 samples"))
    capsys.readouterr()
    job.decide(run_dir, 1, [])
    assert capsys.readouterr().out == "end 2\n"
    assert (run_dir / "config.yaml").read_text().startswith("# before the resume") != has_trained


def test_a_warning_queues_the_run_again(run_dir, capsys):
    job.begin(run_dir)
    (run_dir / "stopped.json").write_text(json.dumps({"step": 8, "reason": "requeue"}))
    capsys.readouterr()
    job.decide(run_dir, 0, ["WARNING"])
    assert capsys.readouterr().out.strip() == "requeue"
    assert ended(run_dir) == []
    assert (tags(run_dir)["ortlaunch.state"], tags(run_dir)["ortlaunch.requeues"]) == ("queued", "1")


@pytest.mark.parametrize(
    ("signals", "answer", "state"), [(["WARNING"], "requeue", None), ([], "end 0", "FINISHED"), ([], "end 2", "FAILED")]
)
def test_what_a_job_does_next_does_not_depend_on_room_for_its_record(
    run_dir, monkeypatch, capsys, signals, answer, state
):
    """With a full disk when the workers have ended: the script would take silence for the end of the run."""
    job.begin(run_dir)
    if state == "FINISHED":
        (run_dir / "done.json").write_text("{}")
    elif state == "FAILED":
        failure.record(run_dir, 0, RequestError("the data has 5 samples"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_write", full)
        patched.setattr(history, "replace_text", full)
        patched.setattr(sweep, "note_end", full)
        capsys.readouterr()
        job.decide(run_dir, int(state == "FAILED"), signals)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == answer
    assert "journal.jsonl cannot be written (No space left on device)" in printed.err
    assert ended(run_dir) == []
    assert Run(run_dir).state().ended == state, "the claim keeps it until there is room"


def test_a_history_that_cannot_be_read_does_not_end_the_run(run_dir, capsys):
    job.begin(run_dir)
    (run_dir / "history.json").write_text("")
    (run_dir / "stopped.json").write_text(json.dumps({"step": 8, "reason": "requeue"}))
    capsys.readouterr()
    job.decide(run_dir, 0, ["WARNING"])
    assert capsys.readouterr().out.strip() == "requeue"


def test_a_cluster_that_does_not_requeue_ends_the_run(run_dir):
    job.begin(run_dir)
    job.refused(run_dir)
    assert ended(run_dir) == ["KILLED"]
    assert "ortlaunch resume" in tags(run_dir)["ortlaunch.requeue_reason"]


def test_where_the_time_went_is_journalled_before_the_end(run_dir, capsys):
    job.begin(run_dir)
    journal = Journal(run_dir / "journal.jsonl")
    journal.metrics(0, {"startup/time_to_first_step_seconds": 0.0})
    journal.metrics(1, {"throughput/step_seconds": 0.001})
    (run_dir / "done.json").write_text("{}")
    job.decide(run_dir, 0, [])
    *_, account, end = read_events(run_dir / "journal.jsonl", 0)[0]
    assert end["event"] == "end"
    assert account["step"] == 1
    assert 0 < account["values"]["summary/goodput_percent"] <= 100
