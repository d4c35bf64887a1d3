"""What Prometheus and the command of `--on-end` are told."""

from __future__ import annotations

import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.run.run import Run
from ortlaunch.serve.access import Role
from ortlaunch.serve.index.listing import ended
from ortlaunch.serve.on_end import OnEnd
from ortlaunch.serve.queue.store import Slate
from ortlaunch.serve.service import Service
from tests.launch.follow.conftest import Maker
from tests.serve.follow.conftest import add_job
from tests.support.service import InProcess


@pytest.fixture
def told(service: Service, tmp_path: Path) -> OnEnd:
    """A command that appends what it is told to a file, and exits with what stands in another."""
    script = tmp_path / "tell.py"
    script.write_text(
        f"import sys\nopen({str(tmp_path / 'told')!r}, 'a').write(sys.stdin.read() + '\\n')\n"
        f"sys.exit(int(open({str(tmp_path / 'exit')!r}).read()))\n"
    )
    (tmp_path / "exit").write_text("0")
    command = shlex.join([sys.executable, str(script)])
    return OnEnd(command, tmp_path / "on-end.json", partial(ended, service))


def again(told: OnEnd) -> OnEnd:
    """As the next start of the service has it."""
    return OnEnd(shlex.join(told._words), told._file, told._ended)


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]


def test_an_end_is_told_once_also_one_while_the_service_was_down(
    service: Service, make_run: Maker, alive: dict, tmp_path: Path, told: OnEnd
) -> None:
    make_run(end="FINISHED")
    run_dir = make_run("goes-on", end=None, launcher=alive)
    service.runs.refresh()
    told.start()
    told.stop()
    told._stopping.clear()
    assert told.tell() == 0
    with Run(run_dir).journal() as journal:
        journal.end("FINISHED", at=int((time.time() + 5) * 1000))
    service.runs.refresh()
    later = again(told)
    later.start()
    later.stop()
    later._stopping.clear()
    assert (later.tell(), later.tell()) == (1, 0)
    (message,) = lines(tmp_path)
    assert message["event"] == "run.ended"
    assert message["id"] == f"{run_dir.name[:15]}-{run_dir.name[-6:]}"
    assert (message["run"]["name"], message["run"]["state"]) == ("goes-on", "finished")
    last = again(told)
    last.start()
    last.stop()
    last._stopping.clear()
    assert last.tell() == 0


def test_a_command_that_fails_is_run_again_later(
    service: Service, make_run: Maker, tmp_path: Path, told: OnEnd, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(end="FAILED")
    service.runs.refresh()
    (tmp_path / "exit").write_text("3")
    assert (told.tell(), told.tell()) == (0, 0)
    assert len(lines(tmp_path)) == 1
    assert "non-zero exit status 3" in caplog.text
    (key,) = told._due
    waits = []
    for _ in range(3):
        waits.append(told._due[key][1])
        told._due[key] = (0.0, waits[-1])
        told.tell()
    assert waits == [5, 10, 20]
    (tmp_path / "exit").write_text("0")
    told._due[key] = (0.0, 20.0)
    assert (told.tell(), told.tell()) == (1, 0)
    assert len(lines(tmp_path)) == 5


def test_what_was_told_is_not_told_again_while_it_cannot_be_noted(
    service: Service, make_run: Maker, tmp_path: Path, told: OnEnd
) -> None:
    make_run(end="FAILED")
    service.runs.refresh()
    told._file = tmp_path / "missing" / "on-end.json"
    with pytest.raises(OSError, match="missing"):
        told.tell()
    assert told.tell() == 0
    assert len(lines(tmp_path)) == 1


def test_gpus_of_our_own_runs_are_not_held_by_others(
    served: InProcess, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = dict.fromkeys(("gpu0", "gpu2"), "a process uses it")
    monkeypatch.setattr(service.queue, "slate", lambda: Slate(("gpu0", "gpu1", "gpu2"), used))
    add_job(service, 1, "/nowhere/e/20260101-000000-n-aaaaaa", state="running", slots=2, taken=["gpu0", "gpu1"])
    text = served.client(served.token("vera", Role.viewer)).get("/metrics").text
    assert 'ortlaunch_slots{use="taken"} 2.0' in text
    assert 'ortlaunch_slots{use="foreign"} 1.0' in text


def test_prometheus_gets_figures_of_every_part(served: InProcess, service: Service, make_run: Maker) -> None:
    make_run(end="FAILED")
    service.runs.refresh()
    viewer = served.client(served.token("vera", Role.viewer))
    viewer.get("/api/runs/zzzzzz")
    text = viewer.get("/metrics").text
    for line in (
        'ortlaunch_runs{state="failed"} 1.0',
        'ortlaunch_jobs{state="waiting"} 0.0',
        "ortlaunch_relay_unsent_bytes 0.0",
        "ortlaunch_streams 0.0",
        'ortlaunch_requests_total{method="GET",route="/api/runs/{id}",status="404"}',
        'ortlaunch_slots{use="taken"} 0.0',
        "process_resident_memory_bytes",
    ):
        assert line in text, line
    assert "zzzzzz" not in text
    assert served.client().get("/metrics").status_code == 401
