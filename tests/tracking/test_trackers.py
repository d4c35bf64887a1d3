"""Several trackers at once, one of them a user's own: each has its offset and its failures, and none stops another."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import RequestError
from ortlaunch.base.locks import exclusive
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config.load import load_config, save_config, to_config
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.follow.sync import sync_main
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import create
from ortlaunch.tracking import trackers
from ortlaunch.tracking.relay import Relay, sync
from ortlaunch.tracking.state import destination, unattended
from tests.support.servers import free_port
from tests.support.trackers import install
from tests.support.waiting import until

NewRun = Callable[..., tuple[Path, Journal]]
POINTS = ("kept = their_trackers:Kept", "plain = their_trackers:Plain", "rude = their_trackers:Rude")


@pytest.fixture(autouse=True)
def theirs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution of a user's, on `sys.path` for one test."""
    folder = tmp_path_factory.mktemp("theirs")
    install(folder, *POINTS, "gone = no_such_module:Kept", "wrong = their_trackers:not_a_tracker")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("their_trackers", None)


def kept(**values: Any) -> Any:
    return trackers.configured("kept", values)


def told(run_dir: Path, file: str = "kept.jsonl") -> list[str]:
    """The first word of each thing that the user's tracker was told."""
    return [json.loads(line)[0] for line in (run_dir / file).read_text().splitlines()]


def sent_to(tracker: str, run_dir: Path) -> int:
    """How many bytes of the journal a tracker has."""
    file = Run(run_dir).tracker_file(tracker)
    return int(json.loads(file.read_text())["offset"]) if file.exists() else 0


def away() -> MlflowConfig:
    """A server that is not there."""
    return MlflowConfig(uri=f"http://127.0.0.1:{free_port()}", timeout_seconds=1)


def configure(run_dir: Path, tracking: MlflowConfig | None, **others: Any) -> None:
    main = {"name": "none"} if tracking is None else vars(tracking)
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"tracking": main, "trackers": others}))


def composed(*words: str) -> Any:
    config = to_config(compose(["device=cpu", *words]))
    check(config)
    return config


def test_trackers_combine_and_each_keeps_its_keys(tmp_path: Path) -> None:
    config = composed("tracking=[mlflow,kept,plain]", "tracking.uri=http://team:5000", "trackers.kept.port=8080")
    assert config.tracking == MlflowConfig(uri="http://team:5000")
    assert [(cfg.name, getattr(cfg, "port", None)) for cfg in trackers.chosen(config)] == [
        ("mlflow", None),
        ("kept", 8080),
        ("plain", 8),
    ]
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_one_alone_and_none() -> None:
    alone = composed("tracking=kept")
    assert (alone.tracking.name, list(alone.trackers)) == ("none", ["kept"])
    assert trackers.flush_seconds(trackers.chosen(alone)) == 60
    assert trackers.chosen(composed("tracking=none")) == []
    assert composed("tracking=[none,kept]").trackers == alone.trackers
    assert [cfg.name for cfg in trackers.chosen(composed("tracking.flush_seconds=3"))] == ["mlflow"]


