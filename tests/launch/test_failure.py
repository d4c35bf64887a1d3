"""Which failure of several is shown."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.run import failure
from ortlaunch.run.attempt import header

TORCHRUN_REPORT = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_10:00:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
"""


def fail(run_dir: Path, rank: int, error: Exception) -> None:
    try:
        raise error
    except Exception as caught:
        failure.record(run_dir, rank, caught)


def test_the_first_failure_is_shown_since_the_others_follow_from_it(tmp_path: Path) -> None:
    fail(tmp_path, 1, ValueError("the cause"))
    time.sleep(0.02)
    fail(tmp_path, 0, ConnectionError("lost my peer"))
    found = failure.first(tmp_path, tmp_path / "torchrun.log")
    assert found is not None
    assert found.rank == 1
    assert "ValueError: the cause" in found.message
    assert not found.is_request


def test_the_line_of_the_users_own_code_is_shown_however_deep_the_library_fails(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("def forward(depth):\n    return descend(depth)\n")
    library = tmp_path / "site-packages" / "library.py"
    library.parent.mkdir()
    library.write_text("def descend(depth):\n    assert depth, 'shapes'\n    return descend(depth - 1) + 1\n")
    names: dict[str, Any] = {}
    for path in (library, tmp_path / "nets.py"):
        exec(compile(path.read_text(), path, "exec"), names)
    try:
        names["forward"](failure._TAIL_LINES)
    except AssertionError as error:
        failure.record(tmp_path, 0, error)
    found = failure.first(tmp_path, tmp_path / "torchrun.log")
    assert found is not None
    assert found.message.startswith(f'  File "{tmp_path}/nets.py", line 2, in forward\n    return descend(depth)\n')
    assert found.gist == "AssertionError: shapes"


def test_a_wrong_request_is_its_message_alone(tmp_path: Path) -> None:
    fail(tmp_path, 0, RequestError("data.path=x: nothing there"))
    found = failure.first(tmp_path, tmp_path / "torchrun.log")
    assert found is not None
    assert found.is_request
    assert found.message == "data.path=x: nothing there"


def test_a_killed_worker_comes_before_those_that_miss_it(tmp_path: Path) -> None:
    fail(tmp_path, 0, ConnectionError("lost my peer"))
    log = tmp_path / "torchrun.log"
    log.write_text(TORCHRUN_REPORT.format(code=-9))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("the last words\n")
    found = failure.first(tmp_path, log)
    assert found is not None
    assert found.rank == 1
    assert "SIGKILL" in found.message
    assert "memory" in found.message
    assert "the last words" in found.message


def killed_by_segv(tmp_path: Path, log: str) -> failure.Failure:
    report = tmp_path / "torchrun.log"
    report.write_text(TORCHRUN_REPORT.format(code=-11))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text(log)
    found = failure.first(tmp_path, report)
    assert found is not None
    return found


def stack(*frames: str) -> str:
    other = ["", "Thread 0x2 [beat] (most recent call first):", f'  File "{__file__}", line 3 in wait']
    lines = [
        *other,
        "",
        "Current thread 0x1 [python] (most recent call first):",
        *frames,
        "",
        "Extension modules: numpy",
    ]
    return "\n".join(["Fatal Python error: Segmentation fault", *lines, ""])


def test_of_the_stack_of_a_worker_that_a_defect_ended_the_users_line_is_told(tmp_path: Path) -> None:
    frames = [
        f'  File "{torch_file}", line 7 in linear' for torch_file in (json.__file__, "/nowhere/site-packages/x.py")
    ]
    frames += [f'  File "{__file__}", line 21 in forward', f'  File "{__file__}", line 9 in outer']
    found = killed_by_segv(tmp_path, f"the last words\n{stack(*frames)}")
    assert found.gist == f"the worker was ended by SIGSEGV at {__file__}:21"
    assert found.message.splitlines()[1:] == ["the last words"]


@pytest.mark.parametrize(
    ("function", "part"),
    [("run_forward", "ONNX Runtime"), ("run_backward", "ONNX Runtime"), ("_export_model", "the export to ONNX")],
)
def test_the_part_of_onnxruntime_in_which_a_worker_ended_is_told(tmp_path: Path, function: str, part: str) -> None:
    theirs = f'  File "/x/site-packages/onnxruntime/training/agent.py", line 3 in {function}'
    found = killed_by_segv(tmp_path, stack(theirs, f'  File "{__file__}", line 21 in step'))
    assert found.gist.startswith(f"the worker was ended by SIGSEGV in {part} at {__file__}:21: use backend=eager or ")


def test_a_report_of_another_signal_is_no_report_of_this_one(tmp_path: Path) -> None:
    other = stack(f'  File "{__file__}", line 21 in forward').replace("Segmentation fault", "Aborted")
    assert killed_by_segv(tmp_path, f"{other}restarted\n").gist == "the worker was ended by SIGSEGV"


def test_a_killed_worker_is_found_also_where_torchrun_names_another_as_the_root_cause(tmp_path: Path) -> None:
    fail(tmp_path, 0, ConnectionError("lost my peer"))
    log = tmp_path / "torchrun.log"
    killed = TORCHRUN_REPORT.format(code=-9).replace("Root Cause (first observed failure)", "Failures")
    other = TORCHRUN_REPORT.format(code=1).replace("rank      : 1 (local_rank: 1)", "rank      : 0 (local_rank: 0)")
    log.write_text(killed + other)
    found = failure.first(tmp_path, log)
    assert found is not None
    assert found.rank == 1
    assert "SIGKILL" in found.message


def test_workers_that_torchrun_stopped_are_no_cause(tmp_path: Path) -> None:
    fail(tmp_path, 0, ValueError("the cause"))
    log = tmp_path / "torchrun.log"
    log.write_text(TORCHRUN_REPORT.format(code=-15))
    found = failure.first(tmp_path, log)
    assert found is not None
    assert found.rank == 0


def test_an_ordinary_exit_code_is_no_kill(tmp_path: Path) -> None:
    fail(tmp_path, 1, ValueError("the cause"))
    log = tmp_path / "torchrun.log"
    log.write_text(TORCHRUN_REPORT.format(code=1))
    found = failure.first(tmp_path, log)
    assert found is not None
    assert "the cause" in found.message


def test_no_failure_is_none(tmp_path: Path) -> None:
    assert failure.first(tmp_path, tmp_path / "torchrun.log") is None


def test_a_killed_worker_on_a_cluster_is_on_the_node_of_its_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "torchrun-1.log"
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    log.write_text(f"{header()}\nChildFailedError\n{TORCHRUN_REPORT.format(code=-11)}")
    monkeypatch.setattr(socket, "gethostname", lambda: "n2")
    with log.open("a") as file:
        file.write(f"{header()}\n")
    assert failure.first(tmp_path, log) is None
    with log.open("a") as file:
        file.write("ChildFailedError\n" + TORCHRUN_REPORT.format(code=-9))
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    found = failure.first(tmp_path, log)
    assert found is not None
    assert (found.rank, found.host) == (1, "n2")
    assert found.gist == "the worker was ended by SIGKILL (out of memory?)"
