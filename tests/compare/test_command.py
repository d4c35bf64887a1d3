"""`ortlaunch compare` shows what MLflow knows, and nothing that it does not know."""

from __future__ import annotations

import io
import json
import math
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ortlaunch.base.errors import RequestError
from ortlaunch.compare.command import main
from ortlaunch.compare.comparison import compared
from ortlaunch.compare.runs import MEMORY, RunRow
from ortlaunch.compare.table import render
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.run.journal import Journal
from ortlaunch.tracking.relay import sync
from tests.compare.conftest import collected

EXPERIMENT = "bench"
UNFINISHED = {"fell": "FAILED", "image": "KILLED", "bare": "RUNNING"}


@pytest.fixture(scope="session")
def runs(store: MlflowConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Five runs of one experiment, oldest first, as MLflow run ids by name."""
    root = tmp_path_factory.mktemp("runs")

    def send(name: str, run_id: str, tags: dict[str, str], summary: dict[str, float], **rest: Any) -> str:
        run_dir = root / f"20260101-{name}-{run_id}"
        run_dir.mkdir()
        journal = Journal(run_dir / "journal.jsonl")
        journal.start(EXPERIMENT, name, run_id)
        journal.params(rest.get("params", {"model": {"name": "gpt2"}}))
        journal.tags({f"ortlaunch.{key}": value for key, value in tags.items()})
        journal.metrics(10, {f"summary/{key}": value for key, value in summary.items()})
        for step, loss in rest.get("losses", []):
            journal.metrics(step, {"train/loss": loss})
        if status := rest.get("status"):
            journal.end(status)
        result = sync(run_dir, store)
        time.sleep(0.005)
        assert result.mlflow_run_id is not None
        return result.mlflow_run_id

    eager = {"backend": "eager", "ort_active": "false", "trainer": "ddp", "world_size": "2"}
    ort = {"backend": "ort", "ort_active": "true", "trainer": "deepspeed", "world_size": "2"}
    zero = {"model": {"name": "gpt2"}, "trainer": {"zero_stage": 1}}
    vit = {"model": {"name": "vit"}}
    full = {"step_seconds_p50": 0.25, "step_seconds_p95": 1.5, "peak_memory_gib": 3.25}
    rate = {"tokens_per_second_median": 1200.0, "samples_per_second_median": 10.0}
    return {
        "base": send("base", "b1", eager, {**rate, **full}, losses=[(1, 9.0), (5, 2.34567)], status="FINISHED"),
        "fast": send("fast", "f1", ort, {"tokens_per_second_median": 1500.0}, params=zero, status="FINISHED"),
        "fell": send("fell", "f2", {**ort, "ort_active": "false"}, {"tokens_per_second_median": 0.0}, status="FAILED"),
        "image": send("image", "i1", eager, {"samples_per_second_median": 25.0}, params=vit, status="KILLED"),
        "bare": send("bare", "c1", {"ort_active": "partly"}, {}, params={"x": 1}),
    }


def as_json(store: MlflowConfig, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main([*args, "--format", "json"], store.uri, EXPERIMENT) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_json_has_the_figures_of_every_run(store: MlflowConfig, runs: dict[str, str], capsys: Any) -> None:
    document = as_json(store, capsys)
    rows = {row["run"]: row for row in document["runs"]}
    assert list(rows) == ["base", "fast", "fell", "image", "bare"], "the oldest run comes first"
    assert {name: row["run_id"] for name, row in rows.items()} == runs
    assert rows["base"] == {
        "run": "base",
        "run_id": runs["base"],
        "model": "gpt2",
        "backend": "eager",
        "ort_active": False,
        "trainer": "ddp",
        "world_size": 2,
        "status": "FINISHED",
        "tokens_per_second_median": 1200.0,
        "samples_per_second_median": 10.0,
        "speedup": 1.0,
        "speedup_metric": "tokens_per_second_median",
        "speedup_value": 1200.0,
        "speedup_baseline_value": 1200.0,
        "step_seconds_p50": 0.25,
        "step_seconds_p95": 1.5,
        "peak_memory_gib": 3.25,
        "memory_ratio": 1.0,
        "memory_baseline_value": 3.25,
        "last_loss": 2.34567,
        "steady_windows": None,
        "ort_suspect": False,
        "figures": {},
    }
    fast, fell, image, bare = rows["fast"], rows["fell"], rows["image"], rows["bare"]
    assert (fast["speedup"], fast["speedup_value"], fast["speedup_baseline_value"]) == (1.25, 1500.0, 1200.0)
    assert (fast["trainer"], fast["ort_active"], fast["ort_suspect"]) == ("deepspeed z1", True, False)
    assert (fell["speedup"], fell["tokens_per_second_median"], fell["status"]) == (0.0, 0.0, "FAILED")
    assert (image["speedup"], image["speedup_metric"]) == (2.5, "samples_per_second_median")
    assert bare["status"] == "RUNNING"
    known = ("run", "run_id", "status", "ort_suspect", "figures")
    assert all(value is None for key, value in bare.items() if key not in known), "what is missing is null, never 0"


def test_warnings_name_what_to_beware_of(store: MlflowConfig, runs: dict[str, str], capsys: Any) -> None:
    document = as_json(store, capsys)
    assert [row["run"] for row in document["runs"] if row["ort_suspect"]] == ["fell"]
    assert len(document["warnings"]) == 3
    assert "fell" in document["warnings"][0] and "ort_active=false" in document["warnings"][0]
    assert "vit" in document["warnings"][1]
    assert all(f"({runs[name][:8]}) {status}" in document["warnings"][2] for name, status in UNFINISHED.items())
    assert "no throughput" in as_json(store, capsys, "bare", "fast")["warnings"][0]


def test_baseline_is_the_run_that_is_asked_for(store: MlflowConfig, runs: dict[str, str], capsys: Any) -> None:
    document = as_json(store, capsys, "fast", "--baseline", "base")
    assert [(row["run"], row["speedup"]) for row in document["runs"]] == [("base", 1.0), ("fast", 1.25)]
    document = as_json(store, capsys, "base", "fast", "--baseline", "fast")
    assert [(row["run"], row["speedup"]) for row in document["runs"]] == [("base", 0.8), ("fast", 1.0)]
    assert document["baseline"] == runs["fast"]
    document = as_json(store, capsys, "--baseline", "fell")
    assert [row["speedup"] for row in document["runs"]] == [None] * 5, "no speed-up over nothing"


def test_table_fits_120_columns_and_marks_suspects(store: MlflowConfig, runs: dict[str, str]) -> None:
    comparison = collected(store, experiment=EXPERIMENT)
    for terminal in (False, True):
        out = io.StringIO()
        render(comparison, "table", Console(file=out, force_terminal=terminal, width=120, color_system=None))
        lines = out.getvalue().splitlines()
        rule = next(number for number, line in enumerate(lines) if "──" in line)
        assert all(len(line.rstrip()) <= 120 for line in lines[: rule + 6])
        cells = {line.split()[0]: line.split() for line in lines[rule + 1 : rule + 6]}
        eight = {name: run_id[:8] for name, run_id in runs.items()}
        head = ["base", eight["base"], "gpt2", "eager", "false", "ddp", "2", "FINISHED", "1,200", "10"]
        assert cells["base"] == [*head, "1.00x", "250.0", "1,500", "3.25", "1.00x", "2.346"]
        head = ["fast", eight["fast"], "gpt2", "ort", "true", "deepspeed", "z1", "2", "FINISHED", "1,500", "-"]
        assert cells["fast"] == [*head, "1.25x", *["-"] * 5]
        assert cells["fell"][:2] == ["fell", "!"] and cells["fell"][8:] == ["FAILED", "0", "-", "0.00x", *["-"] * 5]
        assert cells["image"][7:] == ["KILLED", "-", "25", "2.50x", *["-"] * 5]
        assert cells["bare"][2:] == [*["-"] * 5, "RUNNING", *["-"] * 8]
        assert lines[rule + 1].index("1,200") == lines[rule + 2].index("1,500"), "numbers are right-aligned"
        assert any(line.startswith("! fell") for line in lines[rule + 6 :])


def test_no_terminal_means_no_colour_and_nothing_cut() -> None:
    name = "a-very-long-run-name-" * 12
    rows = [
        RunRow(name, "0" * 32, "FINISHED", {"model.name": "m" * 90}),
        RunRow("evil\x1b[31m\n|name", "1" * 32, "FINISHED"),
    ]
    comparison = compared(rows, "0" * 32, "http://h")
    out = io.StringIO()
    render(comparison, "table", Console(file=out, width=80))
    text = out.getvalue()
    assert name in text and "m" * 90 in text and "…" not in text and "\x1b" not in text
    table = text.partition("speed-up and")[0]
    assert sum(name in line for line in table.splitlines()) == 1
    narrow = io.StringIO()
    render(comparison, "table", Console(file=narrow, width=80, force_terminal=True, color_system=None))
    assert "…" not in narrow.getvalue()
    out = io.StringIO()
    render(comparison, "markdown", Console(file=out, width=80))
    assert "evil?\\[31m?\\|name" in out.getvalue()


def test_markdown(store: MlflowConfig, runs: dict[str, str], capsys: Any) -> None:
    assert main(["--format", "markdown"], store.uri, EXPERIMENT) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| run | id | model |") and "| p50 ms |" in lines[0]
    assert set(lines[1]) <= set("| -:")
    assert len({line.count("|") for line in lines[:7]}) == 1
    assert lines[3].endswith("| 1,500 | - | 1.25x | - | - | - | - | - |")
    assert any("fell" in line and "backend=ort" in line for line in lines[7:])


def test_infinite_and_nan_stay_readable() -> None:
    rows = [RunRow("r", "0" * 32, "FINISHED", metrics={"train/loss": math.nan, MEMORY: math.inf})]
    out = io.StringIO()
    render(compared(rows, "0" * 32, "u"), "json", Console(file=out))
    row = json.loads(out.getvalue())["runs"][0]
    assert (row["last_loss"], row["peak_memory_gib"]) == ("nan", "inf")


def test_runs_are_found_by_any_of_their_names(store: MlflowConfig, runs: dict[str, str], capsys: Any) -> None:
    fast = runs["fast"]
    # Of more characters than the short ids here, which are a surer reading.
    prefix = next(fast[:n] for n in range(3, 33) if sum(other.startswith(fast[:n]) for other in runs.values()) == 1)
    for asked in (fast, fast[:12], prefix, "f1", "fast"):
        assert [row["run_id"] for row in as_json(store, capsys, "--experiment", EXPERIMENT, asked)["runs"]] == [fast]
    assert [row["run"] for row in as_json(store, capsys, "fast", "base")["runs"]] == ["fast", "base"], "in their order"
    assert [row["run"] for row in as_json(store, capsys, "--last", "2")["runs"]] == ["image", "bare"]


def test_a_run_folder_is_read_from_its_journal(store: MlflowConfig, tmp_path: Path, capsys: Any) -> None:
    run_dir = tmp_path / "20260101-folder-d1"
    run_dir.mkdir()
    Journal(run_dir / "journal.jsonl").start("folders", "folder", "d1")
    assert [row["run_id"] for row in as_json(store, capsys, str(run_dir))["runs"]] == ["d1"]
    run_id = sync(run_dir, store).mlflow_run_id
    assert [row["run_id"] for row in as_json(store, capsys, str(run_dir))["runs"]] == [run_id]
    (run_dir / "journal.jsonl").write_text("")
    with pytest.raises(RequestError, match=f"{run_dir}: no run has begun in its journal"):
        main([str(run_dir)], store.uri, EXPERIMENT)


def test_requests_that_cannot_work(store: MlflowConfig, runs: dict[str, str], tmp_path: Path) -> None:
    for number in range(2):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        Journal(run_dir / "journal.jsonl").start("twins", "twin", f"t{number}")
        sync(run_dir, store)
    with pytest.raises(RequestError, match="means 2 runs"):
        main(["twin"], store.uri, EXPERIMENT)
    for unknown in ("nobody", "ffffffffffffffffffffffffffffffff", "it's", "both ' and \"", ""):
        with pytest.raises(RequestError, match="there is no run"):
            main([unknown], store.uri, EXPERIMENT)
    with pytest.raises(RequestError, match=rf"no experiment 'nothing'.*{EXPERIMENT}"):
        main(["--experiment", "nothing"], store.uri, EXPERIMENT)
    with pytest.raises(RequestError, match="no runs in the experiment 'Default'"):
        main([], store.uri, "Default")
    with pytest.raises(RequestError, match="file store"):
        main(["--uri", "mlruns"], store.uri, EXPERIMENT)
    with pytest.raises(RequestError, match=r"cannot read the MLflow store http://u:\*\*\*@127.0.0.1:9") as raised:
        main(["--uri", "http://u:geheim@127.0.0.1:9"], store.uri, EXPERIMENT)
    assert "geheim" not in str(raised.value)
    assert str(raised.value).endswith(": Connection refused (another store: --uri, or MLFLOW_TRACKING_URI)")


def test_missing_and_foreign_databases_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="no MLflow store at"):
        main([], "sqlite:///sub/missing.db", EXPERIMENT)
    assert list(tmp_path.iterdir()) == []
    Path("empty.db").touch()
    Path("text.db").write_text("no database " * 100)
    with sqlite3.connect("other.db") as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in before:
        with pytest.raises(RequestError, match="is no MLflow store"):
            main(["--uri", f"sqlite:///{name}"], "", EXPERIMENT)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_command_prints_nothing_but_the_comparison(store: MlflowConfig, runs: dict[str, str], tmp_path: Path) -> None:
    code = "import sys; from ortlaunch.compare.command import main; sys.exit(main(sys.argv[1:], '', 'bench'))"
    command = [sys.executable, "-c", code, "--uri", store.uri, "--format", "json"]
    paths = {"PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=paths)
    assert done.returncode == 0 and done.stderr == "" and len(json.loads(done.stdout)["runs"]) == 5
    assert list(tmp_path.iterdir()) == [], "neither telemetry nor a default database"


def test_bad_options_end_with_code_2(store: MlflowConfig, capsys: Any) -> None:
    for args in (["--last", "0"], ["--format", "xml"], ["--what"]):
        with pytest.raises(RequestError, match=f"^compare: .*{args[0]}"):
            main(args, store.uri, EXPERIMENT)
