"""What `ortlaunch` sees of jobs of a real cluster: states, reasons, arrays, requeues, and the end of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.follow.cancel import cancel
from ortlaunch.follow.find import find_run
from ortlaunch.follow.rows import Row, Survey
from ortlaunch.launch.jobs import End, Jobs, Phase
from ortlaunch.launch.slurm import cluster as slurm_cluster
from ortlaunch.run.folders import scan
from ortlaunch.run.journal import Journal
from tests.launch.follow.conftest import Maker
from tests.slurm.conftest import free_ports
from tests.support.needs import needs

LAB = Path(__file__).resolve().parents[2] / "slurm" / "lab" / "lab.py"
SECONDS = 120

pytestmark = pytest.mark.timeout(600)

sys.path.insert(0, str(LAB.parent))
import lab  # noqa: E402


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "accounting"])
def cluster(request: pytest.FixtureRequest) -> Iterator[bool]:
    """A cluster for these tests alone, without slurmdbd and with it; yields whether it has it."""
    accounting: bool = request.param
    why = lab.missing(accounting=accounting)
    needs(not why, str(why))
    # munge wants folders that everybody may enter.
    folder = Path(tempfile.mkdtemp(prefix="follow-lab-"))
    folder.chmod(0o755)
    words = ["--base-port", str(free_ports()), *(["--accounting"] if accounting else [])]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLURM_CONF", str(folder / "etc" / "slurm.conf"))
        try:
            subprocess.run([sys.executable, LAB, "up", folder, *words], check=True, timeout=60)
            yield accounting
        finally:
            subprocess.run([sys.executable, LAB, "down", folder], check=True, timeout=60)
            shutil.rmtree(folder)


@pytest.fixture
def make_run(cluster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    slurm_cluster._answers.clear()
    monkeypatch.chdir(tmp_path)
    yield Maker(tmp_path / "runs")
    subprocess.run(["scancel", "--user", "root"], check=True, timeout=15)


def slurm(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def submit(run_dir: Path, body: str, *options: str) -> str:
    """A job whose script lies in the run folder, as those of `ortlaunch` do."""
    script = run_dir / "sbatch.sh"
    script.write_text(f"#!/bin/bash\n{body}\n")
    job_id = slurm("sbatch", "--parsable", f"--output={run_dir}/logs/slurm.log", *options, str(script))
    (run_dir / "job.json").write_text(json.dumps({"scheduler": "slurm", "job_id": job_id}))
    return job_id


def row(run_dir: Path) -> Row:
    """The run as it is now."""
    (found,) = Survey(scan([run_dir.parents[1]]), 0).rows([find_run(str(run_dir))])
    return found


def wait_for(run_dir: Path, state: str) -> Row:
    deadline = time.monotonic() + SECONDS
    while (seen := row(run_dir)).state.value != state:
        assert time.monotonic() < deadline, seen
        time.sleep(0.3)
    return seen


def wait_for_reason(run_dir: Path, reason: str) -> None:
    """SLURM finds the reason only when it next tries to start the job."""
    deadline = time.monotonic() + SECONDS
    while (seen := row(run_dir)).reason != reason:
        assert time.monotonic() < deadline, seen
        time.sleep(0.3)


def test_a_job_waits_runs_and_is_requeued(make_run: Maker) -> None:
    run_dir = make_run(step=None, end=None, job={})
    job_id = submit(run_dir, "sleep 600", "-N2", "--hold", "--time=10", "--requeue")
    waiting = row(run_dir)
    assert (waiting.state.value, waiting.reason, waiting.nodes) == ("pending", "held by you", 2)
    assert waiting.job_id == job_id
    slurm("scontrol", "release", job_id)
    running = wait_for(run_dir, "running")
    assert (running.reason, running.node_list) == ("starting", "node[1-2]")
    assert 0 < running.limit_seconds <= 600
    assert running.elapsed_seconds < SECONDS

    journal = Journal(run_dir / "journal.jsonl")
    journal.tags({"ortlaunch.state": "running"})
    journal.metrics(7, {"train/loss": 2.0})
    journal.tags({"ortlaunch.requeue_reason": "time limit"})
    slurm("scontrol", "requeue", job_id)
    requeued = wait_for(run_dir, "requeued")
    assert requeued.reason.startswith("time limit; ")
    assert (requeued.step, requeued.restarts, requeued.is_over) == (7, 1, False)
    journal.tags({"ortlaunch.requeue_reason": "preempted by another job"})
    assert row(run_dir).state.value == "preempted"
    again = wait_for(run_dir, "running")
    assert (again.restarts, again.step) == (1, 7)
    (run_dir / "STOP").write_text("requeue\n")
    assert (row(run_dir).state.value, row(run_dir).reason) == ("stopping", "requeue")


def test_reasons_in_plain_words(make_run: Maker) -> None:
    first = make_run("first", step=None, end=None, job={})
    second = make_run("second", step=None, end=None, job={})
    third = make_run("third", step=None, end=None, job={})
    job_id = submit(first, "sleep 600", "-N2", "--exclusive")
    wait_for(first, "running")
    submit(second, "sleep 600", "-N2", "--exclusive")
    submit(third, "sleep 600", f"--dependency=afterok:{job_id}")
    wait_for_reason(third, "waits for another job")
    wait_for_reason(second, "waits for free nodes")


def test_tasks_of_an_array_are_told_apart(make_run: Maker) -> None:
    runs = [make_run("sweep", step=None, end=None, job={}) for _ in range(4)]
    script = runs[0] / "sbatch.sh"
    script.write_text("#!/bin/bash\nsleep 600\n")
    array = slurm("sbatch", "--parsable", "--array=0-3%2", "--output=/dev/null", str(script))
    for task, run_dir in enumerate(runs):
        content = {"scheduler": "slurm", "job_id": array, "array_job_id": array, "array_task_id": task}
        (run_dir / "job.json").write_text(json.dumps(content))
    rows = [wait_for(run_dir, state) for run_dir, state in zip(runs, ["running"] * 2 + ["pending"] * 2, strict=True)]
    assert [one.job_id for one in rows] == [f"{array}_{task}" for task in range(4)]
    assert rows[3].reason == "its sweep is at launcher.array_limit"
    assert find_run(f"{array}_2").path == runs[2]
    # The number of its own that SLURM gives a task when it starts, and shows in places.
    own = slurm_cluster.queue(0).jobs[f"{array}_1"].own_id
    assert own != array
    assert find_run(own).path == runs[1]


ENDS: dict[str, tuple[str, Callable[[Path, Journal], Any], str]] = {
    "finished": ("exit 0", lambda run, journal: (run / "done.json").write_text("{}"), "finished"),
    "stopped": ("exit 0", lambda run, journal: (run / "stopped.json").write_text('{"step": 5}'), "stopped at step 5"),
    "crashed": ("exit 3", lambda run, journal: None, "failed see logs/slurm.log"),
    "said": ("exit 1", lambda run, journal: journal.failure(1, "node2", "ValueError: x"), "failed rank 1 on node2"),
    "journalled": ("exit 1", lambda run, journal: journal.end("FINISHED"), "finished"),
}


def test_ends_that_the_run_has_said_and_that_only_slurm_knows(make_run: Maker) -> None:
    runs = {}
    for name, (body, leave, _) in ENDS.items():
        runs[name] = make_run(name, end=None, job={})
        leave(runs[name], Journal(runs[name] / "journal.jsonl"))
        submit(runs[name], body)
    for name, run_dir in runs.items():
        state, _, reason = ENDS[name][2].partition(" ")
        ended = wait_for(run_dir, state)
        assert ended.is_over
        assert ended.reason.startswith(reason), name


def test_a_node_that_is_lost(make_run: Maker) -> None:
    run_dir = make_run(end=None, job={})
    submit(run_dir, "sleep 600", "--no-requeue", "-w", "node2")
    wait_for(run_dir, "running")
    slurm("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    ended = wait_for(run_dir, "killed")
    assert ended.reason == "a node failed"
    deadline = time.monotonic() + SECONDS
    while slurm("sinfo", "--noheader", "--nodes=node2", "--format=%t").split()[0] != "idle":
        assert time.monotonic() < deadline
        subprocess.run(["scontrol", "update", "NodeName=node2", "State=RESUME"], check=False, capture_output=True)
        time.sleep(0.5)


def test_a_job_that_waits_is_cancelled_and_its_journal_ended(make_run: Maker, capsys) -> None:
    run_dir = make_run(run_id="abc123", step=None, end=None, job={})
    job_id = submit(run_dir, "sleep 600", "--hold")
    assert cancel([job_id]) == 0
    assert "it has left no checkpoint" in capsys.readouterr().out
    assert row(run_dir).state.value == "killed"
    assert json.loads((run_dir / "journal.jsonl").read_text().splitlines()[-1])["status"] == "KILLED"
    assert slurm_cluster.queue(0).jobs[job_id].end is End.CANCELLED


WORKER = """\
trap 'sleep 0.2' TERM
while ! [ -e {run}/STOP ]; do sleep 0.2; done
cp {run}/STOP {run}/seen
[ -e {run}/stubborn ] && exec sleep 600
mkdir -p {run}/checkpoints/step-00000009
echo '{{}}' > {run}/checkpoints/step-00000009/manifest.json
echo '{{"step": 9}}' > {run}/stopped.json
rm {run}/STOP"""


def test_a_job_that_runs_stops_by_itself_when_asked(make_run: Maker, capsys) -> None:
    """scancel comes only with --now: the workers would not get to write a checkpoint."""
    run_dir = make_run(end=None, job={})
    job_id = submit(run_dir, WORKER.format(run=run_dir))
    wait_for(run_dir, "running")
    assert cancel([job_id]) == 0
    assert "stopped at step 9 with a checkpoint" in capsys.readouterr().out
    assert (run_dir / "seen").read_text() == "cancel\n"
    ended = slurm_cluster.queue(0).jobs[job_id]
    assert (ended.phase, ended.end) == (Phase.ENDED, None)

    stubborn = make_run(end=None, job={})
    (stubborn / "stubborn").touch()
    job_id = submit(stubborn, WORKER.format(run=stubborn))
    wait_for(stubborn, "running")
    assert cancel([job_id, "--wait", "2"]) == 1
    assert f"ortlaunch cancel {find_run(job_id).run_id} --now" in capsys.readouterr().out
    assert row(stubborn).state.value == "stopping"
    assert cancel([job_id, "--now"]) == 0
    assert row(stubborn).state.value == "killed"


def test_what_the_controller_has_forgotten(make_run: Maker, cluster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounting knows how it ended; without it, that is said."""
    run_dir = make_run(end=None, job={})
    job_id = submit(run_dir, "exit 3")
    wait_for(run_dir, "failed")
    deadline = time.monotonic() + SECONDS
    while cluster and slurm_cluster.accounted([job_id], 0).jobs[job_id].lives and time.monotonic() < deadline:
        time.sleep(0.5)
    # The controller's memory of a job ends after MinJobAge, ten minutes here: it has other jobs then.
    monkeypatch.setattr(slurm_cluster, "queue", lambda max_age: Jobs())
    forgotten = row(run_dir)
    if cluster:
        assert forgotten.state.value == "failed"
    else:
        assert (forgotten.state.value, forgotten.reason) == ("unknown", f"SLURM no longer knows job {job_id}")
        assert "disabled" in slurm_cluster.accounted([job_id], 0).problem


def test_slurm_is_asked_once_for_all_jobs_and_not_again_for_some_seconds(
    make_run: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        submit(make_run(step=None, end=None, job={}), "sleep 600", "--hold")
    (tmp_path / "bin").mkdir()
    real = slurm("which", "squeue")
    (tmp_path / "bin" / "squeue").write_text(f'#!/bin/sh\necho x >> {tmp_path}/calls\nexec {real} "$@"\n')
    (tmp_path / "bin" / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for _ in range(3):
        folders = scan([make_run.root])
        assert {one.state.value for one in Survey(folders).rows(folders)} == {"pending"}
    assert (tmp_path / "calls").read_text() == "x\n"


def test_a_controller_that_does_not_answer_is_said(make_run: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(step=None, end=None, job={})
    job_id = submit(run_dir, "sleep 600", "--hold")
    with monkeypatch.context() as broken:
        broken.setenv("SLURM_CONF", "/nowhere/slurm.conf")
        lost = row(run_dir)
    assert (lost.state.value, lost.is_over, lost.job_id) == ("queued", False, job_id)
    assert lost.reason
