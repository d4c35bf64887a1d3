"""`ortlaunch tune`: finds the fastest configuration of a run that fits, for the same learning.

This module does not import torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ortlaunch.base import exit_codes
from ortlaunch.base.arguments import Parser
from ortlaunch.base.errors import RequestError
from ortlaunch.base.free_memory import available
from ortlaunch.base.locks import exclusive
from ortlaunch.base.text import counted, say
from ortlaunch.check.command import look
from ortlaunch.compose.hydra_tree import run_with_hydra
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, LocalConfig
from ortlaunch.launch.limits import LEAST_BYTES, parsed
from ortlaunch.launch.trial import ended_by_signals
from ortlaunch.run.events import Status
from ortlaunch.tracking import trackers
from ortlaunch.tune import folder as folders
from ortlaunch.tune.cell import Cell
from ortlaunch.tune.folder import TuneFolder
from ortlaunch.tune.job import command_of, write_job
from ortlaunch.tune.memory import Estimates
from ortlaunch.tune.notes import Notes
from ortlaunch.tune.plan import Plan
from ortlaunch.tune.pruning import Dominance
from ortlaunch.tune.render import not_tried, render
from ortlaunch.tune.report import grouped, report_of
from ortlaunch.tune.schedule import Schedule
from ortlaunch.tune.space import AXES, FREE, Space
from ortlaunch.tune.trial import Trials
from ortlaunch.tune.words import BACKEND, Words, taken_apart
from ortlaunch.verbs.multirun import end_sweep_as

if TYPE_CHECKING:
    from omegaconf import DictConfig

MINUTES = 10.0
_MOST_MINUTES = 7 * 24 * 60.0
_SPARE = 0.9
"""Share of the free memory that a trial may take, so that other processes can go on."""
_CHECK_SECONDS = 1800.0
"""A model that trains may yet hang in the check, such as with its smaller batch."""
_EPILOG = f"""\
Takes the keys of ortlaunch run. Searches backend, trainer with its ZeRO stage, workers and their threads, micro-batch
with accumulation, activation checkpointing, and on the CPU launcher.allocator, for the same global batch, precision and
optimizer. A key that you give holds its axis:
backend=eager,ort searches these two. Each trial is an ordinary run of few steps in a process of its own, under a limit
of memory and a time-out. The same command goes on after it was ended, and shows its result again when it is done.

example:
  ortlaunch tune model=gpt2 device=cpu train.steps=2000 --minutes 20

axes: {", ".join(AXES)}; free: {", ".join(FREE)}
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
    taken = taken_apart(words, options.free)
    composed: list[DictConfig] = []
    run_with_hydra(taken.composed, composed.append)
    if not composed:
        # Hydra has printed what an option such as --cfg asked for.
        return exit_codes.DONE
    config = _asked(composed[0], taken)
    _check(config)
    space = Space(config, taken, tuple(options.free), tuple(options.hold))
    is_json = options.format == "json"
    if config.launcher.dry_run:
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
    key = folders.key_of(space, options.memory, folders.machine())
    anew = options.again
    found = None if anew else folders.find(space.asked, key)
    done = None if found is None else found.result()
    if done is not None and done["minutes"] >= options.minutes and not done.get("of_machine"):
        if done["winner"] is not None:
            if not quiet:
                print(f"found on {done['date']}; --again measures anew\n", flush=True)
            return done
        # Nothing has trained, and the search was at its end. What was wrong may be right now.
        anew, found = True, None
    make = folders.make if anew else folders.found_or_made
    folder = found or make(space.asked, key, arguments, space.cell)
    how = " without --again" if options.again else ""
    with exclusive(folder.path / folders.LOCK) as is_ours, _ended_in_order(how):
        if not is_ours:
            raise RequestError(f"{folder.path}: another process runs this tuning: wait for it, or use --again")
        tuning = _Tuning(space, options, folder, quiet=quiet)
        folder.open()
        return tuning.run()


