"""Which runs a request means, in a real store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compare.command import main
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.tracking.sink import PARENT_TAG
from tests.compare.conftest import collected

Make = Callable[..., str]


def names(store: MlflowConfig, **selection: Any) -> list[str]:
    return [row.name for row in collected(store, **selection).rows]


def test_tags_are_a_filter_and_all_must_hold(store: MlflowConfig, make: Make, experiment: str) -> None:
    make("a", 1.0, tags={"backend": "eager", "team": "it's"})
    make("b", 2.0, tags={"backend": "ort", "team": "it's"})
    make("c", 3.0, tags={"backend": "ort"})
    backend, team = ("ortlaunch.backend", "ort"), ("ortlaunch.team", "it's")
    assert names(store, tags=[backend], experiment=experiment) == ["b", "c"]
    assert names(store, tags=[backend, team], experiment=experiment) == ["b"]
    assert names(store, tags=[team], runs=["c"], experiment=experiment) == ["c", "a", "b"], "what is named comes first"
    assert names(store, tags=[team], runs=["b"], experiment=experiment) == ["b", "a"], "each once"
    with pytest.raises(RequestError, match=rf"{experiment}.*with the tags ortlaunch.backend=x"):
        names(store, tags=[("ortlaunch.backend", "x")], experiment=experiment)


def test_tags_look_everywhere_unless_told(store: MlflowConfig, make: Make, experiment: str, capsys: Any) -> None:
    run_id = make("only", 1.0, tags={"mark": experiment})
    assert main(["--tag", f"ortlaunch.mark={experiment}", "--format", "json"], store.uri, "elsewhere") == 0
    assert [run["run_id"] for run in json.loads(capsys.readouterr().out)["runs"]] == [run_id]


@pytest.mark.parametrize("pair", [("a`b", "x"), ("a", "both ' and \"")])
def test_what_mlflow_cannot_search_for_is_said(store: MlflowConfig, make: Make, pair: tuple[str, str]) -> None:
    make("a")
    with pytest.raises(RequestError, match=r"--tag .*cannot search"):
        names(store, tags=[pair])


@pytest.mark.parametrize("text", ["novalue", "=x"])
def test_a_tag_is_a_pair(store: MlflowConfig, text: str) -> None:
    with pytest.raises(RequestError, match=f"^compare: --tag: '{text}' is not KEY=VALUE"):
        main(["--tag", text], store.uri, "x")


def test_what_mlflow_refuses_is_said_without_its_sql(store: MlflowConfig, make: Make, monkeypatch: Any) -> None:
    """An older server refuses conditions that this client takes, and a broken database answers with its SQL."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    make("a")
    refusal = MlflowException(
        "Invalid clause(s) in filter string: 'tags.`nope`'\n[SQL: SELECT x]", INVALID_PARAMETER_VALUE
    )
    for error, said in (
        (refusal, r"--tag nope=x: MLflow cannot search for this text$"),
        (
            Exception("(sqlite3.OperationalError) no such column: x\n[SQL: SELECT a]\n[parameters: (1,)]"),
            r"column: x \(another store: --uri",
        ),
    ):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(MlflowClient, "search_runs", fail)
        with pytest.raises(RequestError, match=said) as refused:
            main(["--tag", "nope=x"], store.uri, "x")
        assert len(str(refused.value).splitlines()) == 1 and "SQL" not in str(refused.value)


def test_the_last_runs_and_that_there_are_more(store: MlflowConfig, make: Make, experiment: str) -> None:
    for name in "abcd":
        make(name)
    assert names(store, experiment=experiment, last=2) == ["c", "d"]
    assert collected(store, experiment=experiment, last=3).notes == ["the last 3 runs only: more by --last N"]
    assert collected(store, experiment=experiment, last=4).notes == []


def test_comparisons_and_sweeps_are_no_runs_to_compare(store: MlflowConfig, make: Make, experiment: str) -> None:
    make("a")
    make("sweep", tags={"kind": "sweep"})
    make("comparison", tags={"kind": "comparison"})
    make("b")
    assert names(store, experiment=experiment, last=2) == ["a", "b"]


