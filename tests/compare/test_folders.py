"""Runs that are read from their journals: as MLflow has them, and also where it has none of them."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compare.command import main
from ortlaunch.compare.curves import _history
from ortlaunch.compare.runs import of_folder, of_mlflow, points_of
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.run.journal import Journal
from ortlaunch.serve.acts.comparing import compare
from ortlaunch.tracking.relay import sync
from tests.launch.follow.conftest import Maker
from tests.launch.follow.conftest import cache_of_this_test as cache_of_this_test
from tests.launch.follow.conftest import make_run as make_run

AWAY = "http://127.0.0.1:9"


def twice_begun(folder: Path, end: str | None = "KILLED") -> Path:
    """A run that was stopped, and resumed with another learning rate, which trains some steps again."""
    folder.mkdir(parents=True)
    with Journal(folder / "journal.jsonl") as journal:
        for attempt, lr in enumerate(("0.1", "0.2")):
            journal.start("twice", "run", "abc123")
            journal.params({"model": {"name": "mlp"}, "optimizer": {"lr": lr}, "train": {"steps": 8}, "seed": 0})
            journal.tags({"ortlaunch.backend": "ort", "ortlaunch.trainer": "ddp", "ortlaunch.ort_active": "true"})
            if attempt:
                journal.rewind(2, "from step 2")
            journal.metrics(2 * attempt, {"startup/time_to_first_step_seconds": 1.0 + attempt})
            for step in range(1 + 2 * attempt, 5 + 2 * attempt):
                journal.metrics(step, {"train/loss": 3.0 - step / 10 - attempt, "eval/acc curacy": step / 10})
            journal.metrics(4 + 2 * attempt, {"checkpoint/write_seconds": 0.1, "own/bad": math.inf})
            journal.tags({"ortlaunch.stopped_at_step": str(4 + 2 * attempt)})
            if end is not None:
                journal.end(end)  # type: ignore[arg-type]
            # A step that is trained again has another time than before.
            time.sleep(0.005)
    return folder


@pytest.mark.parametrize("end", ["KILLED", "FINISHED", "FAILED", None])
def test_a_journal_says_of_a_run_what_mlflow_says(
    store: MlflowConfig, tmp_path: Path, client: Any, end: str | None
) -> None:
    folder = twice_begun(tmp_path / "runs" / "twice" / "20260101-000000-run-abc123", end)
    run_id = sync(folder, store).mlflow_run_id
    assert run_id is not None
    row, wanted = of_folder(folder), of_mlflow(client.get_run(run_id))
    known = {key: value for key, value in wanted.tags.items() if key in row.tags}
    assert replace(row, folder=None) == replace(wanted, experiment_id="", tags=known)
    assert row.params["optimizer.lr"] == "0.1, then 0.2" and row.metrics["train/loss"] == pytest.approx(1.4)
    keys = list(row.metrics)
    histories = points_of(folder, keys)
    for key in keys:
        assert list(_history(row, histories[key])) == list(_history(row, client.get_metric_history(run_id, key))), key


def printed(capsys: Any, *words: str, uri: str = AWAY) -> dict[str, Any]:
    assert main([*words, "--format", "json"], uri) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("uri", [AWAY, "sqlite:///mlruns.db"])
def test_a_store_that_is_not_there_keeps_nobody_from_comparing(make_run: Maker, capsys: Any, uri: str) -> None:
    first, *_ = made = [make_run(f"run-{number}") for number in range(3)]
    make_run("other", experiment="other")
    (first / "relay.json").write_text(json.dumps({"mlflow_run_id": "0" * 32}))
    found = printed(capsys, uri=uri)
    assert [row["run"] for row in found["runs"]] == ["run-0", "run-1", "run-2"] and found["uri"] is None
    assert [row["run_id"] for row in found["runs"]] == ["0" * 32, made[1].name[-6:], made[2].name[-6:]]
    (note,) = found["notes"]
    assert note.startswith("read from the run folders alone: ")
    assert [row["run"] for row in printed(capsys, "run-1", made[2].name[-6:], uri=uri)["runs"]] == ["run-1", "run-2"]
    assert (
        printed(capsys, "run-0", "--last", "2", "--tag", "ortlaunch.run_id=000002", uri=uri)["runs"][1]["run"]
        == "run-1"
    )
    assert "notes" in printed(capsys, str(first), uri=uri) and not printed(capsys, str(first), uri=uri)["notes"]
    with pytest.raises(RequestError, match=r"^cannot read|no MLflow store at"):
        main(["--uri", uri], uri)
    with pytest.raises(RequestError, match=r"^cannot read|no MLflow store at"):
        main(["--experiment", "none"], uri)
    with pytest.raises(
        RequestError, match=r"no run 'nobody' in the run folders: .*(Connection refused|no MLflow store)"
    ):
        main(["nobody"], uri)


def test_runs_that_mlflow_never_got_stand_among_those_that_it_has(
    store: MlflowConfig, make_run: Maker, capsys: Any, experiment: str
) -> None:
    sent, unsent = (make_run(name, experiment=experiment) for name in ("sent", "unsent"))
    sync(sent, store)
    rows = printed(capsys, "--experiment", experiment, uri=store.uri)["runs"]
    assert [row["run"] for row in rows] == ["sent", "unsent"] and rows[1]["run_id"] == unsent.name[-6:]
    rows = printed(capsys, "--experiment", experiment, "--uri", store.uri)["runs"]
    assert [row["run"] for row in rows] == ["sent"], "of a store that was named its own runs"
    rows = printed(capsys, "unsent", "sent", "--experiment", experiment, uri=store.uri)["runs"]
    assert [row["run"] for row in rows] == ["unsent", "sent"]


def test_two_runs_of_one_name_are_told_apart(make_run: Maker) -> None:
    for _ in range(2):
        make_run("twin")
    with pytest.raises(
        RequestError, match=r"^'twin' means 2 runs: name one by its id \(00000\d twin of .*; 00000\d twin"
    ):
        main(["twin"], AWAY)


def test_figures_of_any_name(make_run: Maker, capsys: Any) -> None:
    for number, accuracy in enumerate((0.5, 0.75)):
        folder = make_run(f"run-{number}", steps=100 + number)
        with Journal(folder / "journal.jsonl") as journal:
            journal.metrics(50, {"eval/accuracy": 0.1})
            journal.metrics(100, {"eval/accuracy": accuracy, "own: value": 2.0})
    words = ("--metric", "eval/accuracy:max", "--metric", "own: value", "--metric", "train/loss")
    found = printed(capsys, *words)
    assert [row["figures"]["eval/accuracy"] for row in found["runs"]] == [0.5, 0.75], "the last value"
    figures = found["groups"][1]["figures"]
    assert {key: one["better"] for key, one in figures.items()} == {
        "eval/accuracy": "higher",
        "own: value": None,
        "train/loss": "lower",
    }
    assert figures["eval/accuracy"]["change"]["difference"] == 0.25
    assert figures["eval/accuracy"]["verdict"] is None, "single runs decide nothing"
    assert main([*words, "--html", "page.html"], AWAY) == 0
    assert "+0.25" in capsys.readouterr().out and '"title":"eval/accuracy"' in Path("page.html").read_text()


@pytest.mark.parametrize("metric", ["eval/acuracy:max", "eval/accuracy:mx"])
def test_a_figure_that_no_run_has_is_named_with_the_nearest(make_run: Maker, metric: str) -> None:
    folder = make_run()
    with Journal(folder / "journal.jsonl") as journal:
        journal.metrics(100, {"eval/accuracy": 0.5})
    named = metric.removesuffix(":max")
    said = rf"^--metric {named}: no run has this metric\. did you mean eval/accuracy\? \(metrics: "
    with pytest.raises(RequestError, match=said):
        main(["--metric", metric, "--html", "page.html"], AWAY)
    assert not Path("page.html").exists()


def test_a_sweep_is_no_run(make_run: Maker) -> None:
    folder = make_run("sweep")
    with Journal(folder / "journal.jsonl") as journal:
        journal.tags({"ortlaunch.kind": "sweep"})
    with pytest.raises(RequestError, match=f"^{folder} is a sweep: compare its runs by --sweep {folder}$"):
        main([str(folder)], AWAY)


def test_the_service_compares_by_the_ids_that_its_other_pages_have(make_run: Maker) -> None:
    folders = [make_run("run", run_id=one, end="KILLED", steps=int(one[2])) for one in ("001a00", "002b00")]
    (folders[0] / "relay.json").write_text(json.dumps({"mlflow_run_id": "f" * 32}))
    found = str(compare({"run_dirs": list(map(str, folders))}))
    assert "run (001a00) KILLED" in found and "against run (001a00)" in found and "'002b00'" in found
    assert "ffffffff" not in found and "another by --baseline RUN" not in found
