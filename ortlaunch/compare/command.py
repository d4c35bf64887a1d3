"""The command `ortlaunch compare`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.arguments import Parser, positive
from ortlaunch.base.secrets import redacted
from ortlaunch.base.text import say
from ortlaunch.compare.choose import LAST, Selection, choose
from ortlaunch.compare.comparison import Comparison, compared
from ortlaunch.compare.curves import LIMIT, Curves, read_curves
from ortlaunch.compare.outputs import check_free, write
from ortlaunch.compare.reading import opened
from ortlaunch.config.schema import Config, MlflowConfig
from ortlaunch.config.tracking_uri import check_uri, default_uri, resolve_tracking

if TYPE_CHECKING:
    from mlflow import MlflowClient

FORMATS = ("table", "json", "csv", "markdown")
_BASELINE_HELP = (
    "the run that ratios refer to (default: the first that is named or of the sweep; else the oldest eager run of the "
    "newest run's model that finished)"
)
_EPILOG = """\
Runs of the same configuration that differ in the seed are repeats: one line shows them, with a 95 % interval. How each
figure is computed and what the warnings mean: docs/compare.md. Exit codes: 0 done, 2 the request is wrong."""


def main(args: list[str], uri: str | None = None, experiment: str = Config.experiment) -> int:
    """Runs `ortlaunch compare`.

    Args:
        args: the command line after the verb.
        uri: the store to read without `--uri`; relative sqlite paths start at the current folder. None takes the
            environment's store, else the embedded one.
        experiment: the experiment to read if nothing is named.

    Raises:
        RequestError: the store, the experiment or a run does not exist, the store cannot be read, or a file cannot be
            written.
    """
    options = _parser(experiment).parse_args(args)
    return run(options, default_uri() if uri is None else uri, experiment)


def run(options: argparse.Namespace, default_uri: str, default_experiment: str) -> int:
    """Runs the comparison for parsed options."""
    check_files(options)
    check_uri(options.uri or default_uri, "--uri" if options.uri else None)
    uri = resolve_tracking(MlflowConfig(uri=options.uri or default_uri), Path.cwd()).uri
    named = options.run or options.sweep or options.tag
    selection = Selection(
        runs=options.run,
        sweep=options.sweep,
        tags=options.tag,
        experiment=options.experiment or (None if named else default_experiment),
        last=options.last,
        baseline=options.baseline,
    )
    pictured = options.png or options.html or options.log
    with opened(uri) as client:
        comparison = _comparison(client, uri, selection)
        curves = read_curves(client, comparison, options.curves) if pictured else None
    _print(comparison, options)
    if curves is not None:
        _make(comparison, curves, options, uri)
    return 0


def collect(uri: str, selection: Selection) -> Comparison:
    """Reads runs from MLflow and compares them.

    Args:
        uri: absolute tracking URI.
        selection: the runs to compare.

    Raises:
        RequestError: the store, the experiment or a run does not exist, or the store cannot be read.
    """
    with opened(uri) as client:
        return _comparison(client, uri, selection)


def _comparison(client: MlflowClient, uri: str, selection: Selection) -> Comparison:
    chosen = choose(client, selection)
    return compared(chosen.rows, chosen.baseline_id, redacted(uri), chosen.notes, chosen.why)


def _make(comparison: Comparison, curves: Curves, options: argparse.Namespace, uri: str) -> None:
    """Writes the requested files and prints where they are."""
    from ortlaunch.compare.page import as_html
    from ortlaunch.compare.picture import as_png
    from ortlaunch.compare.text import as_json

    # In formats for programs, standard output contains nothing but the comparison.
    out = sys.stdout if options.format == "table" else sys.stderr
    files = {}
    if options.html or options.log:
        files["comparison.html"] = as_html(comparison, curves).encode()
    if options.png or options.log:
        files["comparison.png"] = as_png(comparison, curves)
    for path, name in ((options.html, "comparison.html"), (options.png, "comparison.png")):
        if path:
            write(path, files[name])
            say(f"written:    {path}", file=out)
    if options.log:
        from ortlaunch.compare.record import log

        with opened(uri) as client:
            where = log(client, comparison, files | {"comparison.json": as_json(comparison).encode()})
        say(f"logged:     {where}", file=out)


def _print(comparison: Comparison, options: argparse.Namespace) -> None:
    from rich.console import Console

    from ortlaunch.compare.render import render

    render(comparison, options.format, Console(), each=options.each)


def check_files(options: argparse.Namespace) -> None:
    """Refuses output files that cannot be written, before any work is done.

    Raises:
        RequestError: a file cannot be written; the message names a remedy.
    """
    for option, path in (("--png", options.png), ("--html", options.html)):
        if path is not None:
            check_free(option, path, force=options.force)


def _parser(default_experiment: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortlaunch compare",
        description="Compare throughput, memory and loss of runs in MLflow.",
        epilog=_EPILOG,
    )
    parser.add_argument("run", nargs="*", metavar="RUN", help="run folder, run id or its beginning, or run name")
    parser.add_argument("--sweep", metavar="SWEEP", help="all runs of a sweep: its folder, its name or its run id")
    parser.add_argument(
        "--tag",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="runs with this tag in MLflow, in all experiments unless one is named; several must all hold",
    )
    parser.add_argument("--experiment", metavar="NAME", help=f"default where nothing is named: {default_experiment}")
    parser.add_argument("--uri", help="tracking URI to read from (default: MLFLOW_TRACKING_URI, else that of runs)")
    help_last = f"the last N runs of these (default {LAST}, and the baseline)"
    parser.add_argument("--last", type=positive, metavar="N", help=help_last)
    add_output_options(parser)
    return parser


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `ortlaunch bench` also has: the baseline and the outputs."""
    parser.add_argument("--baseline", metavar="RUN", help=_BASELINE_HELP)
    parser.add_argument("--format", choices=FORMATS, default="table")
    parser.add_argument("--each", action="store_true", help="a line for each run, though some are repeats")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the comparison as a picture")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page that opens without a network")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    parser.add_argument(
        "--curves", type=positive, default=LIMIT, metavar="N", help=f"draw N runs at most (default {LIMIT})"
    )
    parser.add_argument("--log", action="store_true", help="keep page, picture and figures as a run in MLflow")


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value
