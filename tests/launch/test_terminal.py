"""What a run shows."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.launch.local.display import Display, describe_account
from ortlaunch.launch.plan import LaunchPlan, NodePart, Start
from ortlaunch.run.events import Event, Measured, Tagged
from ortlaunch.run.goodput import Goodput
from ortlaunch.run.state import FIRST_STEP

CONFIG = to_config(compose(["device=cpu", "train.steps=10"]))
PLAN = LaunchPlan(CONFIG, Path("/runs/x"), "abc123", "gpt2-[red]ort", workers=2)
PART = NodePart(PLAN, rank=0, threads=2, start=Start(["true"]))
STEP = Measured(
    0,
    3,
    {
        "train/loss": 4.5,
        "throughput/tokens_per_second": 12345.6,
        "throughput/step_seconds": 0.25,
        "memory/rss_gib": 12.5,
    },
)


FIRST = Measured(0, 1, {FIRST_STEP: 2.0})


def plain(text: str) -> str:
    """What a terminal was sent, without colours and moves."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def shown(*, terminal: bool) -> str:
    output = io.StringIO()
    display = Display(PART, Console(file=output, force_terminal=terminal, width=80))
    display.start()
    display.event(STEP)
    display.event(Tagged(0, {}))
    display.line("printed by the model [bold]as it is[/bold]")
    display.event(Measured(0, 10, {"summary/tokens_per_second_median": 12000.0}))
    display.stop()
    display.summary("finished", 12.34, [("run folder", "/runs/x")])
    return output.getvalue()


def test_elsewhere_than_on_a_terminal_each_log_step_is_a_plain_line() -> None:
    text = shown(terminal=False)
    assert "step 3/10  loss 4.5000  12,346 tokens/s  0.250 s/step  12.50 GiB\n" in text
    assert "\x1b" not in text


def test_a_terminal_shows_a_progress_bar() -> None:
    text = shown(terminal=True)
    assert "\x1b" in text
    assert "step 3/10  loss 4.5000  12,346 tokens/s  0.250 s/step  12.50 GiB" in plain(text)


@pytest.mark.parametrize(
    ("logged", "health", "shown"),
    [
        ([FIRST, STEP], '{"step": 7}', "step 7/10  loss 4.5000"),
        # It is written every other second, and the journal at once.
        ([FIRST, STEP], '{"step": 2}', "step 3/10  loss 4.5000"),
        ([FIRST, STEP], '{"st', "step 3/10  loss 4.5000"),
        ([FIRST, STEP], None, "step 3/10  loss 4.5000"),
        # An earlier attempt's.
        ([], '{"step": 7}', "step 0/10  starting"),
    ],
)
def test_between_two_log_steps_the_bar_moves_by_the_workers_sign_of_life(
    tmp_path: Path, logged: list[Event], health: str | None, shown: str
) -> None:
    output = io.StringIO()
    part = dataclasses.replace(PART, plan=dataclasses.replace(PLAN, run_dir=tmp_path))
    display = Display(part, Console(file=output, force_terminal=True, width=80))
    if health is not None:
        (tmp_path / "health").mkdir()
        (tmp_path / "health" / "rank-0.json").write_text(health)
    display.start()
    for event in logged:
        display.event(event)
    display.look()
    display.stop()
    assert plain(output.getvalue()).strip().splitlines()[-1].rpartition("\r")[2].startswith(shown)


def test_the_line_fits_a_terminal_of_80_columns() -> None:
    lines = [line.strip() for line in re.split(r"[\r\n]+", plain(shown(terminal=True)))]
    (line,) = {line for line in lines if line.startswith("step 3/10")}
    assert re.search(r"12\.50 GiB \S+ -:--:--$", line) and len(line) <= 80


def test_names_and_lines_are_shown_as_they_are() -> None:
    text = shown(terminal=False)
    assert "gpt2-[red]ort" in text
    assert "printed by the model [bold]as it is[/bold]\n" in text


def test_the_end_has_the_figures_and_the_places() -> None:
    text = shown(terminal=False)
    assert "finished after 12.3 s: last loss 4.5000, 12,000.0 tokens/s (median)" in text
    assert "run folder: /runs/x" in text


@pytest.mark.parametrize(
    ("account", "shown"),
    [
        # Of a short run start-up is most, and that is no news.
        (Goodput(60, 10, 48, 0, 0, 0, 0), ""),
        (Goodput(6000, 5700, 48, 0, 0, 0, 0), ""),
        (
            Goodput(6000, 3000, 1000, 500, 0.2, 0, 1400),
            "goodput:    50 % of 6,000 s went into steps that count (down 1,400 s, start-up 1,000 s, evaluation 500 s)",
        ),
        # It died: that is said whatever it took.
        (Goodput(60, 30, 20, 0, 0, 6, 4), "steps taken again 6 s, down 4 s"),
    ],
)
def test_what_kept_a_run_from_training_is_said_where_it_matters(account: Goodput, shown: str) -> None:
    text = describe_account(account)
    assert shown in text
    assert bool(text) == bool(shown)
