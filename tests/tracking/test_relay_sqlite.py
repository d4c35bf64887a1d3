"""The relay and an embedded store: everything arrives once, in whatever pieces it was sent."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.locks import exclusive
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.config.tracking_uri import resolve_tracking
from ortlaunch.run.journal import Journal
from ortlaunch.tracking.forward import Forwarder, relay_log
from ortlaunch.tracking.relay import Relay, sync
from ortlaunch.tracking.state import destination
from tests.support.waiting import until

ROOT = str(Path(__file__).parents[2])
NewRun = Callable[..., tuple[Path, Journal]]
SYNC = (
    "import sys; from pathlib import Path; from ortlaunch.config.schema import MlflowConfig\n"
    "from ortlaunch.tracking.relay import sync\n"
    "result = sync(Path(sys.argv[1]), MlflowConfig(uri=sys.argv[2], artifacts=sys.argv[3]))\n"
    "sys.exit(0 if result.sent else result.message)"
)

ODD = "".join(map(chr, range(0x20, 0x7F))).replace("/", "") + "a%20b ö"
"""A folder's name with every printable character."""


def start_sync(run_dir: Path, cfg: MlflowConfig, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    # Telemetry must be off without these: MLflow itself is quiet under pytest.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW", "PYTEST", "CI"))}
    return subprocess.Popen(
        [sys.executable, "-c", SYNC, str(run_dir), cfg.uri, cfg.artifacts],
        cwd=cwd,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.nightly)])
def test_several_processes_may_be_the_first(
    tmp_path: Path, new_run: NewRun, client: Callable[[str], Any], count: int
) -> None:
    """MLflow alone breaks a fresh database for good when several processes open it at once."""
    folder = tmp_path / "new" / ODD
    folder.mkdir(parents=True)
    cfg = resolve_tracking(MlflowConfig(artifacts="artifacts"), folder)
    run_dirs = []
    for number in range(count):
        run_dir, journal = new_run("race", f"run{number}")
        journal.metrics(1, {"a": number})
        journal.end("FINISHED")
        run_dirs.append(run_dir)
    home = tmp_path / "home"
    home.mkdir()
    processes = [start_sync(run_dir, cfg, cwd=folder, PYTHONPATH=ROOT, HOME=str(home)) for run_dir in run_dirs]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count, outputs
    assert outputs == [""] * count, "MLflow and alembic must not talk into the user's terminal"
    assert not (home / ".config").exists(), "telemetry must be off before mlflow is imported"
    assert sorted(file.name for file in folder.iterdir()) == [".mlruns.db.lock", "mlruns.db"]
    assert list((tmp_path / "new").iterdir()) == [folder], "no folder of another name"
    opened = client(cfg.uri)
    experiment = opened.get_experiment_by_name("race")
    runs = opened.search_runs([experiment.experiment_id])
    assert sorted(run.data.metrics["a"] for run in runs) == list(range(count))
    assert experiment.artifact_location == (folder / "artifacts/race").as_uri()