class _Tuning:
    """One search, in its folder."""

    def __init__(self, space: Space, options: argparse.Namespace, folder: TuneFolder, *, quiet: bool) -> None:
        self._space = space
        self._options = options
        self._folder = folder
        self._quiet = quiet
        self._notes = Notes(folder.path / folders.NOTES)
        self._limit = self._memory()
        self._fit: str | None = None
        self._checked: dict[str, dict[str, Any]] = {}
        """What this process has found about the fitness for ONNX Runtime."""

    def run(self) -> dict[str, Any]:
        """Searches to the end and writes the result."""
        space, notes, folder = self._space, self._notes, self._folder
        self._say(self._begun())
        trials = Trials(space, folder.path, self._limit, folder.next_number, folder.add)
        estimates = Estimates(space, self._limit, notes)
        dominance = Dominance(estimates.too_large, lambda cell: space.accumulation(cell) > 1 or "batch" in space.free)
        work = float(space.asked.train.steps * space.batch)
        plan = Plan(
            cells=space.cells,
            asked=space.cell,
            pruner=dominance,
            trial=notes.remembered(trials.run),
            budget=60 * self._options.minutes,
            work=work,
            unfit=self._unfit,
            estimated=dominance.estimated,
            beside=lambda: estimates.spent,
        )
        try:
            finding = Schedule(plan, self._say).run()
        except BaseException as error:
            # What ends the search may keep its end from being recorded, too, such as a full disk.
            with suppress(OSError):
                self._end_sweep("KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED")
            raise
        result = report_of(finding, space, work)
        result |= {"minutes": self._options.minutes, "limit_bytes": self._limit, "folder": str(folder.path)}
        result |= {"date": time.strftime("%Y-%m-%d %H:%M"), "check": self._fit if finding.winner is not None else None}
        result |= self._ways(finding.winner, result)
        self._end_sweep("FAILED" if finding.winner is None else "FINISHED")
        folder.write_result(result)
        return result

    def _end_sweep(self, status: Status) -> None:
        self._folder.close()
        # What it says of a tracker is no part of a result that a program reads.
        with redirect_stdout(sys.stderr):
            end_sweep_as(self._folder.path, self._space.asked, {status})

    def _memory(self) -> int:
        """Bytes that a trial may take, the same after an interruption."""
        if self._options.memory is not None:
            return int(self._options.memory)
        noted = (self._notes.get("limit") or {}).get("bytes")
        if not isinstance(noted, int) or noted < 1:
            noted = int(_SPARE * available())
            self._notes.put("limit", {"bytes": noted})
        return noted

    def _begun(self) -> str:
        space = self._space
        goes_on = f"; going on after {counted(len(self._notes) - 1, 'note')}" if len(self._notes) > 1 else ""
        return (
            f"{counted(len(space.cells), 'configuration')} for a global batch of {space.batch}, "
            f"{self._options.minutes:g} min, {self._limit / 2**30:.2f} GiB for each trial{goes_on}\n"
            f"folder: {self._folder.path}"
        )

    def _unfit(self, cell: Cell) -> str | None:
        """Why the model must not be trained by the backend of a winner; `ortlaunch check` says so for ONNX Runtime."""
        self._fit = None
        if cell[BACKEND] != "ort":
            return None
        # The check is about the model in a precision. It says the same of other workers, micro-batches and optimizers.
        key = f"check {self._space.configured(cell).train.precision.name}"
        noted = self._checked.get(key) or self._notes.get(key)
        if noted is None or not {"fit", "verdict"} <= noted.keys():
            self._say("check: examining whether the model is fit for ONNX Runtime")
            try:
                report = look(self._space.configured(cell), with_cost=False, quiet=True, timeout=_CHECK_SECONDS)
                noted = {"fit": report["fit"], "verdict": report["verdict"]}
                self._notes.put(key, noted)
            except RequestError as error:
                # It says nothing about the model. When the search goes on, the model is examined again.
                noted = {"fit": False, "verdict": str(error)}
            self._checked[key] = noted
        self._fit = str(noted["verdict"])
        return None if noted["fit"] else f"ortlaunch check: {noted['verdict']}"

    def _ways(self, winner: Cell | None, result: dict[str, Any]) -> dict[str, Any]:
        """The command and the ready job of the winner, and the commands that compare the trials."""
        compare = trackers.compare_commands(self._space.asked, "--sweep", str(self._folder.path))
        if winner is None:
            return {"command": None, "job": None, "compare": compare}
        space = self._space
        config = space.configured(winner)
        command = command_of(space.words.kept, space.overrides(winner), config)
        speed = f"{result['score']:,.1f} samples/s" if result["score"] else "speed not known"
        headline = f"{result['model']} as `ortlaunch tune` found it fastest on {result['date']}: {speed}"
        _, way = write_job(config, self._folder.path / folders.JOBS, headline)
        return {"command": command, "job": way, "compare": compare}

    def _say(self, line: str) -> None:
        if not self._quiet:
            print(line, flush=True)


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
        "--hold",
        action="extend",
        type=_names(AXES),
        default=[],
        metavar="AXIS,...",
        help="axes that keep the values as asked",
    )
    parser.add_argument(
        "--free",
        action="extend",
        type=_names(FREE),
        default=[],
        metavar="WHAT,...",
        help="search these too; the learning then changes",
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


def _names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A type of argument: some of these names, with commas."""

    def read(text: str) -> list[str]:
        names = [name.replace("-", "_") for name in text.split(",")]
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r}: must be of {', '.join(known)}")
        return names

    return read


def _asked(composed: DictConfig, taken: Words) -> Config:
    """The configuration as asked: the first combination of the values given that the rules allow.

    Raises:
        RequestError: they allow none; the message is about the first one.
    """
    try:
        return prepared(to_config(composed))
    except RequestError as error:
        for words in taken.others():
            found: list[DictConfig] = []
            with suppress(RequestError):
                run_with_hydra(words, found.append)
                return prepared(to_config(found[0]))
        raise error


def _check(config: Config) -> None:
    """Refuses what cannot be tuned.

    Raises:
        RequestError: the message names the key and the remedy.
    """
    launcher = config.launcher
    if not isinstance(launcher, LocalConfig) or launcher.nodes > 1:
        given = f"launcher.nodes={launcher.nodes}" if launcher.nodes > 1 else f"launcher={launcher.name}"
        raise RequestError(
            f"{given}: tune measures on this machine alone: run it on one of the nodes with launcher=local, and give "
            "what it finds to the run on the cluster"
        )
    if config.train.resume not in ("auto", "never"):
        raise RequestError(f"train.resume={config.train.resume}: trials begin anew: leave it out")


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
