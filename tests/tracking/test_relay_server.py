"""The relay and a real server that is away, frozen, killed and back."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.config.schema import MlflowConfig
from ortlaunch.follow.sync import sync_main
from ortlaunch.launch.outages import Outages
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.run.state import OUTAGE_TAG
from ortlaunch.tracking.relay import Relay, sync
from tests.support.servers import between
from tests.support.waiting import PATIENCE, until

NewRun = Callable[..., tuple[Path, Journal]]
PATIENT = 60
"""Seconds that a busy machine may need for an answer."""
TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
"""The variable that MLflow reads for each request; a relay that connects sets it."""


def config(uri: str, timeout_seconds: int = 1) -> MlflowConfig:
    """A server that does not answer in time counts as away. On a busy machine, a healthy one may need `PATIENT`."""
    return MlflowConfig(uri=uri, timeout_seconds=timeout_seconds)


def experiment_of(client: Any, name: str) -> list[str]:
    return [client.get_experiment_by_name(name).experiment_id]


def wait_for_offset(run_dir: Path, behind: int) -> int:
    state = run_dir / "relay.json"

    def offset() -> int:
        return int(json.loads(state.read_text())["offset"]) if state.exists() else 0

    until(lambda: offset() > behind, said=(run_dir / "logs" / "relay.log").read_text)
    return offset()


def test_server_that_was_never_there(server: Any, new_run: NewRun, client: Any, history: Any) -> None:
    server.kill()
    run_dir, journal = new_run("absent")
    uri = server.uri.replace("http://", "http://anna:sehr%20geheim@")
    relay = Relay(run_dir, config(uri))
    relay.start()
    for step in range(5):
        journal.metrics(step, {"a": step})
    journal.end("FINISHED")
    result = relay.finish(3)
    assert (result.sent, result.unsent_events, result.mlflow_run_id) == (False, 7, None)
    assert f"ortlaunch sync {run_dir}" in result.message
    assert not sync(run_dir, config(uri)).sent
    server.up()
    delivered = sync(run_dir, config(uri, PATIENT))
    assert delivered.sent and delivered.sent_events == 7
    opened = client(server.uri)
    assert history(opened, delivered.mlflow_run_id, "a") == [(step, step) for step in range(5)]
    assert opened.get_run(delivered.mlflow_run_id).info.status == "FINISHED"
    log = (run_dir / "logs" / "relay.log").read_text()
    assert "not sent" in log and "takes events again" not in log
    for text in (log, result.message, (run_dir / "relay.json").read_text()):
        assert "geheim" not in text


def test_outages_lose_and_double_nothing(
    server: Any, new_run: NewRun, client: Any, history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.up()
    run_dir, journal = new_run("outages")
    (run_dir / "config.yaml").write_text("a: 1\n")
    relay = Relay(run_dir, config(server.uri, PATIENT))
    relay.start()

    def log_steps(first: int) -> None:
        for step in range(first, first + 1000):
            journal.metrics(step, {"a": step, "b": step})

    log_steps(0)
    offset = wait_for_offset(run_dir, 0)
    # Short for the frozen server alone: on a busy machine a healthy one needs longer for a thousand points each time.
    monkeypatch.setenv(TIMEOUT, "1")
    server.freeze()
    log_steps(1000)
    # At least one call runs into its time-out; the server finds it when it wakes up.
    until(relay.outages)
    monkeypatch.setenv(TIMEOUT, str(PATIENT))
    log_steps(2000)
    server.thaw()
    offset = wait_for_offset(run_dir, offset)
    server.kill()
    log_steps(3000)
    journal.artifact(Path("config.yaml"), "config")
    journal.end("FAILED")
    server.up()
    result = relay.finish(120)
    assert result.sent and result.message == "", (run_dir / "logs" / "relay.log").read_text()
    opened = client(server.uri)
    assert history(opened, result.mlflow_run_id, "a") == [(step, step) for step in range(4000)]
    assert history(opened, result.mlflow_run_id, "b") == [(step, step) for step in range(4000)]
    assert opened.get_run(result.mlflow_run_id).info.status == "FAILED"
    assert [file.path for file in opened.list_artifacts(result.mlflow_run_id, "config")] == ["config/config.yaml"]
    log = (run_dir / "logs" / "relay.log").read_text()
    assert "not sent" in log and "takes events again" in log


def test_an_outage_is_told_and_journalled_while_it_lasts(
    server: Any, new_run: NewRun, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortlaunch.launch.outages._AWAY_SECONDS", 0.3)
    monkeypatch.setattr("ortlaunch.launch.outages._LOOK_SECONDS", 0.1)
    server.up()
    run_dir, journal = new_run("told")
    relay = Relay(run_dir, config(server.uri))
    outages = Outages(Run(run_dir), relay)
    relay.start()
    wait_for_offset(run_dir, 0)
    said: list[str] = []
    steps = itertools.count()

    def journal_until(text: str) -> str:
        """Trains on until something is said; returns the tag."""
        deadline = time.monotonic() + PATIENCE
        while not any(text in line for line in said):
            assert time.monotonic() < deadline, (said, (run_dir / "logs" / "relay.log").read_text())
            journal.metrics(next(steps), {"a": 1.0})
            said.extend(outages.look())
            time.sleep(0.1)
        return str(Run(run_dir).state().tags[OUTAGE_TAG])

    name = f"MLflow at {server.uri}"
    server.freeze()
    away = journal_until(f"{name} takes no events since")
    assert "it does not answer in time. Training goes on" in said[-1]
    assert away.startswith(f"{name} takes no events since ")
    server.thaw()
    assert journal_until(f"{name} takes events again").startswith(f"{name} took no events from ")
    server.kill()
    said.clear()
    journal_until(f"{name} takes no events since")
    assert re.search("Connection re|Remote end closed", said[-1]), "refused, or ended where one was open"
    server.up()
    over = journal_until(f"{name} takes events again")
    journal.end("FINISHED")
    assert relay.finish(PATIENCE).sent and len(said) == 2
    (found,) = client(server.uri).search_runs(experiment_of(client(server.uri), "told"))
    assert found.data.tags[OUTAGE_TAG] == over


def test_a_server_that_has_lost_its_runs_gets_them_again(
    server: Any, new_run: NewRun, client: Any, history: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its database was replaced by an empty one: under a run that goes on, and after one that was sent wholly."""
    server.up()
    sent, journal = new_run("lost", "sent")
    journal.metrics(1, {"a": 1.0})
    journal.end("FINISHED")
    tracking = {"name": "mlflow", "uri": server.uri, "timeout_seconds": PATIENT}
    (sent / "config.yaml").write_text(json.dumps({"experiment": "lost", "tracking": tracking}))
    assert sync_main([str(sent)]) == 0
    run_dir, journal = new_run("lost", "running")
    relay = Relay(run_dir, config(server.uri))
    relay.start()
    journal.metrics(1, {"a": 1.0})
    wait_for_offset(run_dir, 0)
    server.kill()
    capsys.readouterr()
    assert sync_main([str(sent)]) == 1, "it is not known whether the server still has it"
    said = capsys.readouterr().out
    # A connection that was kept open is closed by the other side.
    assert re.search(f"MLflow at {server.uri} cannot be asked whether it still has them: (Conn|Remote end cl)", said)
    (server.folder / "server.db").unlink()
    server.up()
    journal.metrics(2, {"a": 2.0})
    journal.end("FINISHED")
    result = relay.finish(PATIENCE)
    assert result.sent, result.message
    assert history(client(server.uri), result.mlflow_run_id, "a") == [(1, 1.0), (2, 2.0)]
    assert sync_main([str(sent)]) == 0
    assert ": 3 events sent, MLflow run " in capsys.readouterr().out
    assert sync_main([str(sent)]) == 0
    assert ": 0 events sent, MLflow run " in capsys.readouterr().out
    opened = client(server.uri)
    names = [run.info.run_name for run in opened.search_runs(experiment_of(opened, "lost"))]
    assert sorted(names) == ["running", "sent"]


