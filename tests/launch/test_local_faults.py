"""What the launcher does when it is asked to stop at any moment, and when its disk, terminal or folder is gone.

A stand-in for torchrun journals steps, so that nothing is trained: see `tests.support.stand_in`.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from ortlaunch.follow.status import look, status
from ortlaunch.follow.sync import end_if_dead
from ortlaunch.run.folders import folder_at
from ortlaunch.run.record import read_record
from ortlaunch.run.run import Run
from ortlaunch.run.state import OUTAGE_TAG
from tests.support.stand_in import start, wait_for_line

SECONDS = 150
NOBODY = ("tracking.uri=http://127.0.0.1:9", "tracking.flush_seconds=50")
"""A tracking server that does not answer, so that the launcher waits for it."""


def the_run(cwd: Path) -> Run:
    (path,) = cwd.glob("runs/*/2*")
    return Run(path)


PHASES = {
    "start": ("slow_start", "starting", 1000, ("tracking=none",)),
    "run": ("none", "printed at step 3", 1000, ("tracking=none",)),
    "flush": ("says_when_it_sends", "sending", 1, NOBODY),
    "summary": ("slow_summary", "summing up", 1, ("tracking=none",)),
}
ENDS = {"start": "KILLED", "run": "KILLED", "flush": "FINISHED", "summary": "FINISHED"}
LAST = {"start": "stopped after", "run": "stopped after", "flush": "finished after", "summary": "finished after"}


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("start", signal.SIGTERM),
        ("run", signal.SIGHUP),
        ("run", signal.SIGUSR1),
        ("flush", signal.SIGTERM),
        ("summary", signal.SIGHUP),
        *(
            pytest.param(phase, number, marks=pytest.mark.nightly)
            for phase in PHASES
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ),
    ],
)
def test_a_signal_in_every_phase_leaves_the_last_lines(tmp_path: Path, phase: str, number: int) -> None:
    fault, line, steps, keys = PHASES[phase]
    process = start(tmp_path, steps, fault, *keys)
    seen = wait_for_line(process, line)
    process.send_signal(number)
    rest, errors = process.communicate(timeout=SECONDS)
    run = the_run(tmp_path)
    assert (LAST[phase] in rest, f"run folder: {run.path}" in rest) == (True, True), seen + rest + errors
    # Only the summary is past the point where a request changes anything.
    assert process.returncode == (0 if phase == "summary" else 128 + number), errors
    assert run.state().ended == ENDS[phase]
    assert ("ortlaunch sync" in rest) == (phase == "flush")
    if phase == "start":
        row = look(folder_at(run.path)).row
        assert (row.state.value, row.reason, row.is_over) == ("stopped", "before its first step", True)
    assert errors == ""


def test_a_second_signal_ends_a_start_that_hangs(tmp_path: Path) -> None:
    process = start(tmp_path, 1000, "hanging_start", "tracking=none")
    for line in ("starting", "asked"):  # Two signals at once would count as one.
        wait_for_line(process, line)
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 130 and errors == ""


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """nohup keeps SIGHUP from a run whose terminal is closed."""
    process = start(tmp_path, 20, "none", "tracking=none", prefix=("nohup",))
    wait_for_line(process, "printed at step 3")
    process.send_signal(signal.SIGHUP)
    rest, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0 and "finished after" in rest, rest + errors


def test_a_reader_that_goes_away_ends_no_training(tmp_path: Path) -> None:
    """``ortlaunch … | head -3``"""
    process = start(tmp_path, 20, "none", "tracking=none")
    wait_for_line(process, "printed at step 3")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(SECONDS), errors) == (0, "")
    assert the_run(tmp_path).state().ended == "FINISHED"


@pytest.mark.parametrize("what", ["full", "closed"])
def test_output_that_cannot_be_written_ends_no_training(tmp_path: Path, what: str) -> None:
    prefix = ("sh", "-c", 'exec "$@" >/dev/full 2>&1' if what == "full" else 'exec "$@" >&- 2>&- <&-', "sh")
    process = start(tmp_path, 5, "none", "tracking=none", prefix=prefix)
    assert process.wait(SECONDS) == 0
    run = the_run(tmp_path)
    assert run.state().ended == "FINISHED" and run.state().step == 5
    # Nothing was printed into a file that was opened under the number of a standard stream.
    assert all(line.startswith("{") for line in run.journal_file.read_text().splitlines())


def test_a_journal_that_cannot_be_read_for_once_ends_no_training(tmp_path: Path) -> None:
    process = start(tmp_path, 20, "journal_stale", "tracking=none")
    out, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "") and "finished after" in out, out
    assert the_run(tmp_path).state().ended == "FINISHED"


def test_a_tracker_that_is_away_is_told_while_the_run_goes_on(tmp_path: Path, capsys) -> None:
    uri = "http://127.0.0.1:9"
    keys = (f"tracking.uri={uri}", "tracking.timeout_seconds=1", "tracking.flush_seconds=1")
    process = start(tmp_path, 1000, "tells_outages_soon", *keys)
    seen = wait_for_line(process, f"MLflow at {uri} takes no events since ")
    assert seen.endswith(": Connection refused. Training goes on, and the journal keeps them until it takes them\n")
    run = the_run(tmp_path)
    assert run.state().tags[OUTAGE_TAG].startswith(f"MLflow at {uri} takes no events since ")
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (130, ""), rest
    (waits,) = [line for line in rest.splitlines() if "waiting up to" in line]
    assert waits.startswith(
        f"ortlaunch: waiting up to 1 s (tracking.flush_seconds) for MLflow at {uri}: Connection refused"
    )
    assert "takes no events" not in rest, "it is told once"
    (unsent,) = [line for line in rest.splitlines() if line.startswith("mlflow:")]
    assert unsent.endswith(f" journal events have not reached MLflow at {uri} (Connection refused)")
    assert rest.count(f"ortlaunch sync {run.path}") == 1
    assert run.state().tags[OUTAGE_TAG].endswith(" to the end of the run")
    assert status([str(run.path)]) == 0
    assert f"MLflow does not have it: ortlaunch sync {run.path}" in capsys.readouterr().out


def test_a_launcher_is_known_by_its_open_journal_from_the_first_moment_on(tmp_path: Path) -> None:
    """`cancel` would refuse to stop the run otherwise: the process that launcher.json names may be any other."""
    process = start(tmp_path, 1, "tells_of_its_journal", "tracking=none")
    out, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "") and "journal open: True\n" in out, out


def test_a_worker_is_never_ahead_of_the_launcher(tmp_path: Path) -> None:
    """What it has journalled before the launcher watches it is shown too, and counts as its first step."""
    process = start(tmp_path, 3, "late_watch", "tracking=none")
    out, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, ""), out
    assert "step 1/1000  loss 1.0000\n" in out and "last loss 0.3333" in out


def test_a_full_disk_at_the_end_is_no_kill(tmp_path: Path) -> None:
    process = start(tmp_path, 5, "journal_full_at_the_end", "tracking=none")
    out, errors = process.communicate(timeout=SECONDS)
    run = the_run(tmp_path)
    assert process.returncode == 0 and "finished after" in out, errors
    assert len(errors.splitlines()) == 1 and "cannot be written" in errors and "ortlaunch sync" in errors
    assert run.state().ended == "FINISHED" and read_record(folder_at(run.path)).ended == "FINISHED"
    assert not any('"end"' in line for line in run.journal_file.read_text().splitlines())
    # There is room again.
    assert end_if_dead(run.path) == "its end was journalled"
    assert any('"status": "FINISHED"' in line for line in run.journal_file.read_text().splitlines())
    assert end_if_dead(run.path) == "" and run.state().ended == "FINISHED"


def test_a_full_disk_at_the_start_is_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, 5, "full_at_the_start", "tracking=none")
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, out + errors
    assert len(errors.splitlines()) == 1 and "cannot be written: " in errors
    assert list(tmp_path.glob("runs/*/2*")) == []


def test_sweeps_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    """Of the next minute, each second's folder is there already, as that of another sweep."""
    others = [
        tmp_path / "runs" / "default" / time.strftime("multirun-%Y%m%d-%H%M%S", time.localtime(time.time() + second))
        for second in range(SECONDS)
    ]
    for other in others:
        other.mkdir(parents=True)
        (other / "sweep.json").write_text("another's")
    process = start(tmp_path, 2, "none", "tracking=none", "seed=1,2", "-m")
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert all([path.name for path in other.iterdir()] == ["sweep.json"] for other in others)
    assert all((other / "sweep.json").read_text() == "another's" for other in others)
    (own,) = {path for path in (tmp_path / "runs" / "default").glob("multirun-*") if path not in others}
    assert own.name.endswith("-2") and f"sweep:      {own}\n" in out
    assert len(json.loads((own / "sweep.json").read_text())["runs"]) == 2


