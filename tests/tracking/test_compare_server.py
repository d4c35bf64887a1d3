"""`ortlaunch compare` against a real `mlflow server`: the addresses that it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from mlflow.entities import Metric, Param

from ortlaunch.base.errors import RequestError
from ortlaunch.compare.command import main
from ortlaunch.compare.curves import read_curves


def test_addresses(server: Any, client: Any, tmp_path: Path, capsys: Any) -> None:
    server.up()
    mlflow = client(server.uri)
    experiment = mlflow.create_experiment("compared")
    runs = []
    for number in range(2):
        run = mlflow.create_run(experiment, run_name=f"run-{number}")
        metrics = [Metric("summary/tokens_per_second_median", 10.0 + number, 1, 5)]
        metrics += [Metric("train/loss", 3.0 - step / 5, run.info.start_time + step, step) for step in range(5)]
        mlflow.log_batch(run.info.run_id, metrics=metrics, params=[Param("optimizer.lr", str(number))])
        mlflow.set_terminated(run.info.run_id)
        runs.append(run.info.run_id)
    page = tmp_path / "page.html"
    words = ["--uri", server.uri, "--experiment", "compared", "--html", str(page)]
    assert main(words, "", "") == 0
    out = capsys.readouterr().out
    address = re.search(r"in MLflow: (\S+)", out)[1]  # type: ignore[index]
    assert unquote(address).startswith(f'{server.uri}/#/compare-runs?runs=["')
    assert all(run_id in address for run_id in runs)
    assert address.replace("&", "&amp;") in page.read_text()


def test_a_server_that_goes_away_meanwhile_is_one_message(
    server: Any, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.up()
    mlflow = client(server.uri)
    run = mlflow.create_run(mlflow.create_experiment("leaving"))
    mlflow.log_metric(run.info.run_id, "train/loss", 1.0)

    def read(*args: Any) -> Any:
        server.kill()
        return read_curves(*args)

    monkeypatch.setattr("ortlaunch.compare.command.read_curves", read)
    page = tmp_path / "page.html"
    with pytest.raises(RequestError, match=rf"^cannot read the MLflow store {server.uri}: [^\n]+$"):
        main(["--uri", server.uri, "--experiment", "leaving", "--html", str(page)], "", "")
    assert not page.exists()
