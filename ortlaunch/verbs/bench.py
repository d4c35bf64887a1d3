"""`ortlaunch bench`: runs a grid on this machine, repeated in rounds, and compares the runs.

All cells run once before any of them runs again, so that changes of the machine over time affect all cells alike.
Every round has its own seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.arguments import Parser, whole
from ortlaunch.base.errors import RequestError
from ortlaunch.base.exit_codes import DONE, FAILED, FIRST_STOPPED, INTERRUPTED, REQUEST
from ortlaunch.base.secrets import without_secrets_in_words
from ortlaunch.base.text import counted, say
from ortlaunch.compose.hydra_tree import backend_reason, multirun_task, run_with_hydra
from ortlaunch.compose.prepare import prepared
from ortlaunch.compose.sweep_folder import discard, sweep_folder
from ortlaunch.compose.sweeps import swept_keys, swept_words
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config
from ortlaunch.config.tracking_uri import default_uri
from ortlaunch.launch.launcher import QueueLauncher
from ortlaunch.launch.table import launcher_of
from ortlaunch.run.sweep import marks_of
from ortlaunch.verbs.multirun import Multirun, combination_name

if TYPE_CHECKING:
    from omegaconf import DictConfig

REPEAT = 3
_COMMON = ("experiment", "run_root", "tracking", "trackers")
"""Keys that have the same value in all runs of a bench."""
_KEEPS_WEIGHTS = "train.save_weights"
_EPILOG = """\
example:
  ortlaunch bench model=gpt2_nano backend=eager,compile,ort trainer=ddp,deepspeed repeat=3 --html bench.html

Lists of values make the grid, as with --multirun. The first run that finishes is the baseline, unless --baseline names
another. launcher.dry_run=true shows the list. Weights are kept only with train.save_weights=true.
Exit codes: 0 done, 1 a cell failed, 2 the request is wrong, 130 interrupted."""


@dataclass(frozen=True)
class Cell:
    """One combination of the grid."""

    name: str
    config: Config
    overrides: list[str]
    backend_reason: str | None = None
    """Why the backend is not ORT, if nobody chose it."""


@dataclass
class Grid:
    """The combinations, and those that cannot work, with the reason."""

    folder: Path = Path()
    varied: list[str] = field(default_factory=list)
    """Hydra's part of the command line, and the keys that a ready job sweeps."""
    cells: list[Cell] = field(default_factory=list)
    refused: list[tuple[str, RequestError]] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    """The names of combinations that were there before: ``backend=eager,eager`` asks twice for the same runs."""