def test_a_sweep_on_a_full_disk_names_its_folder(tmp_path: Path) -> None:
    process = start(tmp_path, 5, "full_at_the_start", "tracking=none", "seed=1,2", "-m")
    out, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, len(errors.splitlines())) == (2, 1), out + errors
    assert (
        errors.startswith(f"ortlaunch: {tmp_path}/runs/") and " cannot be written: File too large: make room" in errors
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["full_at_the_start", "nearly_full_at_the_start"])
def test_a_full_disk_leaves_a_run_that_is_resumed_as_it_was(tmp_path: Path, fault: str) -> None:
    assert start(tmp_path, 5, "none", "tracking=none").wait(SECONDS) == 0
    run = the_run(tmp_path)
    words = ("resume", str(run.path), "train.steps=2000")

    def content() -> dict[str, bytes]:
        files = [path for path in run.path.rglob("*") if path.is_file() and path.parent != run.claims]
        return {str(path.relative_to(run.path)): path.read_bytes() for path in files}

    before = content()
    out, errors = start(tmp_path, 5, fault, *words).communicate(timeout=SECONDS)
    assert "cannot be written: " in errors and len(errors.splitlines()) == 1, out + errors
    assert content() == before
    resumed = start(tmp_path, 5, "none", *words)
    assert resumed.wait(SECONDS) == 0, resumed.stderr and resumed.stderr.read()


