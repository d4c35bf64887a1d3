"""`ortlaunch jobs` and `status`: states of local runs, and how few files it takes to know them."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ortlaunch.base.errors import RequestError
from ortlaunch.follow.find import find_run, find_runs
from ortlaunch.follow.jobs import jobs
from ortlaunch.follow.rows import Survey
from ortlaunch.follow.state import SchedulerView, judge
from ortlaunch.follow.status import look, status
from ortlaunch.follow.table import duration_text, render
from ortlaunch.run.folders import scan
from ortlaunch.run.identity import machine
from ortlaunch.run.journal import Journal
from ortlaunch.run.record import read_record
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import create
from tests.support.users import OTHER_USER, folder_for_all


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert jobs([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_states_of_local_runs(make_run, alive, capsys) -> None:
    elsewhere = {"pid": 1, "host": "another-host", "start_ticks": 1}
    make_run("finished")
    make_run("failed", end="FAILED")
    make_run("killed", end="KILLED")
    make_run("gone", end=None)
    (make_run("done", end=None) / "done.json").write_text('{"step": 100}')
    make_run("running", end=None, launcher=alive)
    make_run("starting", end=None, step=None, launcher=alive)
    (make_run("stopping", end=None, launcher=alive) / "STOP").write_text("cancel\n")
    (make_run("stopped", step=40, end="KILLED") / "stopped.json").write_text('{"step": 42, "checkpoint": "x"}')
    make_run("remote", end=None, launcher=elsewhere)
    make_run("over there", launcher=elsewhere)
    rows = {row["name"]: row for row in listed(capsys)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "finished": "finished",
        "failed": "failed",
        "killed": "killed",
        "gone": "killed",
        "done": "finished",
        "running": "running",
        "starting": "running",
        "stopping": "stopping",
        "stopped": "stopped",
        "remote": "running",
        "over there": "finished",
    }
    assert rows["gone"]["reason"] == "its launcher is gone"
    assert rows["starting"]["reason"] == "starting"
    assert (rows["stopped"]["step"], rows["stopped"]["reason"]) == (42, "at step 42")
    assert [name for name, row in rows.items() if not row["is_over"]] == ["remote", "stopping", "starting", "running"]


def test_a_script_has_no_steps_to_be_before(make_run, alive, capsys) -> None:
    stopped = make_run("stopped", step=None, end="KILLED")
    (stopped / "stopped.json").write_text('{"step": 0, "checkpoint": "", "reason": "cancel"}')
    for folder in (stopped, make_run("running", end=None, step=None, launcher=alive)):
        with Run(folder).journal() as journal:
            journal.tags({"ortlaunch.script": "train.py"})
    rows = {row["name"]: row for row in listed(capsys)}
    assert {name: (row["state"], row["reason"]) for name, row in rows.items()} == {
        "stopped": ("stopped", ""),
        "running": ("running", ""),
    }


def test_a_run_that_was_lost_by_a_restart_of_its_machine_is_killed(make_run, alive, capsys) -> None:
    boot, namespace = machine().split()
    places = {"restarted": f"another-boot {namespace}", "another container": f"{boot} pid:[1]", "older": " "}
    for name, place in places.items():
        run_dir = make_run(name, end=None, launcher={**alive, "machine": place})
        os.utime(run_dir / "journal.jsonl", (1e9, 1e9))
    make_run("a moment ago", end=None, launcher={**alive, "machine": places["restarted"]})
    rows = {row["name"]: (row["state"], row["is_over"]) for row in listed(capsys)}
    assert rows == {
        "restarted": ("killed", True),
        "another container": ("unknown", False),
        "older": ("unknown", False),
        "a moment ago": ("running", False),
    }


def test_a_run_that_is_being_submitted_is_queued(make_run, capsys) -> None:
    for name in ("now", "never"):
        run_dir = make_run(name, step=None, end=None, job={})
        (run_dir / "job.json").unlink()
        journal = Journal(run_dir / "journal.jsonl")
        journal.tags({"ortlaunch.state": "queued"})
        if name == "never":
            text = (run_dir / "journal.jsonl").read_text()
            (run_dir / "journal.jsonl").write_text(re.sub(r'"t": \d+', '"t": 1790000000000', text))
    rows = {row["name"]: (row["state"], row["reason"], row["is_over"]) for row in listed(capsys)}
    assert rows == {
        "now": ("queued", "is being submitted", False),
        "never": ("killed", "its submission was interrupted", True),
    }


@pytest.mark.parametrize(
    ("tag", "job", "state", "is_over"),
    [
        ("queued", {"submitted": 1_790_000_000.0}, "killed", True),
        ("queued", {"submitted": 1_790_000_000.0, "cluster": "other"}, "killed", False),
        ("queued", {"submitted": time.time()}, "killed", False),
        ("running", {"submitted": 1_790_000_000.0}, "unknown", False),
    ],
)
def test_a_job_that_was_cancelled_in_the_queue_and_forgotten_is_over(make_run, tag, job, state, is_over) -> None:
    """Without accounting, SLURM forgets it. Otherwise resume would refuse it, and what waits for it would for ever."""
    run_dir = make_run(step=None, end=None, job={"scheduler": "slurm", "job_id": "7", **job})
    Journal(run_dir / "journal.jsonl").tags({"ortlaunch.state": tag})
    (folder,) = scan([run_dir.parents[1]])
    found = judge(read_record(folder), SchedulerView("SLURM", "slurm"))
    assert (found.state.value, found.is_over) == (state, is_over)
    assert "SLURM no longer knows job 7" in found.reason


def test_a_sweeps_runs_are_listed_in_their_order(make_run, capsys) -> None:
    runs = [make_run(f"run-{number}") for number in (2, 0, 1)]
    make_run("another")
    sweep = create(make_run.root / "default" / "multirun-20260101-000000", "sweep-lr", "default", {}, [])
    sweep.write(runs, complete=True)
    assert [row["name"] for row in listed(capsys, "--sweep", "sweep-lr")] == ["run-2", "run-0", "run-1"]
    assert [folder.name for folder in find_runs("sweep-lr")] == ["run-2", "run-0", "run-1"]
    with pytest.raises(RequestError, match="no sweep nothing"):
        jobs(["--sweep", "nothing"])
    for run in runs:
        shutil.rmtree(run)
    with pytest.raises(RequestError, match="none of the 3 runs of this sweep is there any more"):
        find_runs("sweep-lr")
    with pytest.raises(RequestError, match="--root: '' is not a folder"):
        jobs(["--root", ""])


def test_a_root_that_cannot_be_read_is_not_taken_for_an_empty_one() -> None:
    user = os.geteuid()
    with folder_for_all() as folder:
        (folder / "locked").mkdir(mode=0)
        # Root may read everything.
        os.seteuid(user or OTHER_USER)
        try:
            for place in ("locked", "locked/runs"):
                said = f"--root: {folder / place} cannot be read: Permission denied"
                with pytest.raises(RequestError, match=f"^{re.escape(said)}$"):
                    jobs(["--root", str(folder / place)])
            with pytest.raises(RequestError, match="is not a folder"):
                jobs(["--root", str(folder / "none")])
        finally:
            os.seteuid(user)


def test_a_row_has_the_figures_of_the_last_log_step(make_run, alive, capsys) -> None:
    make_run(steps=300, step=100, end=None, launcher=alive)
    (row,) = listed(capsys)
    assert (row["step"], row["steps"], row["last_loss"], row["tokens_per_second"]) == (100, 300, 2.5, 1234.5)
    assert row["left_seconds"] == 200 * 0.5
    assert 0 <= row["elapsed_seconds"] < 60


def with_summary(run_dir: Path, end: str | None = "FINISHED") -> Path:
    journal = Journal(run_dir / "journal.jsonl")
    medians = {"summary/tokens_per_second_median": 1500.0, "summary/samples_per_second_median": 15.0}
    journal.metrics(100, {**medians, "summary/last_step": 100})
    if end is not None:
        journal.end(end)  # type: ignore[arg-type]
    journal.close()
    return run_dir


def test_a_run_that_came_to_its_end_has_the_rate_that_compare_shows(make_run, alive, capsys) -> None:
    with_summary(make_run("ended", end=None))
    status(["ended"])
    assert re.search("^figures: +last loss 2.5, 1,500 tokens/s \\(median\\)$", capsys.readouterr().out, re.MULTILINE)
    jobs([])
    assert "latest" not in capsys.readouterr().out
    make_run("going", end=None, launcher=alive)
    status(["going"])
    assert re.search("^latest: +loss 2.5, 1,234 tokens/s$", capsys.readouterr().out, re.MULTILINE)
    jobs([])
    *table, note = capsys.readouterr().out.splitlines()
    assert ["1,500" in line for line in table if "ended" in line] == [True]
    assert ["1,234" in line for line in table if "going" in line] == [True]
    assert note == "tokens/s and samples/s: the median where a run has ended with one, else of the latest log step"
    rows = {row["name"]: (row["tokens_per_second"], row["tokens_per_second_median"]) for row in listed(capsys)}
    assert rows == {"ended": (1234.5, 1500.0), "going": (1234.5, None)}


def test_a_summary_of_an_earlier_attempt_is_no_median(make_run, alive, capsys) -> None:
    run_dir = with_summary(make_run(end=None, launcher=alive))
    journal = Journal(run_dir / "journal.jsonl")
    journal.start("default", "gpt2-ort-ddp", "000001")
    assert listed(capsys)[0]["tokens_per_second_median"] is None
    journal.metrics(110, {"train/loss": 2.0, "throughput/tokens_per_second": 900.0})
    journal.end("FAILED")
    (row,) = listed(capsys)
    assert (row["tokens_per_second"], row["tokens_per_second_median"]) == (900.0, None)


def test_an_index_of_another_version_is_made_anew(make_run, tmp_path: Path, capsys) -> None:
    with_summary(make_run(end=None))
    first = listed(capsys)
    (index,) = (tmp_path / "cache" / "jobs").iterdir()
    content = json.loads(index.read_text())
    for _, _, row in content.values():
        del row["tokens_per_second_median"]
    index.write_text(json.dumps(content))
    assert listed(capsys) == first


def test_the_first_workers_sign_of_life_is_newer_than_the_journal(make_run, alive, capsys) -> None:
    run_dir = make_run(steps=300, step=100, end=None, launcher=alive)
    (run_dir / "health").mkdir()
    (run_dir / "health" / "rank-0.json").write_text(json.dumps({"step": 107, "time": time.time() + 1}))
    assert listed(capsys)[0]["step"] == 107


def test_a_run_launched_again_is_no_longer_what_it_was(make_run, alive, capsys) -> None:
    run_dir = make_run(end="FAILED")
    assert listed(capsys)[0]["state"] == "failed"
    (run_dir / "launcher.json").unlink()
    (run_dir / "launcher.json").write_text(json.dumps(alive))
    journal = Journal(run_dir / "journal.jsonl")
    journal.start("default", "gpt2-ort-ddp", "000001")
    assert listed(capsys)[0]["state"] == "running"


def test_a_running_run_is_shown_however_old_it_is(make_run, alive, capsys) -> None:
    make_run("old", end=None, launcher=alive)
    for _ in range(5):
        make_run("new")
    assert [row["name"] for row in listed(capsys, "--last", "2")] == ["new", "old"]
    assert len(listed(capsys, "--all")) == 6


def test_runs_are_chosen_by_state_and_experiment(make_run, capsys) -> None:
    make_run("a", experiment="one", end="FAILED")
    make_run("b", experiment="two", end="FAILED")
    make_run("c", experiment="two")
    assert [row["name"] for row in listed(capsys, "--state", "failed")] == ["b", "a"]
    assert [row["name"] for row in listed(capsys, "--experiment", "two")] == ["c", "b"]
    assert [row["name"] for row in listed(capsys, "--experiment", "two", "--state", "failed")] == ["b"]
    # The index of the whole root survives a look at a part of it.
    assert len(listed(capsys)) == 3


def test_an_experiment_is_chosen_by_its_own_name_or_its_folders(make_run, capsys) -> None:
    make_run("a", experiment="my speed, at last")
    for asked in ("my speed, at last", "my_speed_at_last"):
        assert [row["experiment"] for row in listed(capsys, "--experiment", asked)] == ["my speed, at last"]


def test_a_launcher_that_says_who_it_is_is_seen_though_the_run_was_over_a_moment_before(make_run, capsys) -> None:
    """A resumed run's folder has changed already, and is looked at before its new launcher.json is there."""
    run_dir = make_run(end="FAILED")
    os.utime(run_dir, (1e9, 1e9))
    assert listed(capsys)[0]["state"] == "failed"
    Run(run_dir).note_launcher()
    journal = Journal(run_dir / "journal.jsonl")
    journal.start("default", "gpt2-ort-ddp", "000001")
    assert listed(capsys)[0]["state"] == "running"