def test_the_configuration_of_an_older_run_is_mlflows(tmp_path: Path) -> None:
    config = composed()
    save_config(config, tmp_path / "config.yaml")
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del stored["trackers"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["tracking=[mlflow,kepd]"],
            r"^tracking=kepd: no such option\. Did you mean tracking=kept\? .*kept, mlflow, none",
        ),
        (["tracking=[mlflow,gone]"], r"^tracking=gone: no_such_module:Kept of the package their-trackers cannot be"),
        (["tracking=wrong"], r"^tracking=wrong: .* is no subclass of ortlaunch\.tracking\.tracker\.Tracker$"),
        (["tracking=[mlflow,none]"], r"^tracking: none means no tracker, so it is not combined with mlflow"),
        (["tracking=kept", "trackers.kept.port=many"], r"^trackers\.kept\.port=many: must be a whole number$"),
        (["tracking=plain", "trackers.plain.port=many"], r"^trackers\.plain\.port=many: must be a whole number$"),
        (["tracking=kept", "trackers.kept.prot=1"], r"^trackers\.kept\.prot: no such key of a chosen tracker"),
        (["tracking=kept", "+trackers.kept.prot=1"], r"^trackers\.kept\.prot: the tracker has no such key .*\.port"),
        (["trackers.kept.port=1"], r"^trackers\.kept\.port: .* chosen by tracking=\[mlflow,kept\]$"),
        (["tracking=kept", "trackers.kept.port=0"], r"^trackers\.kept\.port=0: must be at least 1$"),
        (["tracking=kept", "trackers.kept.port=1"], r"^trackers\.kept: KeyError: 'no such port'$"),
        (["tracking=kept", "tracking.uri=http://x"], r"^tracking\.uri: .* it belongs to tracking=mlflow$"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_one_message(words: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        composed(*words)
    assert "\n" not in str(refused.value)


def test_a_token_is_in_no_file(tmp_path: Path) -> None:
    config = composed("tracking=kept", "trackers.kept.api_token=geheim")
    assert trackers.public(config).trackers["kept"]["api_token"] == "***"
    assert config.trackers["kept"]["api_token"] == "geheim"


def test_a_hidden_token_of_a_users_tracker_is_refused_by_its_key() -> None:
    config = composed("tracking=kept", "trackers.kept.api_token=geheim")
    trackers.check_credentials(config)
    with pytest.raises(RequestError, match=r"^trackers\.kept\.api_token: .*trackers\.kept\.api_token=VALUE$"):
        trackers.check_credentials(trackers.public(config))


def test_a_users_tracker_stands_beside_mlflow(store: MlflowConfig, new_run: NewRun, client: Any) -> None:
    run_dir, journal = new_run("beside")
    relay = Relay(run_dir, store, kept())
    relay.start()
    journal.params({"a": 1})
    journal.metrics(1, {"loss": 2.0})
    journal.end("FINISHED")
    result = relay.finish(60)
    assert result.sent and result.message == ""
    assert client(store.uri).get_run(result.mlflow_run_id).data.metrics == {"loss": 2.0}
    assert sorted(told(run_dir)) == ["Ended", "Params", "Points", "open"]
    assert json.loads((run_dir / "relay-kept.json").read_text()) == {
        "uri": "kept",
        "mark": "committed",
        "offset": (run_dir / "journal.jsonl").stat().st_size,
        "refused": 0,
    }
    journal.tags({"late": "fact"})
    assert [one.sent_events for one in sync(run_dir, store, kept()).sinks] == [1, 1]
    assert told(run_dir)[-2:] == ["open", "Tags"]


def test_a_relay_json_of_an_older_run_is_mlflows_offset(store: MlflowConfig, new_run: NewRun) -> None:
    run_dir, journal = new_run("older")
    journal.metrics(1, {"a": 1})
    run_id = sync(run_dir, store).mlflow_run_id
    older = {"uri": store.uri, "mlflow_run_id": run_id, "offset": (run_dir / "journal.jsonl").stat().st_size}
    (run_dir / "relay.json").write_text(json.dumps({**older, "refused": 2}) + "\n")
    journal.end("FINISHED")
    result = sync(run_dir, store, kept())
    assert [one.sent_events for one in result.sinks] == [1, 3]
    assert (result.mlflow_run_id, Run(run_dir).mlflow_run_id()) == (run_id, run_id)
    assert json.loads((run_dir / "relay.json").read_text())["refused"] == 2


@pytest.mark.parametrize("fails", ["constructor", "send", "hang"])
def test_a_tracker_that_fails_holds_nothing_up(
    store: MlflowConfig, new_run: NewRun, client: Any, fails: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, journal = new_run(f"fails-{fails}")
    relay = Relay(run_dir, kept(fails=fails, api_token="geheim-token"), store)
    relay.start()
    journal.metrics(1, {"a": 1})
    journal.end("FINISHED")
    # MLflow's own first use of a store takes its time, and so does each step of a relay beside other processes.
    until(lambda: Run(run_dir).mlflow_run_id() is not None and Run(run_dir).unsent_bytes() == 0)
    if fails != "hang":
        log = Run(run_dir).relay_log
        until(lambda: f"ConnectionError: no answer in {fails}" in log.read_text())
    begun = time.monotonic()
    result = relay.finish(2)
    assert time.monotonic() - begun < 100, "the tracker that hangs goes on for ten minutes"
    theirs, mlflow = result.sinks
    assert (mlflow.sent, mlflow.message) == (True, "")
    assert client(store.uri).get_run(mlflow.mark).info.status == "FINISHED"
    # The start alone is no operation: it may have been sent before the metrics came.
    assert not theirs.sent and theirs.unsent_events in ((2, 3) if fails != "constructor" else (3,))
    assert theirs.message.startswith(f"{theirs.unsent_events} journal events have not reached Kept at kept")
    assert theirs.remedy == f"ortlaunch sync {run_dir}"
    assert result.message == f"{theirs.message}; send them with: {theirs.remedy}"
    if fails != "hang":
        assert f" (no answer in {fails}" in theirs.message
        assert "Kept: not sent, trying again: ConnectionError" in (run_dir / "logs" / "relay.log").read_text()
        (run_dir / "mend").touch()
        configure(run_dir, store, kept={"fails": fails})
        assert sync_main([str(run_dir)]) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"{run_dir}: 0 events sent, MLflow run {mlflow.mark}",
            f"{run_dir}: {theirs.unsent_events} events sent, Kept at kept",
        ]


def test_a_dead_server_holds_nothing_up(new_run: NewRun, store: MlflowConfig) -> None:
    run_dir, journal = new_run("dead")
    journal.end("FINISHED")
    relay = Relay(run_dir, away(), kept())
    relay.start()
    until(lambda: (run_dir / "kept.jsonl").exists() and told(run_dir) == ["open", "Ended"])
    until(lambda: sent_to("kept", run_dir) == (run_dir / "journal.jsonl").stat().st_size)
    result = relay.finish(1)
    mlflow, theirs = result.sinks
    assert (mlflow.sent, theirs.sent, theirs.message) == (False, True, "")
    assert told(run_dir) == ["open", "Ended"]
    assert [one.sent for one in sync(run_dir, store, kept()).sinks] == [True, True]
    assert told(run_dir) == ["open", "Ended"]


def test_what_it_refuses_is_counted_for_it_alone(store: MlflowConfig, new_run: NewRun) -> None:
    run_dir, journal = new_run("refuses")
    journal.end("FINISHED")
    theirs, mlflow = sync(run_dir, kept(fails="refuse"), store).sinks
    assert theirs.sent and theirs.message.startswith("1 values were left out")
    assert mlflow.message == ""
    assert "Kept refused a kind, it is left out: not wanted" in (run_dir / "logs" / "relay.log").read_text()


def test_a_tracker_that_only_raises_ends_no_run(new_run: NewRun) -> None:
    run_dir, journal = new_run("rude")
    journal.end("FINISHED")
    (result,) = sync(run_dir, trackers.configured("rude", {"fails": "send"})).sinks
    assert (result.sent, result.where, result.lines("rude")) == (False, "Kept", [])


def test_a_tracker_that_is_not_installed_here(
    new_run: NewRun, store: MlflowConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, journal = new_run("missing")
    journal.end("FINISHED")
    configure(run_dir, store, elsewhere={"name": "elsewhere", "x": 1})
    assert sync_main([str(run_dir)]) == 1
    mlflow, missing = capsys.readouterr().out.splitlines()
    assert f"2 events sent, MLflow run {Run(run_dir).mlflow_run_id()}" in mlflow
    assert "2 journal events have not reached elsewhere" in missing
    assert "tracking=elsewhere: there is no such tracker here (there are mlflow" in missing


def test_runs_without_mlflow_are_sent_to_the_others(new_run: NewRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, journal = new_run("alone")
    journal.end("FINISHED")
    configure(run_dir, None, kept={})
    assert sync_main(["--all", str(run_dir.parent)]) == 0
    assert capsys.readouterr().out == f"{run_dir}: 2 events sent, Kept at kept\n"
    assert not (run_dir / "relay.json").exists()


def test_a_sweep_is_a_run_only_where_runs_are_listed(tmp_path: Path, store: MlflowConfig) -> None:
    sweep = create(tmp_path / "multirun-x", "sweep-x", "sweeps", {"name": "none"}, ["ortlaunch"])
    assert [one.name for one in sync(sweep.folder, kept(), store).sinks] == ["mlflow"]
    assert not (sweep.folder / "kept.jsonl").exists()


def test_a_relay_at_work_for_any_tracker_keeps_others_out(new_run: NewRun) -> None:
    run_dir, journal = new_run("attended")
    journal.end("FINISHED")
    sync(run_dir, kept())
    with unattended(run_dir) as free:
        assert free
    with exclusive(destination(run_dir, kept()).lock), unattended(run_dir) as free:
        assert not free