def test_run_arrives_as_it_was_journalled(store: MlflowConfig, new_run: NewRun, client: Any, history: Any) -> None:
    run_dir, journal = new_run("whole", "größe", "aa11")
    (run_dir / "config.yaml").write_text("a: 1\n")
    (run_dir / "onnx").mkdir()
    (run_dir / "onnx" / "m.onnx").write_text("x")
    params = {"optim[0]": {"lr": 0.1}, "long": "x" * 7000, "bad": "a\0\udcff"} | {f"p{n}": n for n in range(250)}
    journal.params(params)
    journal.tags({"t": "1" * 9000, "u": "1"} | {f"tag{n}": "x" for n in range(150)})
    journal.tags({"u": "2"})
    journal.metrics(1, {"nan": math.nan, "inf": math.inf} | {f"m{n}": n for n in range(2500)})
    journal.artifact(run_dir / "config.yaml", "config")
    journal.artifact(Path("onnx"))
    journal.artifact(Path("missing.txt"))
    # A resumed run says it again.
    for _ in range(2):
        journal.dataset("text", "d" * 50, "data.path=größe.txt")
    journal.end("FINISHED")
    result = sync(run_dir, store)
    assert (result.sent, result.unsent_events, result.sent_events) == (True, 0, 11)
    assert "1 values were left out" in result.message
    assert "missing.txt" in (run_dir / "logs" / "relay.log").read_text()
    lines = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    opened = client(store.uri)
    run = opened.get_run(result.mlflow_run_id)
    assert (run.info.run_name, run.info.status) == ("größe", "FINISHED")
    assert (run.info.start_time, run.info.end_time) == (lines[0]["t"], lines[-1]["t"])
    assert len(run.data.params) == 253 and run.data.params["optim_0_.lr"] == "0.1" and run.data.params["bad"] == "a?"
    assert len(run.data.params["long"]) == 6000 and "shortened from 7000" in run.data.params["long"]
    assert run.data.tags["u"] == "2" and run.data.tags["tag149"] == "x" and run.data.tags["ortlaunch.run_id"] == "aa11"
    assert len(run.data.metrics) == 2502 and math.isnan(run.data.metrics["nan"]) and run.data.metrics["inf"] > 1e308
    assert [point.timestamp for point in opened.get_metric_history(run.info.run_id, "m7")] == [lines[4]["t"]]
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.source, len(used.dataset.digest)) == ("text", "data.path=größe.txt", 36)
    assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "training")]
    kept = [file.path for folder in ("", "config", "onnx") for file in opened.list_artifacts(run.info.run_id, folder)]
    assert kept == ["config", "onnx", "config/config.yaml", "onnx/m.onnx"]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_end_is_what_it_truly_was(store: MlflowConfig, new_run: NewRun, client: Any, status: Any) -> None:
    run_dir, journal = new_run("ends")
    relay = Relay(run_dir, store)
    relay.start()
    journal.metrics(1, {"a": 1})
    if status == "FAILED":
        journal.failure(2, "node7", "out of memory")
    journal.end(status)
    result = relay.finish(120)
    run = client(store.uri).get_run(result.mlflow_run_id)
    assert run.info.status == status and result.sent and result.message == ""
    assert run.data.tags.get("ortlaunch.failure") == ("rank 2 on node7: out of memory" if status == "FAILED" else None)


def test_a_core_that_both_want_is_the_workers(
    store: MlflowConfig, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay's thread alone is nicer: the launcher that it runs in is as it was."""
    run_dir, journal = new_run("nice")
    journal.end("FINISHED")
    sent_at: list[int] = []
    step = Forwarder.try_step

    def noting(self: Forwarder, final: bool) -> bool | None:
        sent_at.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return step(self, final)

    monkeypatch.setattr(Forwarder, "try_step", noting)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert Relay(run_dir, store).finish(120).sent
    assert set(sent_at) == {max(10, before)} and os.getpriority(os.PRIO_PROCESS, 0) == before


def test_run_without_end_stays_running_and_goes_on_as_the_same(
    store: MlflowConfig, new_run: NewRun, client: Any, history: Any
) -> None:
    """A requeued job: another relay, the same run; steps that it does again are not sent again."""
    run_dir, journal = new_run("requeue")
    for step in (10, 20, 30):
        journal.metrics(step, {"a": step})
    first = sync(run_dir, store)
    opened = client(store.uri)
    assert opened.get_run(first.mlflow_run_id).info.status == "RUNNING"
    time.sleep(0.01)
    journal.start("requeue", "run", "other-start-is-the-same-run")
    for step in (20, 25, 30, 40):
        journal.metrics(step, {"a": step + 0.5})
    journal.end("FAILED")
    journal.start("requeue", "run", "again")
    second = sync(run_dir, store)
    assert second.mlflow_run_id == first.mlflow_run_id and second.sent_events == 7
    assert history(opened, first.mlflow_run_id, "a") == [(10, 10), (20, 20), (25, 25.5), (30, 30), (40, 40.5)]
    assert opened.get_run(first.mlflow_run_id).info.status == "RUNNING"


def test_killed_relay_goes_on_without_doubles(store: MlflowConfig, new_run: NewRun, client: Any, history: Any) -> None:
    run_dir, journal = new_run("killed")
    for step in range(6000):
        journal.metrics(step, {"a": step, "b": -step})
    journal.end("FINISHED")
    state = run_dir / "relay.json"
    offsets = []
    for _ in range(2):
        before = json.loads(state.read_text())["offset"] if state.exists() else 0
        process = start_sync(run_dir, store)
        deadline = time.monotonic() + 120
        while not state.exists() or json.loads(state.read_text())["offset"] <= before:
            assert process.poll() is None and time.monotonic() < deadline, process.stdout and process.stdout.read()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=200)
        offsets.append(json.loads(state.read_text())["offset"])
    size = (run_dir / "journal.jsonl").stat().st_size
    assert 0 < offsets[0] < offsets[1] < size, "both kills must have come between batches"
    # A batch that was stored while its offset was not: the offset of the first kill, again.
    saved = json.loads(state.read_text())
    state.write_text(json.dumps({**saved, "offset": offsets[0]}))
    result = sync(run_dir, store)
    opened = client(store.uri)
    assert result.sent and result.mlflow_run_id == saved["mlflow_run_id"]
    assert history(opened, result.mlflow_run_id, "a") == [(step, step) for step in range(6000)]
    assert history(opened, result.mlflow_run_id, "b") == [(step, -step) for step in range(6000)]


