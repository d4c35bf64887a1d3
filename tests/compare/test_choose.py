"""Which runs a request means, in a real store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ortlaunch.compare.choose import Selection
from ortlaunch.compare.command import collect, main
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.errors import RequestError

Make = Callable[..., str]


def names(store: MlflowConfig, **selection: Any) -> list[str]:
    return [row.name for row in collect(store.uri, Selection(**selection)).rows]


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
def test_a_tag_is_a_pair(store: MlflowConfig, text: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--tag", text], store.uri, "x")
    assert raised.value.code == 2 and "KEY=VALUE" in capsys.readouterr().err


def test_the_last_runs_and_that_there_are_more(store: MlflowConfig, make: Make, experiment: str) -> None:
    for name in "abcd":
        make(name)
    assert names(store, experiment=experiment, last=2) == ["c", "d"]
    assert collect(store.uri, Selection(experiment=experiment, last=3)).notes == [
        "the last 3 runs only: more by --last N"
    ]
    assert collect(store.uri, Selection(experiment=experiment, last=4)).notes == []


def test_comparisons_and_sweeps_are_no_runs_to_compare(store: MlflowConfig, make: Make, experiment: str) -> None:
    make("a")
    make("sweep", tags={"kind": "sweep"})
    make("comparison", tags={"kind": "comparison"})
    make("b")
    assert names(store, experiment=experiment, last=2) == ["a", "b"]


def test_deleted_runs_are_called_so(store: MlflowConfig, make: Make, experiment: str, client: Any) -> None:
    make("a")
    run_id = make("gone-" + experiment)
    client.delete_run(run_id)
    for asked in (run_id, "gone-" + experiment):
        with pytest.raises(RequestError, match="deleted in MLflow"):
            names(store, runs=["a"], baseline=asked, experiment=experiment)
    assert names(store, experiment=experiment) == ["a"]


def test_more_runs_than_a_page(store: MlflowConfig, make: Make, experiment: str, monkeypatch: Any) -> None:
    from ortlaunch.compare import choose

    monkeypatch.setattr(choose, "_RUNS_PAGE", 2)
    for name in "abcde":
        make(name)
    assert names(store, experiment=experiment, last=5) == list("abcde")
    assert names(store, experiment=experiment, last=100) == list("abcde")


def test_a_baseline_may_be_of_another_experiment(store: MlflowConfig, make: Make, experiment: str, client: Any) -> None:
    make("a", 2.0)
    other = client.create_experiment(f"other-{experiment}")
    run_id = client.create_run(other, run_name="elsewhere").info.run_id
    comparison = collect(store.uri, Selection(experiment=experiment, baseline=run_id))
    assert [row.name for row in comparison.rows] == ["elsewhere", "a"] and comparison.baseline_id == run_id
    with pytest.raises(RequestError, match="no run 'nobody'"):
        collect(store.uri, Selection(experiment=experiment, baseline="nobody"))


def test_runs_that_came_to_other_steps_are_no_repeats(
    store: MlflowConfig, make: Make, experiment: str, capsys: Any
) -> None:
    """A resumed run goes on for more steps than MLflow was told when it began."""
    for name, step in (("short", 60.0), ("long", 300.0)):
        make(name, 100.0, params={"train.steps": "60"}, last_step=step)
    assert main(["--experiment", experiment], store.uri, "") == 0
    assert re.search(r"steps taken\s+60\s+short\s+300\s+long", capsys.readouterr().out)