def test_deleted_runs_are_no_runs(store: MlflowConfig, make: Make, experiment: str, client: Any) -> None:
    make("a")
    run_id = make("gone-" + experiment)
    client.delete_run(run_id)
    for asked in (run_id, "gone-" + experiment):
        with pytest.raises(RequestError, match="there is no run"):
            names(store, runs=["a"], baseline=asked, experiment=experiment)
    assert names(store, experiment=experiment) == ["a"]


def test_more_runs_than_a_page(store: MlflowConfig, make: Make, experiment: str, monkeypatch: Any) -> None:
    from ortlaunch.compare import sources

    monkeypatch.setattr(sources, "_RUNS_PAGE", 2)
    for name in "abcde":
        make(name)
    assert names(store, experiment=experiment, last=5) == list("abcde")
    assert names(store, experiment=experiment, last=100) == list("abcde")


def test_a_baseline_may_be_of_another_experiment(store: MlflowConfig, make: Make, experiment: str, client: Any) -> None:
    make("a", 2.0)
    other = client.create_experiment(f"other-{experiment}")
    run_id = client.create_run(other, run_name="elsewhere").info.run_id
    comparison = collected(store, experiment=experiment, baseline=run_id)
    assert [row.name for row in comparison.rows] == ["elsewhere", "a"] and comparison.baseline_id == run_id
    with pytest.raises(RequestError, match="no run 'nobody'"):
        collected(store, experiment=experiment, baseline="nobody")


def test_of_two_runs_with_the_baselines_name_the_selected_one_is_meant(
    store: MlflowConfig, make: Make, experiment: str, client: Any
) -> None:
    """A bench that is repeated makes runs of the same names."""
    make("cell", 2.0)
    ids = [client.get_experiment_by_name(experiment).experiment_id]
    (earlier,) = (run.info.run_id for run in client.search_runs(ids))
    make("cell", 4.0)
    make("other", 1.0)
    later, other = (
        next(
            run.info.run_id
            for run in client.search_runs(ids)
            if run.info.run_name == name and run.info.run_id != earlier
        )
        for name in ("cell", "other")
    )
    comparison = collected(store, experiment=experiment, runs=[later, other], baseline="cell")
    assert comparison.baseline_id == later and {row.run_id for row in comparison.rows} == {later, other}
    with pytest.raises(RequestError, match="'cell' means 2 runs"):
        collected(store, experiment=experiment, runs=[other], baseline="cell")


def baseline_of(store: MlflowConfig, **selection: Any) -> tuple[str, str]:
    comparison = collected(store, **selection)
    return next(row.name for row in comparison.rows if row.run_id == comparison.baseline_id), comparison.why


def test_the_baseline_is_the_oldest_eager_run_that_is_shown(
    store: MlflowConfig, make: Make, experiment: str, capsys: Any
) -> None:
    make("ort first", 9.0, tags={"backend": "ort"})
    assert main(["--experiment", experiment], store.uri, "") == 0
    assert "baseline:" not in capsys.readouterr().out, "there is no other"
    assert baseline_of(store, experiment=experiment) == (
        "ort first",
        "the oldest run of gpt2 that finished, as none is eager",
    )
    make("too short", tags={"backend": "eager"})
    make("stopped", 5.0, tags={"backend": "eager"}, status="KILLED")
    for number in range(4):
        make(f"eager-{number}", 1.0, tags={"backend": "eager"})
        make(f"ort-{number}", 2.0, tags={"backend": "ort"})
    make("typo", params={"model.name": "gpt22"}, status="FAILED")
    assert main(["--experiment", experiment, "--last", "12"], store.uri, "") == 0
    why = "the oldest eager run of gpt2 (the newest run's model) that finished"
    assert f"\nbaseline: {why}; another by --baseline RUN\n" in capsys.readouterr().out
    assert names(store, experiment=experiment)[:3] == ["eager-0", "stopped", "ort-0"], "the baseline comes first"
    assert len(names(store, experiment=experiment)) == 10
    assert baseline_of(store, experiment=experiment, tags=[("ortlaunch.backend", "ort")])[0] == "ort first"
    assert baseline_of(store, experiment=experiment, last=4)[0] == "eager-3", "of these four"
    assert names(store, experiment=experiment, last=2) == ["ort-3", "typo"]
    assert baseline_of(store, experiment=experiment, baseline="ort-3") == ("ort-3", "")
    assert baseline_of(store, experiment=experiment, runs=["ort-3", "eager-0"]) == (
        "ort-3",
        "the first run that was named",
    )