def test_a_converted_checkpoint_of_workers_that_were_ended_does_not_stay(tmp_path: Path) -> None:
    """DeepSpeed's conversion for another number of workers takes as much room as the checkpoint."""
    assert start(tmp_path, 2, "none", "tracking=none").wait(SECONDS) == 0
    run = the_run(tmp_path)
    (run.scratch / "universal" / "zero").mkdir(parents=True)
    resumed = start(tmp_path, 2, "none", "resume", str(run.path), "train.steps=2000")
    assert resumed.wait(SECONDS) == 0, resumed.stderr and resumed.stderr.read()
    assert not run.scratch.exists()


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_whose_folder_is_gone_ends_at_once(tmp_path: Path, how: str) -> None:
    # Its worker would go on for longer than the test waits.
    process = start(tmp_path, 20 * 2 * SECONDS, "none", "tracking=none")
    wait_for_line(process, "printed at step 3")
    run = the_run(tmp_path)
    if how == "deleted":
        shutil.rmtree(run.path)
    else:
        run.path.rename(tmp_path / "elsewhere")
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, out + errors
    assert errors.startswith(f"ortlaunch: {run.path} is gone: ") and len(errors.splitlines()) == 1
    assert "failed after" in out and "finished" not in out
    assert not run.path.exists()