def test_the_end_of_a_long_journal_is_enough(make_run) -> None:
    run_dir = make_run(step=5, end=None)
    journal = Journal(run_dir / "journal.jsonl")
    for step in range(6, 5000):
        journal.metrics(step, {"train/loss": 1.0 + step, "throughput/step_seconds": 0.25})
    journal.metrics(5000, {"checkpoint/write_seconds": 1.0})
    with (run_dir / "journal.jsonl").open("a") as file:
        file.write('{"event": "metrics", "t": 1, "step": 9999, "val')  # A line that is being written.
    record = read_record(find_run(str(run_dir)))
    assert (record.step, record.state.loss, record.ended) == (4999, 5000.0, None)


class Opened:
    """Counts the files that are opened below a folder, by name."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.counts: Counter[str] = Counter()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.folder and str(arguments[0]).startswith(self.folder):
            self.counts[Path(str(arguments[0])).name] += 1


OPENED = Opened()


def test_runs_that_are_not_shown_cost_next_to_nothing(make_run, alive, capsys) -> None:
    """No journal is read of a run that is not shown, and the second time no file of a run that is over."""
    for _ in range(300):
        make_run()
    make_run("running", end=None, launcher=alive)
    opened = []
    for _ in range(2):
        OPENED.counts.clear()
        OPENED.folder = str(make_run.root)
        assert len(listed(capsys, "--last", "20")) == 20
        OPENED.folder = None
        opened.append(OPENED.counts.copy())
    assert opened[0]["journal.jsonl"] == 20
    assert opened[0]["launcher.json"] >= 301
    assert opened[1]["journal.jsonl"] == opened[1]["config.yaml"] == 1
    assert sum(opened[1].values()) < 12, opened[1]


def test_a_broken_index_is_made_anew(make_run, tmp_path: Path, capsys) -> None:
    make_run()
    first = listed(capsys)
    (index,) = (tmp_path / "cache" / "jobs").iterdir()
    index.write_text('{"x": 1')
    assert listed(capsys) == first


def test_a_broken_folder_is_a_row_too(make_run, capsys) -> None:
    run_dir = make_run()
    for name in ("launcher.json", "config.yaml", "journal.jsonl"):
        (run_dir / name).write_bytes(b"\xff\x00 nonsense")
    (row,) = listed(capsys)
    assert (row["state"], row["run_id"], row["step"]) == ("unknown", "000001", None)


def test_the_table_shows_what_there_is(make_run, alive, capsys) -> None:
    make_run("gpt2", steps=7300, step=100, end=None, launcher=alive)
    make_run("evil\x1b[31m\nname")
    jobs([])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    header, _, *lines = text.splitlines()
    assert header.split() == ["id", "name", "state", "step", "tokens/s", "loss", "elapsed", "left"]
    assert "100/7300" in lines[1]
    assert "1h00m" in lines[1]
    assert len(lines) == 2


@pytest.mark.parametrize("stopped_at", [None, 0])
def test_a_script_has_no_steps(make_run, capsys, stopped_at: int | None) -> None:
    journal = Journal(make_run("train", steps=None, step=stopped_at) / "journal.jsonl")
    journal.tags({"ortlaunch.script": "train.py"})
    jobs([])
    status(["train"])
    text = capsys.readouterr().out
    assert "0/?" not in text and "of unknown" not in text


def test_the_table_fits_a_terminal_of_100_columns(make_run, alive) -> None:
    make_run("a-name-that-is-rather-long-for-a-run-of-a-model", end=None, launcher=alive)
    make_run("b", end="FAILED")
    folders = scan([make_run.root])
    out = io.StringIO()
    render(Survey(folders).rows(folders), Console(file=out, width=100, force_terminal=True, color_system=None))
    assert max(len(line) for line in out.getvalue().splitlines()) <= 100


def test_status_says_why_and_what_to_do(make_run, capsys) -> None:
    run_dir = make_run("gpt2", step=40, end=None)
    journal = Journal(run_dir / "journal.jsonl")
    journal.failure(3, "node7", "Traceback\n  x\nValueError: bad things")
    journal.end("FAILED")
    (run_dir / "checkpoints" / "step-00000030").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-00000030" / "manifest.json").write_text("{}")
    (run_dir / "checkpoints" / "step-00000040").mkdir()  # Not complete.
    assert status(["gpt2"]) == 0
    text = capsys.readouterr().out
    assert "failed: rank 3 on node7: ValueError: bad things" in text
    assert "ortlaunch resume 000001" in text
    assert "step-00000030" in text
    status(["gpt2", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["step"], document["checkpoint"]) == ("failed", 40, "step-00000030")


def test_values_that_are_no_numbers_stay_valid_json(make_run, capsys) -> None:
    run_dir = make_run(end=None)
    journal = Journal(run_dir / "journal.jsonl")
    journal.metrics(101, {"train/loss": float("nan"), "throughput/tokens_per_second": float("inf")})
    journal.end("FAILED")
    for _ in range(2):  # The second time from the index.
        (row,) = listed(capsys)
        assert (row["last_loss"], row["tokens_per_second"]) == ("nan", "inf")
    assert look(find_run(str(run_dir))).row.last_loss != 0
    jobs([])
    assert "nan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (61, "1m01s"), (3600, "1h00m"), (90061, "1d01h"), (None, ""), (float("inf"), "")],
)
def test_lengths_of_time(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text
