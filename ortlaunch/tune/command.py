"""`ortlaunch tune`: finds the fastest configuration of a run that fits, for the same learning.

This module does not import torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ortlaunch.base import exit_codes
from ortlaunch.base.arguments import Parser
from ortlaunch.base.errors import RequestError
from ortlaunch.base.locks import exclusive
from ortlaunch.base.text import counted, say
from ortlaunch.compose.hydra_tree import run_with_hydra
from ortlaunch.launch.limits import LEAST_BYTES, parsed
from ortlaunch.launch.trial import ended_by_signals
from ortlaunch.run.events import Status
from ortlaunch.tracking import trackers
from ortlaunch.tune.folder import LOCK, TuneFolder
from ortlaunch.tune.report import grouped, not_tried, render, report_of
from ortlaunch.tune.search import Plan, Search
from ortlaunch.tune.space import AXES, Space
from ortlaunch.verbs.multirun import end_sweep_as

if TYPE_CHECKING:
    from omegaconf import DictConfig

MINUTES = 10.0
_MOST_MINUTES = 7 * 24 * 60.0
_EPILOG = f"""\
Takes the keys of ortlaunch run. Searches {", ".join(AXES[:-1])} and
{AXES[-1]}, for the same global batch and the same learning. A key that you give holds its axis, and
a list of values searches these: backend=eager,ort launcher.threads=1,2. Each trial is an ordinary run of few steps in a
process of its own, under a limit of memory and a time-out. The same command goes on after it was ended, and shows its
result again when it is done.

example:
  ortlaunch tune model=gpt2 device=cpu train.steps=2000 --minutes 20

