"""What a run shows."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.terminal import Display

PLAN = LaunchPlan(Path("/runs/x"), "abc123", "gpt2-[red]ort", workers=2, threads=2, command=["true"])
STEP = {
    "event": "metrics",
    "step": 3,
    "values": {
        "train/loss": 4.5,
        "throughput/tokens_per_second": 12345.6,
        "throughput/step_seconds": 0.25,
        "memory/rss_gib": 12.5,
    },
}


def shown(*, terminal: bool) -> str:
    output = io.StringIO()
    display = Display(PLAN, 10, "cpu", Console(file=output, force_terminal=terminal, width=80))
    display.start()
    display.event(STEP)
    display.event({"event": "tags", "values": {}})
    display.line("printed by the model [bold]as it is[/bold]")
    display.event({"event": "metrics", "step": 10, "values": {"summary/tokens_per_second_median": 12000.0}})
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
    assert "3/10" in text


def test_names_and_lines_are_shown_as_they_are() -> None:
    text = shown(terminal=False)
    assert "gpt2-[red]ort" in text
    assert "printed by the model [bold]as it is[/bold]\n" in text


def test_the_end_has_the_figures_and_the_places() -> None:
    text = shown(terminal=False)
    assert "finished after 12.3 s: last loss 4.5000, 12,000.0 tokens/s (median)" in text
    assert "run folder: /runs/x" in text