def test_run_whose_creation_got_no_answer_is_not_created_twice(server: Any, new_run: NewRun, client: Any) -> None:
    server.up()
    opened = client(server.uri)
    opened.create_experiment("late")
    run_dir, journal = new_run("late")
    journal.end("FINISHED")
    experiment = opened.get_experiment_by_name("late").experiment_id
    creates, searches, gave_up = [], [], threading.Event()

    def late(path: str) -> None:
        """Lets the first request to create a run reach the server only after the client has given up on it and looked
        for the run. When it looks again, the run is there."""
        if path.endswith("runs/create"):
            creates.append(path)
            if len(creates) == 1:
                gave_up.wait(PATIENCE)
        elif path.endswith("runs/search") and creates:
            searches.append(path)
            if len(searches) > 1:
                gave_up.set()
                until(lambda: opened.search_runs([experiment]))

    with between(server.uri, late) as uri:
        result = Relay(run_dir, config(uri)).finish(120)
    assert result.sent and len(creates) == 1, result.message
    runs = opened.search_runs([experiment])
    assert [run.info.run_id for run in runs] == [result.mlflow_run_id]
    assert "not sent" in (run_dir / "logs" / "relay.log").read_text(), "the proxy must have been too slow"


def test_a_run_that_logs_all_the_time_is_sent_in_few_requests(
    server: Any, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortlaunch.tracking.relay._GATHER_SECONDS", 1.0)
    server.up()
    run_dir, journal = new_run("talkative")
    batches: list[str] = []
    with between(server.uri, lambda path: batches.append(path) if path.endswith("log-batch") else None) as uri:
        relay = Relay(run_dir, config(uri, PATIENT))
        relay.start()
        began = time.monotonic()
        for step in range(200):
            journal.metrics(step, {"a": step})
            time.sleep(0.01)
        journal.end("FINISHED")
        result = relay.finish(120)
    assert result.sent, result.message
    # One when the run is created, one each second, and the rest at the end; without gathering one every 0.03 s or so.
    assert len(batches) <= time.monotonic() - began + 4


def test_hung_server_does_not_delay_the_end_of_the_run(server: Any, new_run: NewRun) -> None:
    """Whoever waited for its answer would wait for longer than a test may take."""
    server.up()
    server.freeze()
    try:
        run_dir, journal = new_run("hung")
        journal.end("FINISHED")
        result = Relay(run_dir, config(server.uri, timeout_seconds=600)).finish(1.5)
        assert (result.sent, result.unsent_events) == (False, 2)
    finally:
        server.thaw()


def test_server_limits_are_kept(server: Any, new_run: NewRun, client: Any) -> None:
    """Raw requests with more than 1000 metrics, or 100 parameters or tags, are refused."""
    server.up()
    run_dir, journal = new_run("limits")
    journal.params({"long": "x" * 6001} | {f"p[{number}]": number for number in range(120)})
    journal.tags({f"t{number}": "1" for number in range(120)})
    journal.metrics(1, {f"m{number}": number for number in range(1100)})
    result = sync(run_dir, config(server.uri, PATIENT))
    run = client(server.uri).get_run(result.mlflow_run_id)
    assert result.sent and result.message == ""
    assert (len(run.data.params), len(run.data.metrics)) == (121, 1100) and run.data.tags["t119"] == "1"
    assert len(run.data.params["long"]) == 6000
