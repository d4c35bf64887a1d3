"""Draws a comparison as a picture: bars of throughput and memory with their intervals, and the curves by step."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ortlaunch.base.text import counted, public_text
from ortlaunch.compare import figures
from ortlaunch.compare.comparison import Comparison
from ortlaunch.compare.curves import TITLES, Curves
from ortlaunch.compare.groups import Group
from ortlaunch.compare.runs import MEMORY, RATES

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

_BARS = 20
_LEGEND = 20
_NAME = 48
_BAR_TITLES = {RATES[0]: "Tokens/s", RATES[1]: "Samples/s", MEMORY: "Peak memory (GiB)"}
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")


def as_png(comparison: Comparison, curves: Curves) -> bytes:
    """Returns the picture as a PNG file."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box, and the warning about it is suppressed.
        warnings.simplefilter("ignore")
        figure_of(comparison, curves).savefig(file, format="png")
    return file.getvalue()


def figure_of(comparison: Comparison, curves: Curves) -> Figure:
    """Returns the picture as a matplotlib figure."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = _with_bars(comparison)[:_BARS]
    bars = [metric for metric in _BAR_TITLES if any(group.mean(metric) is not None for _, group in groups)]
    colours = _colours(len(comparison.groups))
    bar_height = max(3.2, 0.32 * len(groups) + 1.2)
    # Each in a part of its own: beside the long names of the bars the curves would be narrow.
    parts: list[tuple[float, list[str], Callable[[Any, str], None]]] = [
        (bar_height, bars, lambda axis, metric: _draw_bars(axis, metric, groups, colours)),
        (3.6, list(curves.metrics), lambda axis, metric: _draw_curves(axis, metric, curves, colours)),
    ]
    shown = [(height * ((len(metrics) + 1) // 2), metrics, draw) for height, metrics, draw in parts if metrics]
    heights = [height for height, _, _ in shown] or [1.0]
    legend = min(len(curves.runs), _LEGEND) * 0.2
    figure = Figure(figsize=(13, sum(heights) + legend + 0.6), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    figure.suptitle(_title(comparison), parse_math=False, fontsize=12)
    places = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat
    for place, (_, metrics, draw) in zip(places, shown, strict=False):
        for axis, metric in zip(_panels(place, len(metrics)), metrics, strict=True):
            draw(axis, metric)
    _legend(figure, curves, colours)
    return figure


def _panels(part: SubFigure, count: int) -> list[Any]:
    """Returns so many axes, in two columns."""
    axes: list[Any] = list(part.subplots((count + 1) // 2, 2, squeeze=False).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return axes[:count]


def _with_bars(comparison: Comparison) -> list[tuple[int, Group]]:
    """Returns the groups with values to show and their indices, the baseline first."""
    numbered = enumerate(comparison.groups)
    shown = [(number, group) for number, group in numbered if any(group.mean(metric) for metric in _BAR_TITLES)]
    return sorted(shown, key=lambda pair: not pair[1].is_baseline)


def _title(comparison: Comparison) -> str:
    count = len(comparison.rows)
    parts = [counted(count, "run")]
    if unfinished := sum(row.status != "FINISHED" for row in comparison.rows):
        parts.append(f"{unfinished} of them not finished")
    parts.append(f"baseline {_short(comparison.baseline.label)}")
    if (bars := len(_with_bars(comparison))) > _BARS:
        parts.append(f"{_BARS} of {bars} groups as bars")
    notes = ["", "bars are means, with 95 % intervals", "dots are runs"] if comparison.has_repeats else []
    if comparison.has_undecided:
        notes.append(f"{figures.UNDECIDED} no difference is shown")
    return ", ".join(parts) + "; ".join(notes)


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["tab10"](number % 10) for number in range(count)]


def _draw_bars(axis: Any, metric: str, groups: list[tuple[int, Group]], colours: list[Any]) -> None:
    shown = [(number, group) for number, group in groups if group.mean(metric) is not None]
    for place, (number, group) in enumerate(shown):
        mean = group.mean(metric)
        assert mean is not None
        half = None if mean.interval is None else mean.interval[1] - mean.mean
        axis.barh(place, mean.mean, color=colours[number], alpha=0.75, xerr=half, capsize=4, height=0.7)
        values = [value for row in group.rows if (value := row.figure(metric)) is not None]
        if len(values) > 1:
            axis.plot(values, [place] * len(values), "o", color="black", markersize=3.5)
        # The text is to the right of the plot, where it covers no bar, interval or dot.
        axis.annotate(
            _bar_text(group, metric),
            (1, place),
            xycoords=axis.get_yaxis_transform(),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            parse_math=False,
        )
    axis.set_yticks(range(len(shown)))
    axis.set_yticklabels([_short(group.label) for _, group in shown], parse_math=False, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    # More numbers of six digits would touch each other.
    axis.locator_params(axis="x", nbins=5)
    axis.xaxis.set_major_formatter(_tick)
    axis.set_title(_BAR_TITLES[metric], fontsize=10)
    axis.grid(axis="x", alpha=0.3)


def _bar_text(group: Group, metric: str) -> str:
    ratio = group.memory if metric == MEMORY else group.speedup
    value = (figures.gib if metric == MEMORY else figures.rate)(group.value(metric))
    if group.is_baseline or ratio is None or ratio.metric != metric:
        return value
    return f"{value}  ({figures.ratio(ratio)})"


def _draw_curves(axis: Any, metric: str, curves: Curves, colours: list[Any]) -> None:
    for curve in curves.of(metric):
        drawn = curves.runs[curve.run]
        steps = [step for step, _, _ in curve.points]
        values = [float("nan") if value is None else value for _, _, value in curve.points]
        style = _DASHES[_repeat(curves, curve.run) % len(_DASHES)]
        # A point between two gaps has no line, so it gets a marker.
        alone = "o" if len(values) < 3 or any(value is None for _, _, value in curve.points) else None
        axis.plot(steps, values, style, color=colours[drawn.group], linewidth=1.3, marker=alone, markersize=3)
    axis.set_title(TITLES[metric], fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    for direction in (axis.xaxis, axis.yaxis):
        direction.set_major_formatter(_tick)
    axis.margins(y=0.1)
    if metric != "train/loss":
        # Some space above keeps nearly constant values, such as memory, off the edge.
        axis.set_ylim(0, axis.get_ylim()[1] * 1.05)
    axis.grid(alpha=0.3)


def _tick(value: float, _place: int | None = None) -> str:
    """A number on an axis, grouped like those beside the bars."""
    return f"{value:,.10g}"


def _repeat(curves: Curves, run: int) -> int:
    """Returns how many runs of the same group are drawn before this one."""
    group = curves.runs[run].group
    return sum(1 for drawn in curves.runs[:run] if drawn.group == group)


def _legend(figure: Any, curves: Curves, colours: list[Any]) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=colours[drawn.group], linestyle=_DASHES[_repeat(curves, number) % len(_DASHES)])
        for number, drawn in enumerate(curves.runs[:_LEGEND])
    ]
    if not lines:
        return
    names = [_short(drawn.label) for drawn in curves.runs[:_LEGEND]]
    more = len(curves.runs) - _LEGEND
    title = None if more <= 0 else f"and {more} more"
    legend = figure.legend(lines, names, loc="outside lower center", ncols=2, fontsize=8, frameon=False, title=title)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _short(name: str) -> str:
    shown = public_text(name)
    return shown if len(shown) <= _NAME else shown[: _NAME - 1] + "…"
