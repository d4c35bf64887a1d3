"""Tables and the page that a comparison leaves; names in them do no harm."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ortlaunch.base.errors import RequestError
from ortlaunch.compare.command import main
from ortlaunch.compare.comparison import compared
from ortlaunch.compare.table import render
from ortlaunch.config.schema import MlflowConfig
from tests.compare.conftest import collected

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


def data_of(page: Path) -> Any:
    """What the page's script draws."""
    return json.loads(re.search(r'id="curves">(.*?)</script>', page.read_text())[1])  # type: ignore[index]


def printed(store: MlflowConfig, experiment: str, format: str, *, each: bool = False) -> str:
    out, found = io.StringIO(), collected(store, experiment=experiment)
    shown = compared(found.rows, found.baseline_id, found.uri, found.notes, found.why, each=each)
    render(shown, format, Console(file=out, width=200))
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


def test_markdown_has_the_groups(store: MlflowConfig, repeats: list[str], experiment: str) -> None:
    tables = [line for line in printed(store, experiment, "markdown").splitlines() if line.startswith("|")]
    assert tables[0].startswith("| group | runs |")
    assert any(line.startswith("| backend.name | eager |") for line in tables)


def test_page(store: MlflowConfig, repeats: list[str], experiment: str, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "a.html"
    assert main(["--experiment", experiment, "--html", str(page), "--format", "json"], store.uri, "") == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["groups"]) == 2, "what is printed for programs stays theirs alone"
    assert str(page) in err
    text = page.read_text()
    assert len(text) < 200_000 and "1.50x" in text and text.count("<table") == 3
    data = data_of(page)
    assert [plot["title"].split()[0] for plot in data["plots"]] == ["Throughput", "Resident", "Training"]
    assert [len(plot["curves"]) for plot in data["plots"]] == [4, 4, 4]
    curve = data["plots"][0]["curves"][0]
    assert (curve["steps"], curve["values"], curve["seconds"]) == ([1, 2], [10.0, 99.0], [0.5, 1.0])
    assert [run["group"] for run in data["runs"]] == [0, 0, 1, 1]
    assert [run["repeat"] for run in data["runs"]] == [0, 1] * 2


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
    assert main(["--experiment", experiment, "--html", str(page)], store.uri, "") == 0
    assert "\x1b" not in capsys.readouterr().out
    text = page.read_text()
    assert "<img" not in text and "\x1b" not in text and text.count("</script>") == 3
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert data_of(page)["plots"][0]["curves"][0]["values"] == [1.0, None, None, 2.0]
    markdown = printed(store, experiment, "markdown")
    assert (
        "<img" not in markdown and len({line.replace("\\|", "").count("|") for line in markdown.splitlines()[:4]}) == 1
    )


@pytest.mark.parametrize("format", ["table", "json", "markdown"])
def test_no_format_controls_a_terminal(store: MlflowConfig, make: Make, experiment: str, format: str) -> None:
    name = "[red]a[/red]\x1b]0;x\x07\x9b2J\u202eb\nc"
    make(name, 1.0, params={"one": name, "model.name": name}, tags={"backend": name, "git_commit": name})
    make("other", 2.0, params={"one": "x"})
    text = printed(store, experiment, format)
    assert all(line.isprintable() for line in text.split("\n"))
    shown = text.replace("\\[", "[").replace("\\]", "]")
    assert ("[red]a[/red]" in shown) and ("\\u202e" in text if format == "json" else "?]0;x??2J?b?c" in shown)


def test_markdown_has_no_link_of_others(store: MlflowConfig, make: Make, experiment: str) -> None:
    make("[click](http://evil.example) ![x](http://evil.example/x.png)", 1.0)
    assert "\\[click\\](" in printed(store, experiment, "markdown")


def test_runs_without_metrics_make_a_page_all_the_same(
    store: MlflowConfig, make: Make, experiment: str, tmp_path: Path
) -> None:
    make("empty", status=None)
    assert main(["--experiment", experiment, "--html", str(tmp_path / "a.html")], store.uri, "") == 0
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
    assert [(plot["title"], len(plot["curves"])) for plot in data_of(tmp_path / "a.html")["plots"]] == [
        ("Throughput (tokens/s)", 1),
        ("Throughput (samples/s)", 1),
    ]


def test_no_more_curves_than_asked_for(
    store: MlflowConfig, repeats: list[str], experiment: str, tmp_path: Path
) -> None:
    words = ["--experiment", experiment, "--html", str(tmp_path / "a.html"), "--curves", "2"]
    assert main(words, store.uri, "") == 0
    labels = [run["label"] for run in data_of(tmp_path / "a.html")["runs"]]
    assert labels == ["1 gpt2-eager-seed=0", "2 gpt2-ort-seed=0"], "one of each group"
    assert "Not drawn: 2 of the runs" in (tmp_path / "a.html").read_text()
