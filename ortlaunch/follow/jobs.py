"""`ortlaunch jobs`: lists this user's runs, on this machine and in queues, the newest first."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ortlaunch.base.arguments import Parser, positive
from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import json_text, say
from ortlaunch.follow.rows import Row, Survey, damage_lines, title_of
from ortlaunch.follow.state import State
from ortlaunch.launch.plan import folder_name
from ortlaunch.run.folders import RunFolder, scan
from ortlaunch.run.roots import known_roots
from ortlaunch.run.sweep import find_sweep, runs_of

_DESCRIPTION = """\
List runs, the newest first: all that go on or wait, and of the others as many as fill --last rows.

It looks in runs/ of this folder, and in every run root where you have started runs from this account.
States: queued, pending (why says for what), requeued, preempted, running, stopping, and of those that are over:
finished, stopped (goes on with ortlaunch resume), failed, killed; unknown if neither the run folder nor the
scheduler has the answer.
elapsed is of the latest attempt, left is to the last step at the latest pace. tokens/s and samples/s are the
medians that compare shows where a run has ended with them, else those of the latest log step.

With --available: the ready jobs that ortlaunch +jobs=NAME runs, instead of runs."""


def jobs(arguments: list[str]) -> int:
    """Runs `ortlaunch jobs`.

    Args:
        arguments: the command line after the verb.

    Raises:
        RequestError: there is no such experiment or folder.
    """
    options = _parser().parse_args(arguments)
    if options.available:
        from ortlaunch.config.paths import jobs_text

        print(jobs_text())
        return 0
    roots = [_existing_root(folder) for folder in options.root] or known_roots()
    known = scan(roots)
    selected = _of_experiment(known, options.experiment) if options.experiment else known
    if options.sweep:
        selected = _of_sweep(selected, options.sweep, roots)
    survey = Survey(known)
    rows = _rows(survey, selected, options)
    survey.close()
    for line in damage_lines(survey.damage):
        say(f"ortlaunch: {line}", file=sys.stderr)
    if options.json:
        print(json_text([row.as_dict() for row in rows]))
        return 0
    _show(rows, len(selected), survey)
    return 0


def _rows(survey: Survey, folders: list[RunFolder], options: argparse.Namespace) -> list[Row]:
    if not options.state:
        return survey.rows(folders) if options.all else survey.newest(folders, options.last)
    wanted = {State(state) for state in options.state}
    rows = [row for row in survey.rows(folders) if row.state in wanted]
    return rows if options.all else rows[: options.last]


def _show(rows: list[Row], selected: int, survey: Survey) -> None:
    """Prints the rows, how many of the `selected` runs they are, and which schedulers could not be asked."""
    from rich.console import Console

    from ortlaunch.follow.table import rate_note, render

    if rows:
        render(rows, Console())
        if note := rate_note(rows):
            print(note)
    else:
        print("no runs" if not selected else "no such runs")
    if rows and len(rows) < selected:
        print(f"{len(rows)} of {selected} runs (--all shows the others)")
    for name in sorted({row.launcher for row in rows if row.job_id and not row.is_over}):
        if problem := survey.ask(name).problem:
            say(f"ortlaunch: {title_of(name)} cannot be asked: {problem}", file=sys.stderr)


def _of_experiment(folders: list[RunFolder], experiment: str) -> list[RunFolder]:
    # The experiment is known only as a folder's name, which has no spaces.
    found = [folder for folder in folders if folder.experiment in (experiment, folder_name(experiment))]
    if not found:
        experiments = ", ".join(sorted({folder.experiment for folder in folders})) or "none"
        raise RequestError(f"there are no runs of an experiment {experiment} (known: {experiments})")
    return found


def _of_sweep(folders: list[RunFolder], asked: str, roots: list[Path]) -> list[RunFolder]:
    sweep = find_sweep(asked, roots)
    if sweep is None:
        raise RequestError(f"there is no sweep {asked}: give its folder, its name, its id or its array's job id")
    folder_of = {folder.path: folder for folder in folders}
    return [folder_of[run_dir] for run_dir in runs_of(sweep) or [] if run_dir in folder_of]


def _existing_root(text: str) -> Path:
    root = Path(text).expanduser().absolute()
    if not text:
        raise RequestError(f"--root: {text!r} is not a folder")
    try:
        os.scandir(root).close()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RequestError(f"--root: {root} is not a folder") from error
    except OSError as error:
        raise RequestError(f"--root: {root} cannot be read: {error.strerror}") from error
    return root


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortlaunch jobs", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    states = [state.value for state in State]
    parser.add_argument("--last", type=positive, default=20, metavar="N", help="rows to fill (default: 20)")
    parser.add_argument("--all", action="store_true", help="every run")
    parser.add_argument(
        "--state", action="append", choices=states, metavar="STATE", help="only runs in this state; may be repeated"
    )
    parser.add_argument("--experiment", metavar="NAME", help="only runs of this experiment")
    parser.add_argument("--sweep", metavar="SWEEP", help="only runs of this sweep: folder, name, id or array job")
    parser.add_argument(
        "--root", action="append", default=[], metavar="FOLDER", help="look in this run root only; may be repeated"
    )
    parser.add_argument("--available", action="store_true", help="list the ready jobs instead, a line each")
    parser.add_argument("--json", action="store_true", help="for programs: a list of objects, with exact values")
    return parser
