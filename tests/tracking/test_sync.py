"""`ortlaunch sync` sends what is left, and gives a killed run its true end."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.export.tracking import log_to_run
from ortlaunch.follow.sync import end_if_dead, sync_main
from ortlaunch.run import claim
from ortlaunch.run.identity import Process, is_alive, start_ticks
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import create
from ortlaunch.tracking.destination import destinations_of
from tests.support.waiting import until

NewRun = Callable[..., tuple[Path, Journal]]


def configure(run_dir: Path, **tracking: Any) -> None:
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"experiment": "e", "tracking": tracking}))


def use(run_dir: Path, store: MlflowConfig) -> None:
    configure(run_dir, name="mlflow", uri=store.uri, artifacts=store.artifacts, timeout_seconds=2, flush_seconds=5)


def age(run_dir: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(run_dir / "journal.jsonl", (then, then))


def test_sends_each_folder_and_says_so(
    store: MlflowConfig, new_run: NewRun, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for number in range(2):
        run_dir, journal = new_run("synced", f"r{number}")
        journal.metrics(1, {"a": number})
        journal.end("FINISHED")
        use(run_dir, store)
        folders.append(str(run_dir))
    assert sync_main(folders) == 0
    lines = capsys.readouterr().out.splitlines()
    for number, (folder, line) in enumerate(zip(folders, lines, strict=True)):
        run_id = json.loads((Path(folder) / "relay.json").read_text())["mlflow_run_id"]
        assert line == f"{folder}: 3 events sent, MLflow run {run_id}"
        assert client(store.uri).get_run(run_id).data.metrics == {"a": number}
    assert sync_main(["--all", str(Path(folders[0]).parent)]) == 0
    assert [line.partition(": ")[2][:13] for line in capsys.readouterr().out.splitlines()] == ["0 events sent"] * 2


def test_an_export_that_is_left_out_is_not_said_to_be_in_the_run(store: MlflowConfig, new_run: NewRun) -> None:
    run_dir, journal = new_run("exported")
    journal.end("FINISHED")
    use(run_dir, store)
    (run_dir / "phone").mkdir()
    (run_dir / "phone" / "model.onnx").write_text("graph")
    sent = log_to_run(run_dir, run_dir / "phone", "export")
    run_id = json.loads((run_dir / "relay.json").read_text())["mlflow_run_id"]
    assert sent == f"artifact export/phone of MLflow run {run_id}"
    left_out = log_to_run(run_dir, run_dir / "gone", "export")
    log = Run(run_dir).relay_log
    assert left_out == f"artifact export/gone may be missing: MLflow run {run_id}: 1 values were left out: see {log}"
    again = log_to_run(run_dir, run_dir / "phone" / "model.onnx", "export")
    assert again == f"artifact export/model.onnx of MLflow run {run_id}", "what was left out before is another matter"


def test_an_export_of_a_run_whose_trackers_keep_no_files_is_not_said_to_be_in_them(new_run: NewRun) -> None:
    run_dir, journal = new_run("exported")
    journal.end("FINISHED")
    nodes = {"tracking": {"name": "none"}, "trackers": {"tensorboard": {"name": "tensorboard"}}}
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"experiment": "e", **nodes}))
    (run_dir / "phone").mkdir()
    said = log_to_run(run_dir, run_dir / "phone", "export")
    assert said == "artifact export/phone is in the run's journal alone: no tracker of the run keeps files"


def test_all_looks_below_the_run_root(store: MlflowConfig, new_run: NewRun, tmp_path: Path) -> None:
    run_dir, journal = new_run("root")
    journal.end("FINISHED")
    use(run_dir, store)
    assert sync_main(["--all"], run_root=tmp_path / "runs") == 0
    assert (run_dir / "relay.json").exists()
    with pytest.raises(RequestError, match="no run folder below"):
        sync_main(["--all"], run_root=tmp_path / "elsewhere")


def test_all_leaves_out_what_was_started_without_mlflow(
    store: MlflowConfig, new_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, journal = new_run("some")
    journal.end("FINISHED")
    use(run_dir, store)
    without, _ = new_run("some", "without")
    configure(without, name="none")
    assert sync_main(["--all", str(run_dir.parent)]) == 0
    said, sent = capsys.readouterr().out.splitlines()
    assert said.startswith("left out: 1 run started without MLflow") and sent.startswith(f"{run_dir}: 2 events sent")
    assert not (without / "relay.json").exists()
    assert sync_main(["--all", str(run_dir.parent), "--uri", store.uri]) == 0
    assert (without / "relay.json").exists()


def test_unreachable_server_is_exit_code_1(new_run: NewRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, journal = new_run("away")
    journal.end("FINISHED")
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        uri = f"http://u:geheim@127.0.0.1:{taken.getsockname()[1]}"
        assert sync_main([str(run_dir), "--uri", uri]) == 1
    out = capsys.readouterr().out
    assert "0 events sent, MLflow run -" in out and "2 journal events" in out and "geheim" not in out


@pytest.mark.parametrize(
    ("launcher", "silent", "status"),
    [
        ("alive", 3600, "RUNNING"),
        ("dead", 5, "RUNNING"),
        ("dead", 60, "KILLED"),
        ("another process with its id", 60, "KILLED"),
        ("missing", 5, "RUNNING"),
        ("missing", 60, "KILLED"),
        ("broken", 60, "KILLED"),
        ("elsewhere", 60, "RUNNING"),
        ("elsewhere", 3600, "KILLED"),
    ],
)
def test_run_without_an_end(
    store: MlflowConfig, new_run: NewRun, client: Any, launcher: str, silent: float, status: str
) -> None:
    run_dir, journal = new_run("unended")
    journal.metrics(1, {"a": 1})
    use(run_dir, store)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        about = {"pid": process.pid, "host": socket.gethostname(), "start_ticks": start_ticks(process.pid)}
        if launcher == "dead":
            process.kill()  # not waited for: a zombie is dead too
            until(lambda: not is_alive(process.pid, about["start_ticks"]))
        elif launcher == "another process with its id":
            about["start_ticks"] -= 1
        elif launcher == "elsewhere":
            about["host"] = "some-other-machine"
        if launcher != "missing":
            (run_dir / "launcher.json").write_text("{" if launcher == "broken" else json.dumps(about))
        last = json.loads((run_dir / "journal.jsonl").read_text().splitlines()[-1])["t"]
        age(run_dir, silent)
        assert sync_main([str(run_dir)]) == 0
        run = client(store.uri).get_run(json.loads((run_dir / "relay.json").read_text())["mlflow_run_id"])
        assert run.info.status == status
        assert run.info.end_time == (last if status == "KILLED" else None)
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.parametrize("held", [True, False])
def test_workers_that_outlive_their_launcher(store: MlflowConfig, new_run: NewRun, client: Any, held: bool) -> None:
    """Their lock says at once whether any is left."""
    run_dir, journal = new_run("outlived")
    journal.metrics(1, {"a": 1})
    use(run_dir, store)
    about = {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": 1}
    (run_dir / "launcher.json").write_text(json.dumps(about))
    with Run(run_dir).workers_lock.open("w") as lock:
        if held:
            fcntl.flock(lock, fcntl.LOCK_SH)
        assert sync_main([str(run_dir)]) == 0
    run = client(store.uri).get_run(json.loads((run_dir / "relay.json").read_text())["mlflow_run_id"])
    assert run.info.status == ("RUNNING" if held else "KILLED")


def test_a_run_that_another_process_is_about_to_launch_again_has_not_ended(new_run: NewRun) -> None:
    """It holds the run, but its launcher is not noted yet."""
    run_dir, journal = new_run("resumed")
    journal.metrics(1, {"a": 1})
    age(run_dir, 3600)
    run = Run(run_dir)
    run.claims.mkdir()
    resuming = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        found = {"host": socket.gethostname(), "pid": resuming.pid, "start_ticks": start_ticks(resuming.pid)}
        (run.claims / "1").write_text(json.dumps(asdict(Process.this()) | found))
        assert end_if_dead(run_dir) == "is being launched again"
        assert run.state().ended is None
    finally:
        resuming.kill()
        resuming.wait(60)
    assert end_if_dead(run_dir) == "was killed"
    owner = claim.owner(run)
    assert owner is not None and owner.is_gone(), "the next resume may take it at once"


def test_a_run_that_was_done_when_its_launcher_was_killed_has_finished(new_run: NewRun) -> None:
    run_dir, journal = new_run("done")
    journal.metrics(1, {"a": 1})
    Run(run_dir).note_done(1)
    age(run_dir, 3600)
    assert end_if_dead(run_dir) == "had finished"
    assert Run(run_dir).state().ended == "FINISHED"


def test_a_queued_sweep_lives_as_long_as_one_of_its_runs(new_run: NewRun, tmp_path: Path) -> None:
    """Of a scheduler that knows no jobs of many tasks: the sweep's folder names no job."""
    folder = tmp_path / "multirun-1"
    made = create(folder, "sweep", "e", {"name": "none"}, ["ortlaunch"])
    runs = [tmp_path / name for name in ("one", "two")]
    for run in runs:
        run.mkdir()
        with Run(run).journal() as journal:
            journal.start("e", run.name, "abc123")
    made.write(runs, complete=True)
    age(folder, 1000)
    assert end_if_dead(folder).startswith("still running")
    for run in runs:
        with Run(run).journal() as journal:
            journal.end("FINISHED")
    assert end_if_dead(folder) == "was killed"