def test_lost_state_finds_the_run_again(store: MlflowConfig, new_run: NewRun, client: Any, history: Any) -> None:
    run_dir, journal = new_run("lost", run_id="lost1")
    journal.metrics(1, {"a": 1})
    first = sync(run_dir, store)
    (run_dir / "relay.json").write_text("{torn")
    journal.metrics(2, {"a": 2})
    assert sync(run_dir, store).mlflow_run_id == first.mlflow_run_id
    assert history(client(store.uri), first.mlflow_run_id, "a") == [(1, 1), (2, 2)]
    time.sleep(0.002)
    twin_dir, _ = new_run("lost", name="twin", run_id="lost1")
    assert sync(twin_dir, store).mlflow_run_id != first.mlflow_run_id, "a short id that met by chance is another run"


def test_torn_and_corrupt_lines_hold_nothing_up(store: MlflowConfig, new_run: NewRun, client: Any) -> None:
    run_dir, journal = new_run("torn")
    path = run_dir / "journal.jsonl"
    with path.open("ab") as file:
        file.write(b"garbage\n")
    journal.metrics(1, {"a": 1})
    whole = b'{"event": "metrics", "t": 5, "step": 2, "values": {"a": 2}}\n'
    with path.open("ab") as file:
        file.write(whole[:20])
    first = sync(run_dir, store)
    assert first.sent and "1 values were left out" in first.message
    assert "at byte" in (run_dir / "logs" / "relay.log").read_text()
    with path.open("ab") as file:
        file.write(whole[20:])
    assert sync(run_dir, store).sent
    assert client(store.uri).get_run(first.mlflow_run_id).data.metrics == {"a": 2}


def test_refused_values_are_left_out_alone(store: MlflowConfig, new_run: NewRun, client: Any) -> None:
    """Somebody set a parameter by hand: MLflow refuses the whole batch with it."""
    run_dir, journal = new_run("refused")
    journal.metrics(1, {"a": 1})
    opened = client(store.uri)
    run_id = sync(run_dir, store).mlflow_run_id
    assert run_id is not None
    opened.log_param(run_id, "p5", "by hand")
    journal.params({f"p{number}": number for number in range(20)})
    journal.metrics(2, {"a": 2})
    journal.end("FINISHED")
    result = sync(run_dir, store)
    run = opened.get_run(run_id)
    assert result.sent and "1 values were left out" in result.message
    assert run.data.params == {f"p{number}": "by hand" if number == 5 else str(number) for number in range(20)}
    assert (run.data.metrics, run.info.status) == ({"a": 2}, "FINISHED")
    assert "'p5'" in (run_dir / "logs" / "relay.log").read_text()


def test_failing_artifact_store_does_not_hold_up_the_end(
    store: MlflowConfig, new_run: NewRun, client: Any, tmp_path: Path
) -> None:
    run_dir, journal = new_run("no-artifacts")
    (run_dir / "config.yaml").touch()
    (tmp_path / "taken").touch()  # a file where the artifact folder should be
    journal.artifact(Path("config.yaml"))
    journal.metrics(1, {"a": 1})
    journal.end("FINISHED")
    result = sync(run_dir, replace(store, artifacts=str(tmp_path / "taken")))
    run = client(store.uri).get_run(result.mlflow_run_id)
    assert result.sent and "1 values were left out" in result.message
    assert (run.data.metrics, run.info.status) == ({"a": 1}, "FINISHED")


def test_deleted_run_loses_nothing(store: MlflowConfig, new_run: NewRun, client: Any, history: Any) -> None:
    run_dir, journal = new_run("deleted")
    journal.metrics(1, {"a": 1})
    run_id = sync(run_dir, store).mlflow_run_id
    opened = client(store.uri)
    opened.delete_run(run_id)
    journal.metrics(2, {"a": 2})
    relay = Relay(run_dir, store)
    relay.start()
    until(lambda: "deleted" in (run_dir / "logs" / "relay.log").read_text())
    result = relay.finish(600)  # Nothing is waited for that only a person can change.
    assert (result.sent, result.unsent_events) == (False, 1) and "deleted" in result.message
    opened.restore_run(run_id)
    assert sync(run_dir, store).sent
    assert history(opened, run_id, "a") == [(1, 1), (2, 2)]


