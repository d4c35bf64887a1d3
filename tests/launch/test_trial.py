"""What a trial's process is allowed, and what its journal is taken for."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import save_config, to_config
from ortlaunch.follow.state import State, judge
from ortlaunch.launch import trial
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.trial import Limits, _ends_early, outcome_of
from ortlaunch.launch.watched import End, Watched, _core_seconds, watch
from ortlaunch.run import failure
from ortlaunch.run.folders import folder_at
from ortlaunch.run.identity import has_ended
from ortlaunch.run.making import make_run_folder
from ortlaunch.run.record import read_record
from ortlaunch.run.run import Run
from tests.support.waiting import until

LIMITS = Limits(60.0)
GIB = 2**30
GRANDCHILD = """
import subprocess, sys
code = "import os, time; print(os.getpid(), file=open('pid', 'w')); x = bytearray(%d); time.sleep(600)"
subprocess.run([sys.executable, "-c", code])
"""


def watched(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    *,
    limit: int | None = None,
    timeout: float = 60.0,
    **more: Any,
) -> Watched:
    monkeypatch.chdir(folder)
    return watch([sys.executable, "-c", code], folder / "log", {"GIVEN": "7"}, limit, timeout, **more)


def test_a_process_that_ends_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(tmp_path, monkeypatch, "import os; print(os.environ['GIVEN']); raise SystemExit(3)")
    assert (found.ended, found.code) == ("by itself", 3)
    assert (tmp_path / "log").read_text() == "7\n"
    assert 0.0 <= found.others <= 1.0


def test_only_the_cores_that_may_be_used_count_as_taken_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    times = psutil.cpu_times()
    idle, busy = (times._replace(**(dict.fromkeys(times._fields, 0.0) | {name: 10.0})) for name in ("idle", "user"))
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [idle, busy])
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert _core_seconds() == (0.0, 10.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert _core_seconds() == (10.0, 20.0)
    # A container shows two cores, and the process may use one with a higher number.
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {7})
    assert _core_seconds() == (10.0, 20.0)


def test_memory_counts_descendants_and_all_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(tmp_path, monkeypatch, GRANDCHILD % (300 << 20), limit=200 << 20)
    assert found.ended == "out of memory"
    assert found.peak_bytes > 200 << 20
    until(lambda: has_ended(int((tmp_path / "pid").read_text())))


def test_a_process_that_takes_too_long_is_ended_with_its_descendants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A shell is there long before its time is over.
    command = ["sh", "-c", "sleep 600 & echo $! > pid; wait"]
    monkeypatch.chdir(tmp_path)
    found = watch(command, tmp_path / "log", {}, None, 2.0)
    assert found.ended == "time-out"
    assert found.seconds < 200
    until(lambda: has_ended(int((tmp_path / "pid").read_text())))


def test_a_descendant_that_outlives_its_parent_is_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if nobody had waited for it.
    monkeypatch.setattr("ortlaunch.launch.watched._of_children", lambda: 0.0)
    cores = iter([(0.0, 0.0), (0.5, 0.5)])
    monkeypatch.setattr("ortlaunch.launch.watched._core_seconds", lambda: next(cores))
    monkeypatch.setattr("ortlaunch.launch.watched._GRACE_SECONDS", 0.1)
    found = watched(tmp_path, monkeypatch, "while True: pass", timeout=1.5)
    assert found.ended == "time-out"
    assert found.others < 0.95


def test_a_process_that_has_shown_enough_is_asked_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortlaunch.launch.watched._GRACE_SECONDS", 100.0)
    asks = (
        "import signal, time, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); "
        "open('ready', 'w'); time.sleep(600)"
    )
    found = watched(tmp_path, monkeypatch, asks, is_enough=(tmp_path / "ready").exists)
    assert (found.ended, found.code) == ("enough", 9)


def run_of(folder: Path, summary: dict[str, float], windows: list[tuple[int, float]], failure: str = "") -> Path:
    """A run folder whose journal has these windows as (last step, seconds of a step) and this summary."""
    make_run_folder(folder / "run")
    with Run(folder / "run").journal() as journal:
        journal.start("e", "n", "abc123")
        for step, seconds in windows:
            values = {"train/loss": 1.0, "throughput/step_seconds": seconds}
            values |= {"throughput/samples_per_second": 8 / seconds, "throughput/steady": float(step > 3)}
            journal.metrics(step, values)
        if summary:
            journal.metrics(windows[-1][0], summary)
        if failure:
            journal.failure(0, "here", failure)
    return folder / "run"


def ended(how: End = "by itself", code: int = 0) -> Watched:
    return Watched(how, code, 12.0, GIB, 0.25)


SUMMARY = {"summary/step_seconds_p50": 0.1, "summary/samples_per_second_median": 80.0, "summary/peak_memory_gib": 0.5}
STARTED = [(1, 4.0), (3, 0.6)]


def test_a_run_that_finished_has_a_speed_and_a_start(tmp_path: Path) -> None:
    run = run_of(tmp_path, SUMMARY, [*STARTED, (10, 0.1)])
    found = outcome_of(ended(), run, 3, LIMITS)
    assert (found.status, found.rate, found.seconds, found.others) == ("ok", 80.0, 12.0, 0.25)
    assert found.start == pytest.approx(4.0 + 2 * 0.6 - 3 * 0.1)
    assert (found.run, found.worker_bytes) == (str(run), GIB // 2)
    # 800 samples take 10 s at 80 samples/s, and 4.9 s of start.
    assert found.score(800.0) == pytest.approx(800 / (10 + 4.9))


@pytest.mark.parametrize(("seconds", "start"), [(2.0, 4.9 + 1.5), (30.0, 30.0 + 1.5)])
def test_an_export_counts_once(tmp_path: Path, seconds: float, start: float) -> None:
    extra = {"startup/ort_check_seconds": 1.5, "startup/ort_export_seconds": seconds}
    run = run_of(tmp_path, SUMMARY | extra, [*STARTED, (10, 0.1)])
    assert outcome_of(ended(), run, 3, LIMITS).start == pytest.approx(start)


def test_a_run_that_was_ended_since_it_had_shown_enough_has_the_speed_of_its_windows(tmp_path: Path) -> None:
    run = run_of(tmp_path, {}, [*STARTED, (5, 0.2), (7, 0.4), (9, 0.4)])
    found = outcome_of(ended("enough", 143), run, 3, LIMITS)
    assert (found.status, found.rate) == ("ok", 20.0)


def test_a_trial_that_is_ended_early_says_why_where_runs_are_listed(tmp_path: Path) -> None:
    run = run_of(tmp_path, {}, [*STARTED, (5, 0.2), (7, 0.4), (9, 0.4)])
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / trial.RUN).write_text(str(run))
    # 1.8 s were measured.
    assert not _ends_early(folder, 1.0)
    assert _ends_early(folder, 0.5)
    with Run(run).journal() as journal:
        journal.end("KILLED")
    standing = judge(read_record(folder_at(run)), None)
    assert (standing.state, standing.reason) == (State.KILLED, "its trial was ended: it had measured long enough")
    with Run(run).journal() as journal:
        journal.start("e", "n", "abc123")
        journal.end("KILLED")
    assert judge(read_record(folder_at(run)), None).reason == ""


@pytest.mark.parametrize(
    ("how", "code", "failure", "status", "reason"),
    [
        ("out of memory", 1, "", "out of memory", "more than the 2.00 GiB it may have"),
        ("time-out", 1, "", "time-out", "not done after 60 s"),
        (
            "by itself",
            1,
            "out of memory: it is full\nwhat helps:\n  less",
            "out of memory",
            "out of memory: it is full",
        ),
        ("by itself", 1, "Traceback\nRuntimeError: no", "failed", "RuntimeError: no"),
        ("by itself", 1, "Traceback\na.b.Unsupported: no\n\nSet THIS=1 for more", "failed", "a.b.Unsupported: no"),
        ("by itself", 1, "the worker was ended by SIGKILL (out of memory?)", "out of memory", "SIGKILL"),
        (
            "by itself",
            1,
            "the worker was ended by SIGSEGV in Gather; the last lines of its log:\na warning",
            "failed",
            "the worker was ended by SIGSEGV in Gather",
        ),
        ("by itself", 1, "", "failed", "ended with 1"),
        # The kernel may take the launcher of a trial for the one to end.
        ("by itself", -9, "", "out of memory", "the launcher was ended by SIGKILL"),
    ],
)
def test_why_a_trial_has_no_speed(tmp_path: Path, how: End, code: int, failure: str, status: str, reason: str) -> None:
    run = run_of(tmp_path, {}, STARTED, failure)
    found = outcome_of(ended(how, code), run, 3, Limits(60.0, 2 * GIB))
    assert (found.status, found.rate, found.ok) == (status, 0.0, False)
    assert reason in found.reason


def test_a_time_out_tells_of_other_work(tmp_path: Path) -> None:
    found = outcome_of(replace(ended("time-out", 1), others=0.91), None, 3, LIMITS)
    assert found.reason == "not done after 60 s, while other processes had 91% of the cores"


def test_a_refused_trial_says_why() -> None:
    found = outcome_of(ended("by itself", 2), None, 3, LIMITS, "backend=ort: not here")
    assert (found.status, found.reason, found.run) == ("refused", "backend=ort: not here", "")


def test_a_refusal_of_a_worker_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Launcher:
        """Takes the place of workers that refuse the model."""

        def submit(self, plan: LaunchPlan) -> int:
            plan.run_dir.mkdir(parents=True)
            failure.record(plan.run_dir, 0, RequestError("this model cannot recompute its activations"))
            return exit_codes.REQUEST

    config = to_config(compose(["model=mlp", "trainer=single", "backend=eager", f"run_root={tmp_path / 'runs'}"]))
    save_config(config, tmp_path / trial.CONFIG)
    (tmp_path / trial.REQUEST).write_text(json.dumps({"task": None, "overrides": []}))
    monkeypatch.setattr(trial, "launcher_of", lambda config: Launcher())
    monkeypatch.setattr(sys, "argv", ["trial", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        trial.main()
    assert end.value.code == exit_codes.REQUEST
    assert (tmp_path / trial.REFUSED).read_text() == "this model cannot recompute its activations"


def test_a_failure_of_the_machine_is_told_from_one_of_the_configuration(tmp_path: Path) -> None:
    port = (
        "torchrun ended with 1:\nDistNetworkError: cannot listen on any address (errno: 98 - Address already in use)."
    )
    of_machine = outcome_of(ended(code=1), run_of(tmp_path, {}, STARTED, port), 3, LIMITS)
    full = outcome_of(ended(code=2), None, 3, LIMITS, "/runs cannot be written: No space left on device")
    assert [(one.status, one.is_of_machine) for one in (of_machine, full)] == [("failed", True)] * 2