def test_another_model_has_a_baseline_of_its_own(store: MlflowConfig, make: Make, experiment: str) -> None:
    for model in ("gpt2", "it's", "vit"):
        for backend in ("ort", "eager"):
            make(f"{model}-{backend}", 1.0, params={"model.name": model}, tags={"backend": backend})
        assert baseline_of(store, experiment=experiment)[0] == f"{model}-eager"


def test_runs_of_which_none_has_finished_have_a_baseline_all_the_same(
    store: MlflowConfig, make: Make, experiment: str
) -> None:
    make("a", status="FAILED")
    make("b", status="KILLED")
    assert baseline_of(store, experiment=experiment) == ("a", "the oldest of these runs, of which none has finished")


def test_a_sweeps_baseline_is_its_first_run_that_finished(
    store: MlflowConfig, make: Make, experiment: str, client: Any
) -> None:
    sweep = make("sweep", tags={"kind": "sweep"})
    for number, (name, status) in enumerate((("a", "FAILED"), ("b", "FINISHED"), ("c", "FINISHED"))):
        run_id = make(name, 1.0, tags={"sweep_task": str(number)}, status=status)
        client.set_tag(run_id, PARENT_TAG, sweep)
    assert baseline_of(store, experiment=experiment, sweep=sweep) == ("b", "the first run of the sweep that finished")


def test_a_sweep_keeps_its_baseline_beside_runs_with_a_tag(
    store: MlflowConfig, make: Make, experiment: str, client: Any
) -> None:
    team = {"team": experiment}
    make("earlier", 9.0, tags=team | {"backend": "eager"})
    sweep = make("sweep", tags={"kind": "sweep"})
    for number, (name, status) in enumerate((("a", "FAILED"), ("b", "FINISHED"))):
        # The run that finished was too short for a throughput.
        run_id = make(name, None, tags={"sweep_task": str(number)}, status=status)
        client.set_tag(run_id, PARENT_TAG, sweep)
    wanted = {"experiment": experiment, "sweep": sweep, "tags": [("ortlaunch.team", experiment)]}
    assert names(store, **wanted) == ["a", "b", "earlier"]
    assert baseline_of(store, **wanted) == ("b", "the first run of the sweep that finished")
    client.set_terminated(run_id, "FAILED")
    assert baseline_of(store, **wanted) == ("earlier", "the oldest eager run of gpt2 that finished")


def test_runs_that_came_to_other_steps_are_no_repeats(
    store: MlflowConfig, make: Make, experiment: str, capsys: Any
) -> None:
    """A resumed run goes on for more steps than MLflow was told when it began."""
    for name, step in (("short", 60.0), ("long", 300.0)):
        make(name, 100.0, params={"train.steps": "60"}, last_step=step)
    assert main(["--experiment", experiment], store.uri, "") == 0
    assert re.search(r"steps taken\s+60\s+short\s+300\s+long", capsys.readouterr().out)


def test_how_far_came_what_did_not_finish(store: MlflowConfig, make: Make, experiment: str, capsys: Any) -> None:
    make("whole", 100.0, params={"train.steps": "100"}, last_step=100.0)
    losses = {"train/loss": [5.0, 4.0, 3.0]}
    fell = make("fell", params={"train.steps": "100", "seed": "1"}, curves=losses, status="FAILED")
    early = make("early", params={"optimizer.lr": "1"}, status="KILLED")
    written = {"train/loss": [5.0], "checkpoint/write_seconds": [0.1] * 7}
    some = {"params": {"train.steps": "100", "optimizer.lr": "2"}, "curves": written, "status": "KILLED"}
    stopped = make("stopped", tags={"stopped_at_step": "7"}, **some)
    resumed = make("resumed", tags={"stopped_at_step": "4"}, **some)
    assert main(["--experiment", experiment], store.uri, "") == 0
    out = capsys.readouterr().out
    assert f"not finished: fell ({fell[:8]}) FAILED at step 3 of 100, early ({early[:8]}) KILLED, no step logged" in out
    assert f"stopped ({stopped[:8]}) STOPPED at step 7 of 100" in out
    assert f"resumed ({resumed[:8]}) KILLED at step 7 of 100" in out, "it was killed after it went on"
    assert "1 FINISHED 1 FAILED" in out and "steps taken" not in out