def test_an_experiment_has_a_name_of_its_own_in_mlflow_and_is_missed_at_once(
    store: MlflowConfig, new_run: NewRun, client: Any
) -> None:
    named = replace(store, experiment_name="/Users/ada/nets")
    run_dir, _ = new_run("named")
    result = sync(run_dir, named)
    opened = client(store.uri)
    found = opened.get_experiment_by_name("/Users/ada/nets")
    assert opened.get_run(result.mlflow_run_id).info.experiment_id == found.experiment_id
    assert "--experiment /Users/ada/nets " in dict(result.sinks[0].lines("other"))["compare"]
    opened.delete_experiment(found.experiment_id)
    result = Relay(new_run("after")[0], named).finish(600)
    assert "'/Users/ada/nets' is deleted in MLflow: restore it" in result.message


def test_another_store_gets_everything(store: MlflowConfig, new_run: NewRun, tmp_path: Path, client: Any) -> None:
    run_dir, journal = new_run("moved")
    journal.metrics(1, {"a": 1})
    assert sync(run_dir, store).sent_events == 2
    other = replace(store, uri=f"sqlite:///{tmp_path}/other.db", artifacts=str(tmp_path / "other"))
    result = sync(run_dir, other)
    assert result.sent_events == 2 and client(other.uri).get_run(result.mlflow_run_id).data.metrics == {"a": 1}


def test_journal_without_a_start_is_named_after_its_folder(store: MlflowConfig, tmp_path: Path, client: Any) -> None:
    run_dir = tmp_path / "orphans" / "20260101-gpt2-9f9f"
    run_dir.mkdir(parents=True)
    Journal(run_dir / "journal.jsonl").end("FAILED")
    run = client(store.uri).get_run(sync(run_dir, store).mlflow_run_id)
    assert (run.info.run_name, run.info.status) == ("20260101-gpt2-9f9f", "FAILED")
    assert run.data.tags["ortlaunch.run_id"] == "9f9f"


def test_log_hides_credentials(new_run: NewRun) -> None:
    run_dir, _ = new_run("log")
    to = destination(run_dir, MlflowConfig(uri="https://u:geheim@h"))
    relay_log(run_dir, "MLflow", to.scrubbed).error("refused: %s", "https://u:geheim@h/api and geheim")
    assert (run_dir / "logs" / "relay.log").read_text().endswith("ERROR MLflow: refused: https://***@h/api and ***\n")


def test_two_relays_do_not_send_the_same_run(store: MlflowConfig, new_run: NewRun) -> None:
    run_dir, _ = new_run("busy")
    with exclusive(run_dir / ".relay.lock") as held:
        assert held
        relay = Relay(run_dir, store)
        relay.start()
        until(lambda: "another ortlaunch process" in (run_dir / "logs" / "relay.log").read_text())
        result = relay.finish(1)
    assert (result.sent, result.unsent_events) == (False, 1) and "another ortlaunch process" in result.message
    assert sync(run_dir, store).sent


def test_nothing_is_raised_whatever_the_disk_says(store: MlflowConfig, tmp_path: Path) -> None:
    relay = Relay(tmp_path / "no such folder", store)
    relay.start()
    assert relay.finish(5).unsent_events == 0
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "logs").touch()  # where a folder is needed
    (broken / "relay.json").mkdir()  # where a file is needed
    Journal(broken / "journal.jsonl").start("broken", "n", "r")
    result = Relay(broken, store).finish(4)
    assert not result.sent and result.message


def test_a_run_whose_folder_is_gone_is_ended_too(store: MlflowConfig, new_run: NewRun, client: Any) -> None:
    run_dir, journal = new_run("gone")
    relay = Relay(run_dir, store)
    relay.start()
    journal.metrics(1, {"a": 1})
    deadline, size = time.monotonic() + 120, (run_dir / "journal.jsonl").stat().st_size
    while not (run_dir / "relay.json").exists() or json.loads((run_dir / "relay.json").read_text())["offset"] < size:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run_id = json.loads((run_dir / "relay.json").read_text())["mlflow_run_id"]
    shutil.rmtree(run_dir)
    relay.give_up("FAILED", 60)
    run = client(store.uri).get_run(run_id)
    assert (run.info.status, run.data.metrics) == ("FAILED", {"a": 1})
    assert not run_dir.exists()