def main(arguments: list[str]) -> int:
    """Runs `ortlaunch bench`.

    Args:
        arguments: the command line after the verb.

    Returns:
        The exit code.

    Raises:
        RequestError: the request cannot work at all, or the comparison cannot be made.
    """
    from ortlaunch.compare.command import add_output_options, check_files

    parser = Parser(
        prog="ortlaunch bench",
        usage="ortlaunch bench KEY=VALUE[,VALUE...] ... [repeat=N] [OPTION ...]",
        description=f"Run every combination N times (default {REPEAT}), in rounds, and compare them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_output_options(parser)
    options, words = parser.parse_known_args(arguments)
    repeat, words = _repeat(words)
    check_files(options)
    try:
        grid = _composed(words)
        _check(grid)
        for name, error in grid.refused:
            say(f"ortlaunch: {name} is left out: {error}", file=sys.stderr)
        for name in dict.fromkeys(grid.again):
            say(f"ortlaunch: {name} is asked for twice and runs once a round: repeat=N repeats it with other seeds")
        if not grid.cells or grid.cells[0].config.launcher.dry_run:
            print(_listed(grid, repeat) if grid.cells else "", end="")
            return DONE
        return _run(grid, repeat, ["bench", *arguments], options)
    finally:
        discard(sweep_folder())


def _repeat(words: list[str]) -> tuple[int, list[str]]:
    if meant := [word for word in words if re.fullmatch(r"(--?repeat|-{0,2}(repeats|rounds))(=.*)?", word)]:
        raise RequestError(f"{meant[0]}: the number of rounds is given as repeat=N, such as repeat={REPEAT}")
    given = [word for word in words if word.startswith("repeat=")]
    rest = [word for word in words if word not in given and word not in ("-m", "--multirun")]
    swept = swept_keys(rest)
    if common := [key for key in swept if key.partition(".")[0] in _COMMON]:
        raise RequestError(f"{common[0]}: the runs of a bench have it in common: give one value")
    if "seed" in swept:
        raise RequestError("seed: the rounds of a bench have seeds of their own, from seed=N on: give repeat=N instead")
    text = given[-1].partition("=")[2] if given else str(REPEAT)
    if not (number := whole(text)):
        raise RequestError(f"repeat={text} is no number of rounds: give 1 or more")
    if not any(word.lstrip("+").startswith(f"{_KEEPS_WEIGHTS}=") for word in rest):
        rest = [f"{_KEEPS_WEIGHTS}=false", *rest]
    return number, rest


def _composed(words: list[str]) -> Grid:
    grid = Grid()

    def take(tree: DictConfig) -> None:
        task = multirun_task()
        assert task is not None
        grid.folder, grid.varied = task.folder, [*words, *task.swept]
        try:
            config = prepared(to_config(tree))
        except RequestError as error:
            grid.refused.append((" ".join(swept_words(grid.varied, task.overrides)), error))
            return
        name = combination_name(config, grid.varied, task.overrides)
        if any(set(cell.overrides) == set(task.overrides) for cell in grid.cells):
            grid.again.append(name)
        else:
            grid.cells.append(Cell(name, config, task.overrides, backend_reason()))

    run_with_hydra([*words, "--multirun"], take)
    return grid


def _check(grid: Grid) -> None:
    """Refuses what a bench cannot run, and a grid in which no combination can work.

    Raises:
        RequestError: the message names the key and the remedy.
    """
    if grid.refused and not grid.cells:
        raise grid.refused[0][1]
    for cell in grid.cells:
        launcher = cell.config.launcher
        if isinstance(launcher_of(cell.config), QueueLauncher) or launcher.nodes > 1:
            given = f"launcher={launcher.name}" if launcher.nodes == 1 else f"launcher.nodes={launcher.nodes}"
            raise RequestError(
                f"{given}: a bench runs on this machine alone. On several, run the grid by --multirun with "
                "seed=0,1,2 and compare it by ortlaunch compare --sweep"
            )


def _rounds(grid: Grid, repeat: int) -> list[tuple[int, Cell, list[str]]]:
    """Returns the runs in their order: the round, the cell, and its overrides with the seed of the round."""
    runs = []
    for turn in range(repeat):
        for cell in grid.cells:
            others = [one for one in cell.overrides if not one.lstrip("+").startswith(("seed=", "launcher.dry_run="))]
            runs.append((turn + 1, cell, [*others, f"seed={cell.config.seed + turn}"]))
    return runs


def _listed(grid: Grid, repeat: int) -> str:
    runs = _rounds(grid, repeat)
    lines = [f"{counted(len(runs), 'run')} would be started, one after the other:"]
    for turn, cell, overrides in runs:
        lines.append(f"round {turn}  {cell.name}  {shlex.join(['ortlaunch', *without_secrets_in_words(overrides)])}")
    return "\n".join(lines) + "\n"


def _run(grid: Grid, repeat: int, command: list[str], options: argparse.Namespace) -> int:
    """Runs all and compares them; returns the exit code of the whole."""
    sweep = Multirun(grid.folder, command, grid.varied, "bench")
    for name, error in grid.refused:
        sweep.note_failure(name, str(error))
    try:
        code = _run_rounds(sweep, grid, repeat)
    except BaseException as error:
        if sweep.has_run:
            sweep.close(REQUEST if isinstance(error, RequestError) else INTERRUPTED)
        raise
    code = sweep.close(code)
    if code < FIRST_STOPPED and "FINISHED" in marks_of(grid.folder):
        _compare(grid, options)
    return code


def _run_rounds(sweep: Multirun, grid: Grid, repeat: int) -> int:
    """Runs all rounds; returns the exit code that ends them early."""
    left = _rounds(grid, repeat)
    number = 0
    while left:
        (turn, cell, overrides), *left = left
        number += 1
        print(f"\n{number}/{number + len(left)}  round {turn} of {repeat}: {cell.name}", flush=True)
        config = dataclasses.replace(cell.config, seed=cell.config.seed + turn - 1)
        name = cell.name if repeat == 1 else f"{cell.name}-seed={config.seed}"
        try:
            code = sweep.run(config, overrides, cell.backend_reason, name)
            why = f"exit code {code} in round {turn}; see {sweep.run_dirs[-1]}"
        except RequestError as error:
            if not sweep.goes_on:
                raise
            code, why = FAILED, str(error)
        if code >= FIRST_STOPPED:
            return code
        if code:
            sweep.note_failure(cell.name, why)
            if not sweep.goes_on:
                return FAILED
            # It would most likely fail again, which costs time.
            left = [one for one in left if one[1] is not cell]
    return DONE


def _compare(grid: Grid, options: argparse.Namespace) -> None:
    """Compares the runs of the sweep, as `ortlaunch compare` does."""
    from ortlaunch.compare import command

    chosen = {"run": [], "tag": [], "last": 1, "sweep": str(grid.folder), "experiment": None, "uri": None}
    try:
        command.run(argparse.Namespace(**vars(options), **chosen), default_uri(), Config.experiment)
    except RequestError as error:
        raise RequestError(f"the runs have ended, but cannot be compared: {error}") from error
