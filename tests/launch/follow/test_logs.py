"""`ortlaunch logs`: which lines are shown, and in what order."""

from __future__ import annotations

import threading
import time

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.follow import logs as follow_logs
from ortlaunch.follow.logs import logs
from ortlaunch.run.journal import Journal


@pytest.fixture
def run_dir(make_run):
    folder = make_run("run", run_id="abc123")
    (folder / "logs" / "rank-0.log").write_text("zero a\nzero b\n--- attempt 1\nzero ünfinished")
    (folder / "logs" / "rank-2.log").write_bytes(b"two \xff\n")
    (folder / "logs" / "rank-10.log").write_text("ten\nten error\n")
    return folder


def shown(capsys, *arguments: str) -> list[str]:
    assert logs(["abc123", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_first_workers_log_over_all_attempts(run_dir, capsys) -> None:
    assert shown(capsys) == ["zero a", "zero b", "--- attempt 1", "zero ünfinished"]


def test_all_ranks_in_their_order_with_their_numbers(run_dir, capsys) -> None:
    lines = shown(capsys, "--rank", "all", "--lines", "1")
    assert lines == [" 0| zero ünfinished", " 2| two \ufffd", "10| ten error"]


def test_one_rank_and_a_pattern(run_dir, capsys) -> None:
    assert shown(capsys, "--rank", "10", "--grep", "err.r") == ["ten error"]
    assert shown(capsys, "--grep", "nothing like it") == []


def test_a_run_that_has_printed_nothing_says_where_its_steps_are(run_dir, capsys) -> None:
    (run_dir / "logs" / "rank-0.log").write_text("")
    assert logs(["abc123"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "rank 0 has printed nothing; the log steps: ortlaunch logs abc123 --log steps\n"
    for arguments in (["--rank", "2"], ["--rank", "all"], ["--grep", "x"], ["--log", "steps"]):
        assert logs(["abc123", *arguments]) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("given", "count"), [("0", 0), ("1", 1), ("3", 3), ("99", 4)])
def test_the_last_lines(run_dir, capsys, given: str, count: int) -> None:
    lines = ["zero a", "zero b", "--- attempt 1", "zero ünfinished"]
    assert shown(capsys, "-n", given) == lines[4 - count :]


@pytest.mark.parametrize("given", ["-5", "few", "9" * 5000])
def test_what_is_no_number_of_lines(run_dir, given: str) -> None:
    with pytest.raises(RequestError, match=f"^logs: -n/--lines: '{given}': must be a number, 0 or more"):
        logs(["abc123", f"--lines={given}"])


def test_what_is_not_there_is_said(run_dir, make_run) -> None:
    with pytest.raises(RequestError, match="no rank 3: it has ranks 0 to 10"):
        logs(["abc123", "--rank", "3"])
    with pytest.raises(RequestError, match="no log of slurm"):
        logs(["abc123", "--log", "slurm"])
    with pytest.raises(RequestError, match="not a regular expression"):
        logs(["abc123", "--grep", "("])
    make_run(run_id="def456", step=None, end=None)
    with pytest.raises(RequestError, match="no log of a worker yet; it is killed"):
        logs(["def456"])


def test_torchruns_logs_of_all_attempts_in_order(run_dir, capsys) -> None:
    for attempt in (2, 10):
        (run_dir / "attempts" / str(attempt)).mkdir(parents=True)
        (run_dir / "attempts" / str(attempt) / "torchrun.log").write_text(f"attempt {attempt}\n")
    (run_dir / "logs" / "torchrun-0.log").write_text("now\n")
    assert shown(capsys, "--log", "torchrun") == ["attempt 2", "attempt 10", "now"]


def test_log_steps_come_from_the_journal(run_dir, capsys) -> None:
    assert shown(capsys, "--log", "steps") == ["step 100  loss 2.5000  1,234 tokens/s  0.500 s/step", "end FINISHED"]


def test_following_goes_on_until_the_run_is_over(make_run, alive, capsys) -> None:
    folder = make_run(run_id="abc123", end=None, launcher=alive)
    log = folder / "logs" / "rank-0.log"
    log.write_text("one\n")

    def write() -> None:
        time.sleep(1)
        with log.open("a") as file:
            file.write("tw")
            file.flush()
            time.sleep(0.7)
            file.write("o\nthree")
        journal = Journal(folder / "journal.jsonl")
        journal.end("FINISHED")
        journal.close()

    writer = threading.Thread(target=write)
    writer.start()
    assert logs(["abc123", "-f"]) == 0
    writer.join()
    assert capsys.readouterr().out.splitlines() == ["one", "two", "three"]


def test_following_goes_on_while_the_scheduler_does_not_answer(make_run, squeue_fails, monkeypatch, capsys) -> None:
    monkeypatch.setattr(follow_logs, "_STATE_SECONDS", 0.2)
    folder = make_run(run_id="abc123", end=None, job={"scheduler": "slurm", "job_id": "5"})

    def write() -> None:
        time.sleep(1)
        (folder / "logs" / "rank-0.log").write_text("one\n")
        with Journal(folder / "journal.jsonl") as journal:
            journal.end("FINISHED")

    writer = threading.Thread(target=write)
    writer.start()
    assert logs(["abc123", "-f"]) == 0
    writer.join()
    assert capsys.readouterr().out.splitlines() == ["one"]
