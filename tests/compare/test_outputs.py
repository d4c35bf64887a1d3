"""Tables, files and the run in MLflow that a comparison leaves; names in them do no harm."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Metric
from rich.console import Console

from ortlaunch.base.errors import RequestError
from ortlaunch.compare.choose import Selection
from ortlaunch.compare.command import collect, main
from ortlaunch.compare.comparison import compared
from ortlaunch.compare.curves import Curve, Curves, Drawn, read_curves
from ortlaunch.compare.picture import figure_of
from ortlaunch.compare.render import render
from ortlaunch.compare.runs import RunRow
from ortlaunch.config.schema import MlflowConfig


class StepsOf:
    """A store in which every metric has so many steps, one a second."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def get_metric_history(self, _: str, key: str) -> list[Metric]:
        return [Metric(key, 1.0, 1000 * step, step) for step in range(self._steps)]


Make = Callable[..., str]
EVIL = "</script><img src=x onerror=alert(1)>|$x^2$ & \x1b[31m\n_"


@pytest.fixture
def repeats(make: Make) -> list[str]:
    """Two groups of two runs with curves; ratios 1.5 and 0.75."""
    curves = {"throughput/tokens_per_second": [10.0, 99.0], "train/loss": [3.0, 2.0], "memory/rss_gib": [1.0, 2.0]}
    made = []
    for backend, tokens, peak in (("eager", 100.0, 4.0), ("ort", 150.0, 3.0)):
        for seed in (0, 1):
            tags = {"backend": backend, "ort_active": str(backend == "ort").lower(), "world_size": "2"}
            params = {"backend.name": backend, "seed": str(seed)}
            made.append(
                make(
                    f"gpt2-{backend}-seed={seed}",
                    tokens + 2 * seed - 1,
                    params=params,
                    tags=tags,
                    curves=curves,
                    peak_memory_gib=peak,
                )
            )
    return made


def printed(store: MlflowConfig, experiment: str, format: str, *, each: bool = False) -> str:
    out = io.StringIO()
    render(collect(store.uri, Selection(experiment=experiment)), format, Console(file=out, width=200), each=each)
    return out.getvalue()


def test_groups_are_lines_of_the_table(store: MlflowConfig, repeats: list[str], experiment: str) -> None:
    text = printed(store, experiment, "table")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    # t(1) = 12.706 and s/√2 = 1: 100 ± 12.7, 150 ± 12.7.
    assert lines["gpt2-eager"][1:9] == ["2", "false", "2", "FINISHED", "100", "87.29", "to", "112.7"]
    assert lines["gpt2-ort"][1:9] == ["2", "true", "2", "FINISHED", "150", "137.3", "to", "162.7"]
    assert lines["gpt2-ort"][9] == "1.50x" and "0.75x" in lines["gpt2-ort"]
    assert "against gpt2-eager; means of repeats with 95 % intervals" in text
    assert re.search(r"backend.name +eager +gpt2-eager\n +ort +gpt2-ort", text)
    each = printed(store, experiment, "table", each=True)
    assert "gpt2-ort-seed=1" in each and "gpt2-ort-seed=1" not in text


def test_single_runs_say_that_there_is_no_interval(store: MlflowConfig, make: Make, experiment: str) -> None:
    make("a", 100.0)
    make("b", 150.0, params={"optimizer.lr": "1"})
    assert "1 run of each: no intervals" in printed(store, experiment, "table")
    make("c", 151.0, params={"optimizer.lr": "1", "seed": "1"})
    line = next(line for line in printed(store, experiment, "table").splitlines() if line.startswith("a "))
    assert "1 run" in line, "beside a group with an interval, too"


def test_json_has_both_values_of_every_ratio(store: MlflowConfig, repeats: list[str], experiment: str) -> None:
    document = json.loads(printed(store, experiment, "json"))
    base, ort = document["groups"]
    assert (base["baseline"], base["runs"], base["seeds"]) == (True, repeats[:2], ["0", "1"])
    speedup = ort["speedup"]
    assert (speedup["ratio"], speedup["value"], speedup["baseline_value"]) == (1.5, 150.0, 100.0)
    low, high = speedup["interval_95"]
    assert low < 1.5 < high and speedup["undecided"] is False
    assert (ort["memory_ratio"]["ratio"], ort["memory_ratio"]["interval_95"]) == (0.75, [0.75, 0.75])
    assert document["differences"]["backend.name"] == {"gpt2-eager": "eager", "gpt2-ort": "ort"}


