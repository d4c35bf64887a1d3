"""The command `ortlaunch compare`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ortlaunch.base.arguments import Parser, positive
from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace
from ortlaunch.base.text import say
from ortlaunch.compare import figures
from ortlaunch.compare.choose import LAST, Selection, choose
from ortlaunch.compare.comparison import Comparison, compared
from ortlaunch.compare.curves import LIMIT, read_curves
from ortlaunch.compare.sources import Sources, reading
from ortlaunch.compare.table import FORMATS, render
from ortlaunch.config.schema import Config, MlflowConfig
from ortlaunch.config.tracking_uri import check_uri, default_uri, resolve_tracking

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
    from rich.console import Console

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
    paths = [] if options.tag else [*options.run, *filter(None, [options.sweep])]
    with reading(uri, is_named=bool(options.uri), paths=paths) as sources:
        comparison = collect(sources, selection, options.metric, each=options.each)
        curves = read_curves(sources, comparison, options.curves) if options.html else None
    render(comparison, options.format, Console())
    if curves is not None:
        from ortlaunch.compare.page import as_html

        try:
            replace(options.html, as_html(comparison, curves).encode())
        except OSError as error:
            raise RequestError(f"{options.html} cannot be written: {error.strerror}") from None
        # In formats for programs, standard output contains nothing but the comparison.
        say(f"written:    {options.html}", file=sys.stdout if options.format == "table" else sys.stderr)
    return 0


def collect(
    sources: Sources, selection: Selection, named: list[figures.Figure] | None = None, *, each: bool = False
) -> Comparison:
    """Reads runs and compares them.

    Args:
        sources: where runs are found.
        selection: the runs to compare.
        named: the figures to compare beside throughput, memory and loss.
        each: whether each run is a group of its own.

    Raises:
        RequestError: the experiment, a run or a figure does not exist.
    """
    chosen = choose(sources, selection)
    shown = list(named or figures.of_scripts(chosen.rows))
    figures.check(shown, chosen.rows)
    why = chosen.why
    return compared(chosen.rows, chosen.baseline_id, sources.uri, chosen.notes, why, figures=shown, each=each)


def check_files(options: argparse.Namespace) -> None:
    """Refuses an output file that cannot be written, before any work is done.

    Raises:
        RequestError: the file exists and may not be replaced, or its folder does not exist.
    """
    path: Path | None = options.html
    if path is None:
        return
    if path.is_dir():
        raise RequestError(f"--html {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise RequestError(f"--html {path}: there is no folder {path.parent}")
    if not options.force and (path.exists() or path.is_symlink()):
        raise RequestError(f"--html {path} is there already: name another file, or allow it to be replaced by --force")


def _parser(default_experiment: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortlaunch compare",
        description="Compare throughput, memory, loss and any other figure of runs.",
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
    parser.add_argument("--last", type=positive, default=LAST, metavar="N", help=f"the last N runs (default {LAST})")
    add_output_options(parser)
    return parser


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `ortlaunch bench` also has: the baseline and the outputs."""
    parser.add_argument("--baseline", metavar="RUN", help=_BASELINE_HELP)
    parser.add_argument("--format", choices=FORMATS, default="table")
    parser.add_argument("--each", action="store_true", help="a line for each run, though some are repeats")
    parser.add_argument(
        "--metric",
        type=figures.parsed,
        action="append",
        default=[],
        metavar="NAME[:max|:min]",
        help="compare this metric too, at each run's last step; max or min is better. Can be given several times",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page that opens without a network")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    parser.add_argument(
        "--curves", type=positive, default=LIMIT, metavar="N", help=f"draw N runs at most (default {LIMIT})"
    )


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value