def test_ended_run_is_not_ended_again(store: MlflowConfig, new_run: NewRun, client: Any) -> None:
    run_dir, journal = new_run("ended")
    journal.end("FAILED")
    journal.tags({"late": "fact"})
    use(run_dir, store)
    age(run_dir, 3600)
    assert sync_main([str(run_dir)]) == 0
    run = client(store.uri).get_run(json.loads((run_dir / "relay.json").read_text())["mlflow_run_id"])
    assert (run.info.status, run.data.tags["late"]) == ("FAILED", "fact")


def test_a_run_is_named_as_for_the_other_commands(
    store: MlflowConfig, new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    made, journal = new_run("named", "by-name", "ab12cd")
    journal.end("FINISHED")
    run_dir = made.rename(made.with_name("20260101-120000-by-name-ab12cd"))
    use(run_dir, store)
    monkeypatch.chdir(tmp_path)
    for name in ("ab12cd", "by-name", str(run_dir)):
        assert sync_main([name]) == 0
        assert capsys.readouterr().out.startswith(f"{run_dir}: ")
    with pytest.raises(RequestError, match="there is no run nowhere"):
        sync_main(["nowhere"])


def test_requests_that_cannot_work(new_run: NewRun, tmp_path: Path) -> None:
    run_dir, _ = new_run("wrong")
    configure(run_dir, name="none")
    with pytest.raises(RequestError, match="--uri"):
        sync_main([str(run_dir)])
    with pytest.raises(RequestError, match=r"no journal\.jsonl"):
        sync_main([str(tmp_path)])
    with pytest.raises(RequestError, match="name the runs to send"):
        sync_main([])
    with pytest.raises(RequestError, match="--uri=mlruns is a file store"):
        sync_main([str(run_dir), "--uri", "mlruns"])
    (run_dir / "config.yaml").write_text("a: [")
    with pytest.raises(RequestError, match=r"config\.yaml"):
        sync_main([str(run_dir)])


def test_uri_of_the_command_line_wins(new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, _ = new_run("where")
    monkeypatch.chdir(tmp_path)
    configure(run_dir, name="none")
    (cfg,) = destinations_of(run_dir, "sqlite:///db/x.db")
    assert (cfg.uri, cfg.artifacts) == (f"sqlite:///{tmp_path}/db/x.db", f"{tmp_path}/db/mlartifacts")
    configure(run_dir, name="mlflow", uri="http://h", artifacts="/a", timeout_seconds=9)
    assert destinations_of(run_dir) == [MlflowConfig(uri="http://h", artifacts="/a", timeout_seconds=9)]
    assert destinations_of(run_dir, "http://other")[0].uri == "http://other"