def test_csv_and_markdown_have_the_groups(store: MlflowConfig, repeats: list[str], experiment: str) -> None:
    assert [line.rpartition(",")[2] for line in printed(store, experiment, "csv").splitlines()] == [
        "group",
        *["gpt2-eager"] * 2,
        *["gpt2-ort"] * 2,
    ]
    text = printed(store, experiment, "markdown")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert tables[0].startswith("| group | runs |") and any(
        line.startswith("| backend.name | eager |") for line in tables
    )


def test_page_and_picture(
    store: MlflowConfig, repeats: list[str], experiment: str, tmp_path: Path, capsys: Any
) -> None:
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    words = ["--experiment", experiment, "--html", str(page), "--png", str(picture), "--format", "json"]
    assert main(words, store.uri, "") == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["groups"]) == 2, "what is printed for programs stays theirs alone"
    assert str(page) in err and str(picture) in err
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    text = page.read_text()
    assert len(text) < 200_000 and "1.50x" in text and text.count("<table") == 3
    data = json.loads(re.search(r'id="curves">(.*?)</script>', text)[1])  # type: ignore[index]
    assert [plot["title"].split()[0] for plot in data["plots"]] == ["Throughput", "Resident", "Training"]
    assert [len(plot["curves"]) for plot in data["plots"]] == [4, 4, 4]
    curve = data["plots"][0]["curves"][0]
    assert (curve["steps"], curve["values"], curve["seconds"]) == ([1, 2], [10.0, 99.0], [0.5, 1.0])
    assert [run["group"] for run in data["runs"]] == [0, 0, 1, 1] and [run["repeat"] for run in data["runs"]] == [
        0,
        1,
    ] * 2


def test_the_pictures_figures_stand_beside_the_bars() -> None:
    """Where an interval ran through them, nobody could read them."""
    rows = []
    for number, (value, rate) in enumerate([("a", 1000.0), ("a", 1040.0), ("b", 900.0), ("b", 2100.0)]):
        made = RunRow(f"run-{value}", f"{number:032x}", "FINISHED", params={"x": value, "seed": str(number)})
        rows.append(replace(made, tokens_per_second_median=rate, peak_memory_gib=rate))
    figure = figure_of(compared(rows, rows[0].run_id, "u"), Curves([], [], 0))
    figure.canvas.draw()
    plots = [axis for axis in figure.axes if axis.texts]
    assert len(plots) == 2
    for axis in plots:
        assert [text.get_text()[:5] for text in axis.texts] in (["1,020", "1,500"], ["1020.", "1500."])
        for text in axis.texts:
            place = text.get_window_extent()
            assert axis.get_window_extent().x1 < place.x0 and place.x1 <= figure.bbox.x1


def test_the_numbers_below_a_bar_do_not_touch() -> None:
    row = RunRow("n" * 30, "0" * 32, "FINISHED", tokens_per_second_median=20_600.0, samples_per_second_median=644.0)
    figure = figure_of(compared([row], row.run_id, "u"), Curves([], [], 0))
    figure.canvas.draw()
    bars = figure.axes[0]
    places = [label.get_window_extent() for label in bars.get_xticklabels()]
    assert len(places) > 3
    for left, right in itertools.pairwise(places):
        assert right.x0 - left.x1 > 0.2 * left.width


def test_a_curve_that_never_changes_does_not_lie_on_the_pictures_edge() -> None:
    row = RunRow("a", "0" * 32, "FINISHED", peak_memory_gib=0.4567, curves=("memory/rss_gib",))
    flat = Curve("memory/rss_gib", 0, [(step, float(step), 0.45 + step / 1e5) for step in range(50)])
    figure = figure_of(compared([row], row.run_id, "u"), Curves([Drawn(row, "1 a", 0)], [flat], 0))
    (axis,) = (axis for axis in figure.axes if axis.get_visible() and axis.lines)
    low, high = axis.get_ylim()
    assert low == 0 and 0.46 < high < 0.6


def test_long_names_beside_the_bars_leave_the_curves_their_width_and_numbers_are_grouped() -> None:
    metrics = ("throughput/tokens_per_second", "train/loss")
    rows = [
        RunRow("n" * 46, f"{number:032x}", "FINISHED", tokens_per_second_median=rate, curves=metrics)
        for number, rate in enumerate((11_000.0, 12_000.0))
    ]
    drawn = [Drawn(row, f"{number} a", number) for number, row in enumerate(rows)]
    points = [(step, float(step), 10_000.0 + step) for step in range(0, 9000, 1000)]
    curves = [Curve(metric, number, points) for metric in metrics for number in range(2)]
    figure = figure_of(compared(rows, rows[0].run_id, "u"), Curves(drawn, curves, 0))
    figure.canvas.draw()
    (bars, *plots) = (axis for axis in figure.axes if axis.get_visible())
    assert len(plots) == 2
    for axis in plots:
        assert axis.get_window_extent().width > 0.4 * figure.bbox.width
    for axis in (bars.xaxis, plots[0].yaxis):
        assert "10,000" in [label.get_text() for label in axis.get_ticklabels()]