Exit codes: 0 a winner, 1 no configuration trained, 2 the request is wrong, 130 interrupted."""


def main(arguments: list[str]) -> int:
    """Runs the verb.

    Args:
        arguments: the command line after ``tune``.

    Returns:
        The exit code.

    Raises:
        RequestError: the request is wrong, or another process is at the same.
    """
    options, words = _parser().parse_known_args(arguments)
    if {"-m", "--multirun"} & set(words):
        raise RequestError("ortlaunch tune chooses the runs itself: leave --multirun out")
    if any(word.startswith("-") for word in words):
        composed: list[DictConfig] = []
        run_with_hydra(words, composed.append)
        if not composed:
            # Hydra has printed what an option such as --cfg asked for.
            return exit_codes.DONE
    space = Space(words, options.free, options.hold)
    is_json = options.format == "json"
    if space.asked.launcher.dry_run:
        print(json.dumps(_planned(space), indent=2) if is_json else _listed(space))
        return exit_codes.DONE
    result = tuned(space, options, ["tune", *arguments], quiet=is_json)
    if is_json:
        print(json.dumps(result, indent=2))
    else:
        render(result, Console())
    return exit_codes.DONE if result["winner"] is not None else exit_codes.FAILED


def tuned(space: Space, options: argparse.Namespace, arguments: list[str], *, quiet: bool) -> dict[str, Any]:
    """Searches a space, or goes on with it, and returns the result.

    Args:
        space: the cells.
        options: the verb's own options.
        arguments: the command line after ``ortlaunch``, for the record.
        quiet: whether to print no progress.

    Raises:
        RequestError: another process is at the same.
    """
    folder = TuneFolder(space, options.memory)
    done = None if options.again else folder.result()
    # Where nothing has trained, what was wrong may be right now.
    anew = options.again or (done is not None and done["winner"] is None)
    if done is not None and not anew and done["minutes"] >= options.minutes and not done["of_machine"]:
        if not quiet:
            print(f"found on {done['date']}; --again measures anew\n", flush=True)
        return done
    folder.make()
    with exclusive(folder.path / LOCK) as is_ours, _ended_in_order(" without --again" if options.again else ""):
        if not is_ours:
            raise RequestError(f"{folder.path}: another process runs this tuning: wait for it")
        folder.open(arguments, anew=anew)
        return _searched(space, folder, options.minutes, quiet=quiet)


def _searched(space: Space, folder: TuneFolder, minutes: float, *, quiet: bool) -> dict[str, Any]:
    """Searches to the end and writes the result."""

    def tell(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    goes_on = f"; going on after {counted(len(folder.notes), 'note')}" if folder.notes else ""
    tell(
        f"{counted(len(space.cells), 'configuration')} for a global batch of {space.batch}, {minutes:g} min, "
        f"{folder.limit / 2**30:.2f} GiB for each trial{goes_on}\nfolder: {folder.path}"
    )
    work = float(space.asked.train.steps * space.batch)
    plan = Plan(space.cells, folder.trial, 60 * minutes, work, lambda cell: space.accumulation(cell) > 1)
    try:
        finding = Search(plan, tell).run()
    except BaseException as error:
        # What ends the search may keep its end from being recorded, too, such as a full disk.
        with suppress(OSError):
            _end_sweep(folder, space, "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED")
        raise
    result = report_of(finding, space, work)
    result |= {"minutes": minutes, "limit_bytes": folder.limit, "folder": str(folder.path)}
    result |= {"date": time.strftime("%Y-%m-%d %H:%M"), "command": finding.winner and space.command(finding.winner)}
    result["compare"] = trackers.compare_commands(space.asked, "--sweep", str(folder.path))
    _end_sweep(folder, space, "FAILED" if finding.winner is None else "FINISHED")
    folder.write_result(result)
    return result


def _end_sweep(folder: TuneFolder, space: Space, status: Status) -> None:
    folder.close()
    # What it says of a tracker is no part of a result that a program reads.
    with redirect_stdout(sys.stderr):
        end_sweep_as(folder.path, space.asked, {status})


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortlaunch tune",
        usage="ortlaunch tune KEY=VALUE[,VALUE...] ... [--minutes N] [OPTION ...]",
        description="Find the fastest configuration of a run that fits this machine, for the same learning.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=MINUTES, metavar="N", help=f"time for all trials (default {MINUTES:g})"
    )
    parser.add_argument(
        "--memory", type=_size, metavar="SIZE", help="memory for a trial, such as 8GiB (default: 90 %% of what is free)"
    )
    parser.add_argument(
        "--hold", action="extend", type=_names, default=[], metavar="KEY,...", help="axes that keep the value as asked"
    )
    parser.add_argument(
        "--free",
        action="extend",
        type=_names,
        default=[],
        metavar="KEY,...",
        help="keys whose listed values change what is learned, and are searched all the same",
    )
    parser.add_argument("--again", action="store_true", help="begin anew, whatever was found before")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    return parser


def _minutes(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) <= _MOST_MINUTES:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: must be a number of minutes, above 0 and at most {_MOST_MINUTES:g}")


def _size(text: str) -> int:
    size = parsed(text, "--memory")
    if size < LEAST_BYTES:
        raise RequestError(
            f"--memory={text}: no trial fits: a worker that has imported torch takes more than "
            f"{LEAST_BYTES // 2**20} MiB without a model; give more, such as --memory=8GiB"
        )
    return size


def _names(text: str) -> list[str]:
    return text.split(",")


def _planned(space: Space) -> dict[str, Any]:
    """What `_listed` says, for a program."""
    return {
        "global_batch": space.batch,
        "asked": dict(space.cell.values),
        "cells": [dict(cell.values) for cell in space.cells],
        "not_tried": grouped(space.refused),
    }


def _listed(space: Space) -> str:
    cells = [f"  {cell}" for cell in space.cells]
    head = f"{counted(len(cells), 'configuration')} for a global batch of {space.batch} would be searched:"
    return "\n".join([head, *cells, *not_tried(grouped(space.refused))])


@contextmanager
def _ended_in_order(how: str) -> Iterator[None]:
    """Ends the search by an exception where a signal asks for it, so that the running trial is ended too.

    Args:
        how: in what the command that goes on differs from this one.
    """
    with ended_by_signals():
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            say(f"ortlaunch: interrupted; the same command{how} goes on where it was", file=sys.stderr)
            raise
