"""Run folders of others whose names, ids, hosts and logs hold terminal escapes: what the verbs print of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ortlaunch.run.journal import Journal
from tests.support.cli import answer

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\nstate: finished"


@pytest.fixture
def hostile(make_run, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    """A run whose every text is hostile, in a folder that is hostile too."""
    run_dir: Path = make_run(f"name{ESCAPE}", run_id=f"id{ESCAPE}", experiment=f"experiment{ESCAPE}", end=None)
    settings = {"experiment": ESCAPE, "name": ESCAPE, "train": {"steps": 100}, "tracking": {"name": "mlflow"}}
    settings["tracking"]["uri"] = f"sqlite:///{tmp_path}/x.db"  # type: ignore[index]
    (run_dir / "config.yaml").write_text(json.dumps(settings))
    (run_dir / "launcher.json").write_text(json.dumps({"pid": 2**22 - 1, "host": f"host{ESCAPE}", "start_ticks": 1}))
    (run_dir / "checkpoints" / f"step-{ESCAPE}").mkdir(parents=True)
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.rewind(1, f"reason{ESCAPE}")
        journal.tags({"ortlaunch.requeue_reason": f"why{ESCAPE}", "ortlaunch.state": f"state{ESCAPE}"})
        journal.failure(0, f"host{ESCAPE}", f"Traceback\nError: failure{ESCAPE}")
        journal.end("FAILED")
    (run_dir / "logs" / "rank-0.log").write_text(f"worker{ESCAPE}\n")
    (run_dir / "relay.json").write_text(json.dumps({"mlflow_run_id": f"mlflow{ESCAPE}"}))
    moved = run_dir.with_name(f"20260101-000000-x\x1b[2J\x9b\n-{run_dir.name[-6:]}")
    run_dir.rename(moved)
    # Folders of such names are not listed, others are.
    other: Path = make_run("listed", end=None)
    with Journal(other / "journal.jsonl") as journal:
        journal.start(f"experiment{ESCAPE}", f"listed{ESCAPE}", f"id{ESCAPE}")
    (other / "job.json").write_text(json.dumps({"scheduler": f"slurm{ESCAPE}", "job_id": f"12{ESCAPE}"}))
    return moved


def lines_of(capfd: pytest.CaptureFixture[str], *words: str) -> list[str]:
    said = answer(Path.cwd(), capfd, *words)
    lines = (said.stdout + said.stderr).splitlines()
    assert lines
    for line in (said.stdout + said.stderr).split("\n"):
        assert line.replace("\t", "").isprintable(), (words, line)
    return lines


@pytest.mark.parametrize(
    "words",
    [
        ("status", "RUN"),
        ("status", "RUN", "--json"),
        ("logs", "RUN"),
        ("logs", "RUN", "-f"),
        ("logs", "RUN", "--log", "steps"),
        ("logs", "RUN", "--rank", "7"),
        ("logs", "RUN", "--log", "torchrun"),
        ("jobs", "--root", "ROOT"),
        ("jobs", "--root", "ROOT", "--json"),
        ("cancel", "RUN"),
        ("resume", "RUN"),
        ("resume", "RUN", "train.steps=x"),
        ("sync", "RUN"),
        ("sync", "--all", "ROOT"),
        ("model=mlp", "+after=RUN"),
        ("compare", "RUN"),
        ("export", "weights", "RUN"),
        ("status", f"absent{ESCAPE}"),
        ("jobs", "--experiment", "x"),
    ],
    ids=lambda words: "-".join(words)[:30].replace("\x1b", ""),
)
def test_no_escape_reaches_the_terminal(words, hostile, capfd) -> None:  # type: ignore[no-untyped-def]
    given = [word.replace("RUN", str(hostile)).replace("ROOT", str(hostile.parents[1])) for word in words]
    lines = lines_of(capfd, *given)
    if words[0] == "jobs" and "--root" in words:
        assert any("listed?]0;owned" in line or "listed\\u001b]0;owned" in line for line in lines), lines
    if words[0] == "status":
        # A line break in a name makes no line that looks like one of the verb's own.
        assert len([line for line in lines if line.startswith("state:")]) <= 1


def test_the_rest_of_a_line_stays_readable(hostile: Path, capfd) -> None:  # type: ignore[no-untyped-def]
    text = "\n".join(lines_of(capfd, "logs", str(hostile), "--log", "steps"))
    assert "rewind 1  reason?]0;owned??[2J?31m?evil?state: finished" in text
    assert lines_of(capfd, "logs", str(hostile)) == ["worker?]0;owned??[2J?31m?evil", "state: finished"]
