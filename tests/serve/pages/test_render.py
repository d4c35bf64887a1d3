"""How values are written on pages."""

from __future__ import annotations

import pytest
from markupsafe import Markup

from ortlaunch.serve.pages import render
from ortlaunch.serve.pages.render import count, duration, moment, number, plain, size, state_class

NUMBERS = [
    (None, "\N{EN DASH}"),
    (0.0, "0"),
    (2.5, "2.5"),
    (0.00123456, "0.001235"),
    (0.00012345, "1.23e-4"),
    (999.94, "999.9"),
    (12345.6, "12,346"),
    (3.2e12, "3.20e+12"),
    (-4.0, "-4"),
]
"""Values, and how the server and the page's scripts write them."""
DURATIONS = [
    (None, "\N{EN DASH}"),
    (0.4, "0 s"),
    (59.0, "59 s"),
    (61.0, "1 min 1 s"),
    (600.0, "10 min"),
    (3700.0, "1 h 1 min"),
    (90000.0, "1 d 1 h"),
]
COUNTS = [(None, "\N{EN DASH}"), (0, "0"), (999, "999"), (100_000, "100,000")]
SIZES = [(12, "12 B"), (1500, "1.5 kB"), (123456789, "123.5 MB")]


@pytest.mark.parametrize(("value", "text"), NUMBERS)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), DURATIONS)
def test_durations(value: float | None, text: str) -> None:
    assert duration(value) == text


@pytest.mark.parametrize(("value", "text"), SIZES)
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


def test_what_the_audit_says_of_a_run_is_readable_and_hides_nothing_but_secrets() -> None:
    """As one text, all that follows "keys": would count as the value of a secret."""
    detail = '{"run": "20261125-000000-00aa00", "job": null, "keys": {"model": "mlp", "train.steps": 20}}'
    shown = render._environment().from_string("{{ a | facts }}|{{ b | facts }}|{{ c | facts }}")
    texts = shown.render(a=detail, b="{}", c='{"name": "cut').split("|")
    assert texts == ["run 20261125-000000-00aa00, model mlp, train.steps 20", "", "{&#34;name&#34;: &#34;cut"]


@pytest.mark.parametrize(("value", "text"), COUNTS)
def test_counts(value: int | None, text: str) -> None:
    assert count(value) == text


def test_a_time_can_be_written_in_the_zone_of_the_reader() -> None:
    assert moment(0) == "\N{EN DASH}"
    # The folder of a run may be named so, and the list is for everybody.
    assert moment(253_402_300_800.0) == moment(1e300) == "\N{EN DASH}"
    assert moment(1_790_000_000.0) == '<time datetime="2026-09-21T14:13:20Z">2026-09-21 14:13 UTC</time>'


def test_texts_of_others_are_escaped_and_cannot_turn_the_direction() -> None:
    shown = plain("<b>one</b>\n\x1b[31mtwo\u202e")
    assert isinstance(shown, Markup)
    assert shown == "&lt;b&gt;one&lt;/b&gt;\n?[31mtwo?"


def test_every_template_escapes_what_it_shows() -> None:
    text = (
        render._environment()
        .from_string("{{ a }}|{{ b }}")
        .render(a="<i>\u202e", b="MLFLOW_TRACKING_TOKEN=abcdef123456")
    )
    assert text.startswith("&lt;i&gt;?|")
    assert "abcdef123456" not in text


def test_a_state_of_others_cannot_add_classes() -> None:
    assert state_class('x" onclick="y') == "state state-xonclicky"