def test_runs_without_figures_take_no_room_in_the_picture() -> None:
    rows = [RunRow("base", "0" * 32, "FINISHED", tokens_per_second_median=1.0, curves=("train/loss",))]
    rows += [RunRow(f"failed-{number}", f"{number:032x}", "FAILED") for number in range(1, 30)]
    comparison = compared(rows, rows[0].run_id, "u")
    curves = read_curves(StepsOf(10), comparison, 20)  # type: ignore[arg-type]
    assert ([drawn.row.name for drawn in curves.runs], curves.left_out) == (["base"], 0)
    figure = figure_of(comparison, curves)
    (bars, _) = (axis for axis in figure.axes if axis.get_visible())
    assert [label.get_text() for label in bars.get_yticklabels()] == ["base"]
    assert figure.get_suptitle() == "30 runs, 29 of them not finished, baseline base"
    assert len(figure.legends[0].get_texts()) == 1


def test_no_file_of_the_users_is_replaced_unasked(
    store: MlflowConfig, make: Make, experiment: str, tmp_path: Path
) -> None:
    make("a", 1.0)
    kept = tmp_path / "kept.html"
    kept.write_text("mine")
    words = ["--experiment", experiment, "--html"]
    for path, message in (
        (kept, "--force"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x.html", "there is no folder"),
    ):
        with pytest.raises(RequestError, match=message):
            main([*words, str(path)], store.uri, "")
    assert kept.read_text() == "mine"
    assert main([*words, str(kept), "--force"], store.uri, "") == 0
    assert kept.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.html"]


def test_names_do_no_harm(store: MlflowConfig, make: Make, experiment: str, tmp_path: Path, capsys: Any) -> None:
    make(
        EVIL,
        1.0,
        params={"evil": EVIL},
        tags={"git_commit": EVIL},
        curves={"train/loss": [1.0, math.nan, math.inf, 2.0]},
    )
    make("_hidden", 2.0, params={"evil": "no"}, tags={"git_commit": "b"}, curves={"train/loss": [1.0]})
    page = tmp_path / "a.html"
    words = ["--experiment", experiment, "--html", str(page), "--png", str(tmp_path / "a.png")]
    assert main(words, store.uri, "") == 0
    assert "\x1b" not in capsys.readouterr().out
    text = page.read_text()
    assert "<img" not in text and "\x1b" not in text and text.count("</script>") == 3
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    data = json.loads(re.search(r'id="curves">(.*?)</script>', text)[1])  # type: ignore[index]
    assert data["plots"][0]["curves"][0]["values"] == [1.0, None, None, 2.0]
    markdown = printed(store, experiment, "markdown")
    assert (
        "<img" not in markdown and len({line.replace("\\|", "").count("|") for line in markdown.splitlines()[:4]}) == 1
    )


@pytest.mark.parametrize("format", ["table", "json", "csv", "markdown"])
def test_no_format_controls_a_terminal(store: MlflowConfig, make: Make, experiment: str, format: str) -> None:
    name = "[red]a[/red]\x1b]0;x\x07\x9b2J\u202eb\nc"
    make(name, 1.0, params={"one": name, "model.name": name}, tags={"backend": name, "git_commit": name})
    make("other", 2.0, params={"one": "x"})
    text = printed(store, experiment, format)
    assert all(line.isprintable() for line in text.split("\n"))
    shown = text.replace("\\[", "[").replace("\\]", "]")
    assert ("[red]a[/red]" in shown) and ("\\u202e" in text if format == "json" else "?]0;x??2J?b?c" in shown)


def test_a_cell_is_no_formula(store: MlflowConfig, make: Make, experiment: str) -> None:
    """Names are of whoever may write to the server; a spreadsheet would run them."""
    formulas = ["=cmd|'/c calc'!A0", "+1+cmd", "-2+3", "@SUM(A1)", "\uff1d1+1", "-baseline", "-"]
    for name in [*formulas, "plain"]:
        make(name, -1.0, params={"model.name": "-1e5"})
    rows = list(csv.DictReader(io.StringIO(printed(store, experiment, "csv"))))
    assert [row["run"] for row in rows] == [*(f"'{name}" for name in formulas[:-1]), "-", "plain"]
    assert {row["model"] for row in rows} == {"-1e5"} and {row["tokens_per_second_median"] for row in rows} == {"-1.0"}


def test_markdown_has_no_link_of_others(store: MlflowConfig, make: Make, experiment: str) -> None:
    make("[click](http://evil.example) ![x](http://evil.example/x.png)", 1.0)
    assert "\\[click\\](" in printed(store, experiment, "markdown")


def test_runs_without_metrics_make_a_page_all_the_same(
    store: MlflowConfig, make: Make, experiment: str, tmp_path: Path
) -> None:
    make("empty", status=None)
    words = ["--experiment", experiment, "--html", str(tmp_path / "a.html"), "--png", str(tmp_path / "a.png")]
    assert main(words, store.uri, "") == 0
    text = (tmp_path / "a.html").read_text()
    assert "No run has a history" in text and "RUNNING" in text


def test_tokens_and_samples_have_plots_of_their_own(
    store: MlflowConfig, make: Make, experiment: str, tmp_path: Path
) -> None:
    both = {"throughput/tokens_per_second": [1.0], "throughput/samples_per_second": [1.0]}
    make("text", 1.0, curves=both)
    make(
        "picture",
        params={"model.name": "vit"},
        curves={"throughput/samples_per_second": [1.0]},
        samples_per_second_median=5.0,
    )
    assert main(["--experiment", experiment, "--html", str(tmp_path / "a.html")], store.uri, "") == 0
    text = (tmp_path / "a.html").read_text()
    data = json.loads(re.search(r'id="curves">(.*?)</script>', text)[1])  # type: ignore[index]
    assert [(plot["title"], len(plot["curves"])) for plot in data["plots"]] == [
        ("Throughput (tokens/s)", 1),
        ("Throughput (samples/s)", 1),
    ]


def test_no_more_curves_than_asked_for(
    store: MlflowConfig, repeats: list[str], experiment: str, tmp_path: Path
) -> None:
    words = ["--experiment", experiment, "--html", str(tmp_path / "a.html"), "--curves", "2"]
    assert main(words, store.uri, "") == 0
    text = (tmp_path / "a.html").read_text()
    data = json.loads(re.search(r'id="curves">(.*?)</script>', text)[1])  # type: ignore[index]
    assert [run["label"] for run in data["runs"]] == ["1 gpt2-eager-seed=0", "2 gpt2-ort-seed=0"], "one of each group"
    assert "Not drawn: 2 runs" in text


def test_log_keeps_all_of_it_in_mlflow(
    store: MlflowConfig, repeats: list[str], experiment: str, client: Any, capsys: Any, tmp_path: Path
) -> None:
    assert main(["--experiment", experiment, "--log"], store.uri, "") == 0
    run_id = re.search(r"logged: +run ([0-9a-f]{32})", capsys.readouterr().out)[1]  # type: ignore[index]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.data.tags["ortlaunch.kind"] == "comparison"
    assert run.info.experiment_id == client.get_run(repeats[0]).info.experiment_id
    assert run.data.tags["ortlaunch.compared"] == ",".join(repeats)
    files = {Path(item.path).name: item.file_size for item in client.list_artifacts(run_id, "comparison")}
    assert set(files) == {"comparison.html", "comparison.json", "comparison.png"} and min(files.values()) > 1000
    stored = json.loads(
        Path(client.download_artifacts(run_id, "comparison/comparison.json", str(tmp_path))).read_text()
    )
    assert [group["group"] for group in stored["groups"]] == ["gpt2-eager", "gpt2-ort"]
    again = collect(store.uri, Selection(experiment=experiment, last=4))
    assert [row.run_id for row in again.rows] == repeats, "the comparison is not compared"


def test_a_log_that_cannot_be_stored_is_said(
    store: MlflowConfig, make: Make, experiment: str, client: Any, monkeypatch: Any
) -> None:
    import mlflow

    make("a", 1.0)

    def refuse(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(mlflow.MlflowClient, "log_artifacts", refuse)
    with pytest.raises(RequestError, match="could not be stored: disk full"):
        main(["--experiment", experiment, "--log"], store.uri, "")
    found = client.search_runs(
        [client.get_experiment_by_name(experiment).experiment_id], "tags.`ortlaunch.kind`='comparison'"
    )
    assert [run.info.status for run in found] == ["FAILED"]
