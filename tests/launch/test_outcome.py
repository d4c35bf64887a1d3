"""How a run on this machine has ended, by its folder, torchrun's exit code and the requests to stop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.config.schema import LocalConfig, RunConfig
from ortlaunch.launch.local.run import Outcome, _outcome
from ortlaunch.launch.local.workers import WorkerGroup
from ortlaunch.launch.plan import LaunchPlan, NodePart, Start
from ortlaunch.run import failure
from ortlaunch.run.run import Run, Stopped

FULL = TrainingError("the checkpoint of step 7 could not be written: No space left on device")


def part_of(folder: Path, nodes: int = 1) -> NodePart:
    run = Run(folder)
    run.journal().close()
    config = RunConfig(launcher=LocalConfig(nodes=nodes))
    return NodePart(LaunchPlan(config, folder, "aaaaaa", "n", 2), 0, 1, Start(["torchrun"]))


def ended(part: NodePart, code: int, number: int | None = None, *, by_themselves: bool = True) -> tuple[str, int, str]:
    found: Outcome = _outcome(part, code, number, by_themselves=by_themselves)
    return found.status, found.exit_code, "" if found.failure is None else found.failure.message


def test_a_request_to_stop_whose_checkpoint_cannot_be_written_fails(tmp_path: Path) -> None:
    """Else the last lines would lead to an older checkpoint without a word. The exit code still ends a sweep."""
    part = part_of(tmp_path)
    failure.record(tmp_path, 0, FULL)
    status, code, message = ended(part, 1, signal.SIGTERM)
    assert (status, code) == ("FAILED", 143) and "No space left on device" in message


def test_workers_that_the_launcher_has_ended_have_not_failed(tmp_path: Path) -> None:
    """After a second request, or when the time for the checkpoint is over, they fail because of each other."""
    part = part_of(tmp_path)
    failure.record(tmp_path, 1, RuntimeError("Connection closed by peer"))
    assert ended(part, -9, signal.SIGINT, by_themselves=False) == ("KILLED", 130, "")


@pytest.mark.parametrize(("number", "exit_code"), [(None, 0), (signal.SIGINT, 130)])
def test_a_worker_that_dies_when_all_is_written_takes_nothing_back(
    tmp_path: Path, number: int | None, exit_code: int
) -> None:
    """As on a cluster: the weights are there, and another attempt would find nothing to do."""
    part = part_of(tmp_path)
    failure.record(tmp_path, 1, RuntimeError("in the last destructor"))
    part.plan.files.note_done(8)
    assert ended(part, 1, number) == ("FINISHED", exit_code, "")


def test_workers_that_end_without_an_error_before_the_last_step_have_failed(tmp_path: Path) -> None:
    """Such as those of a model whose code calls os._exit(0)."""
    status, code, message = ended(part_of(tmp_path), 0)
    assert (status, code) == ("FAILED", 1) and "before the last step" in message
    # The first worker may be on another machine, whose last file is not to be seen here yet.
    assert ended(part_of(tmp_path, nodes=2), 0) == ("FINISHED", 0, "")


def test_a_stopped_run_is_stopped_and_a_wrong_request_is_one(tmp_path: Path) -> None:
    part = part_of(tmp_path)
    failure.record(tmp_path, 0, RequestError("data.path: there is nothing"))
    assert ended(part, 1) == ("FAILED", 2, "data.path: there is nothing")
    part.plan.files.note_stopped(Stopped(3, "", "signal"))
    assert ended(part, 0) == ("KILLED", 130, "")


def test_a_scheduler_s_warning_to_every_process_does_not_end_torchrun(tmp_path: Path) -> None:
    group = WorkerGroup(Start(["sleep", "60"]), tmp_path / "log", 0.0)
    try:
        status = Path(f"/proc/{group._process.pid}/status").read_text()
    finally:
        assert not group.was_ended
        group.kill()
    assert group.was_ended
    (ignored,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:"))
    assert all(ignored >> number - 1 & 1 for number in (signal.SIGUSR1, signal.SIGUSR2))
