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
from ortlaunch.base.exit_codes import DONE, FAILED, FIRST_STOPPED
from ortlaunch.base.secrets import without_secrets_in_words
from ortlaunch.base.text import counted, say
from ortlaunch.compose.hydra_tree import backend_reason, multirun_task, run_with_hydra
from ortlaunch.compose.prepare import prepared
from ortlaunch.compose.sweep_folder import discard, sweep_folder
from ortlaunch.compose.sweeps import swept_keys, swept_name, swept_words
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, MlflowConfig
from ortlaunch.config.tracking_uri import compare_command, resolve_tracking
from ortlaunch.launch.auto import chosen
from ortlaunch.launch.launcher import QueueLauncher
from ortlaunch.launch.planning import make_plan
from ortlaunch.launch.table import launcher_of
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import SweepTask
from ortlaunch.tracking.mlflow import mlflow_of
from ortlaunch.verbs.multirun import combination_name, create_sweep, end_sweep

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
    from ortlaunch.compare.command import check_files

    options, words = _parser().parse_known_args(arguments)
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
        if options.baseline is not None:
            _check_baseline(grid, repeat, options.baseline)
        return _Bench(grid, repeat, ["bench", *arguments]).run(options)
    finally:
        discard(sweep_folder())


def _parser() -> argparse.ArgumentParser:
    from ortlaunch.compare.command import add_output_options

    parser = Parser(
        prog="ortlaunch bench",
        usage="ortlaunch bench KEY=VALUE[,VALUE...] ... [repeat=N] [OPTION ...]",
        description=f"Run every combination N times (default {REPEAT}), in rounds, and compare them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_output_options(parser)
    return parser


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
    if not any(word.lstrip("+").startswith(f"{_KEEPS_WEIGHTS}=") for word in rest):
        rest = [f"{_KEEPS_WEIGHTS}=false", *rest]
    if not given:
        return REPEAT, rest
    text = given[-1].partition("=")[2]
    if not (number := whole(text)):
        raise RequestError(f"repeat={text} is no number of rounds: give 1 or more")
    return number, rest


def _composed(words: list[str]) -> Grid:
    grid = Grid()

    def take(tree: DictConfig) -> None:
        task = multirun_task()
        assert task is not None
        grid.folder = task.folder
        try:
            config = prepared(to_config(tree))
        except RequestError as error:
            grid.refused.append((" ".join(swept_words(words, task.overrides)), error))
            return
        name = combination_name(config, words, task.overrides)
        if any(set(cell.overrides) == set(task.overrides) for cell in grid.cells):
            grid.again.append(name)
            return
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
        if mlflow_of(cell.config) is None:
            raise RequestError(
                f"tracking={cell.config.tracking.name}: a bench compares what is in MLflow: tracking=mlflow"
            )


def _check_baseline(grid: Grid, repeat: int, asked: str) -> None:
    """Refuses a baseline that is neither a run of this bench nor one that MLflow has, before anything runs.

    Raises:
        RequestError: the message lists the runs of the first round.
    """
    from ortlaunch.compare.command import check_baseline

    if any(asked == _run_name(cell, repeat, turn) for cell in grid.cells for turn in range(repeat)):
        return
    tracking = mlflow_of(grid.cells[0].config)
    assert tracking is not None
    try:
        check_baseline(asked, resolve_tracking(tracking, Path.cwd()).uri)
    except RequestError as error:
        names = ", ".join(_run_name(cell, repeat, 0) for cell in grid.cells)
        raise RequestError(f"--baseline {asked}: {error}. The first round of this bench: {names}") from error


def _run_name(cell: Cell, repeat: int, turn: int) -> str:
    return cell.name if repeat == 1 else f"{cell.name}-seed={cell.config.seed + turn}"


def _listed(grid: Grid, repeat: int) -> str:
    lines = [f"{counted(len(grid.cells) * repeat, 'run')} would be started, one after the other:"]
    for turn in range(repeat):
        for cell in grid.cells:
            words = without_secrets_in_words(_with_seed(cell.overrides, cell.config.seed + turn))
            lines.append(f"round {turn + 1}  {cell.name}  {shlex.join(['ortlaunch', *words])}")
    return "\n".join(lines) + "\n"


def _with_seed(overrides: list[str], seed: int) -> list[str]:
    """Returns the overrides of one run: those of its cell, with the seed of its round."""
    others = [word for word in overrides if not word.lstrip("+").startswith(("seed=", "launcher.dry_run="))]
    return [*others, f"seed={seed}"]


class _Bench:
    """Runs the grid, round by round."""

    def __init__(self, grid: Grid, repeat: int, command: list[str]) -> None:
        self._grid = grid
        self._repeat = repeat
        self._failed: dict[str, str] = {name: str(error) for name, error in grid.refused}
        self._runs: list[Path] = []
        self._has_finished = False
        first = grid.cells[0].config
        name = swept_name(command, first.name).replace("sweep", "bench", 1)
        self._sweep = create_sweep(grid.folder, name, first, command)

    def run(self, options: argparse.Namespace) -> int:
        """Runs all and compares them; returns the exit code of the whole."""
        Run(self._grid.folder).note_launcher()
        stopped = True
        try:
            code = self._rounds()
            stopped = code >= FIRST_STOPPED
        finally:
            self._close(stopped=stopped)
        tracking = mlflow_of(self._grid.cells[0].config)
        assert tracking is not None
        again = compare_command(tracking, "--sweep", str(self._grid.folder))
        print(f"bench:      {self._grid.folder}\ncompare:    {again}", flush=True)
        for name, why in self._failed.items():
            say(f"ortlaunch: {name} failed: {why}", file=sys.stderr)
        if stopped or not self._has_finished:
            return code
        self._compare(options, tracking, again)
        return code

    def _rounds(self) -> int:
        """Runs all rounds; returns the exit code of the whole, or that of a run that was stopped."""
        working = list(self._grid.cells)
        number = 0
        for turn in range(self._repeat):
            later_rounds = self._repeat - turn - 1
            this_round = list(working)
            for index, cell in enumerate(this_round):
                number += 1
                left = len(this_round) - index - 1 + later_rounds * len(working)
                print(f"\n{number}/{number + left}  round {turn + 1} of {self._repeat}: {cell.name}", flush=True)
                code = self._run(cell, turn)
                if code >= FIRST_STOPPED:
                    return code
                if code:
                    # A cell that has failed once would most likely fail again, which costs time.
                    working.remove(cell)
        return FAILED if self._failed else DONE

    def _run(self, cell: Cell, turn: int) -> int:
        seed = cell.config.seed + turn
        config = dataclasses.replace(cell.config, seed=seed, name=_run_name(cell, self._repeat, turn))
        config, why = chosen(config)
        plan = dataclasses.replace(
            make_plan(config, why or cell.backend_reason), sweep=SweepTask(self._grid.folder, len(self._runs))
        )
        self._runs.append(plan.run_dir)
        self._sweep.write(self._runs, complete=False)
        code = launcher_of(config).submit(plan, config, _with_seed(cell.overrides, seed))
        if code == DONE:
            self._has_finished = True
        elif code < FIRST_STOPPED:
            self._failed[cell.name] = f"exit code {code} in round {turn + 1}; see {plan.run_dir}"
        return code

    def _close(self, *, stopped: bool) -> None:
        self._sweep.write(self._runs, complete=True)
        end_sweep(self._grid.folder, self._grid.cells[0].config, {"KILLED"} if stopped else set())

    def _compare(self, options: argparse.Namespace, tracking: MlflowConfig, again: str) -> None:
        """Compares the runs of the sweep, as `ortlaunch compare` does."""
        from ortlaunch.compare import command

        experiment = tracking.experiment_name or self._grid.cells[0].config.experiment
        chosen = {"run": [], "tag": [], "last": 1, "sweep": str(self._grid.folder), "experiment": experiment}
        wanted = argparse.Namespace(**vars(options), **chosen, uri=tracking.uri)
        try:
            command.run(wanted, tracking.uri, experiment)
        except RequestError as error:
            raise RequestError(f"the runs have ended, but cannot be compared: {error}. Later: {again}") from error
