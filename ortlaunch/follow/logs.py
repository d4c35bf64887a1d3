"""`ortlaunch logs RUN`: prints the output of a run's workers over all its attempts, and follows it while it runs."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ortlaunch.base.arguments import Parser, count, whole
from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import in_words, open_plain
from ortlaunch.base.secrets import without_secrets
from ortlaunch.base.text import log_line, printable, say
from ortlaunch.follow.find import HELP, find_run
from ortlaunch.follow.rows import Row
from ortlaunch.follow.state import State
from ortlaunch.follow.status import look
from ortlaunch.launch.local.display import describe_evaluation, describe_step
from ortlaunch.run.events import Ended, Event, Measured, Rewound, WorkerFailed
from ortlaunch.run.folders import RunFolder
from ortlaunch.run.journal import read_events
from ortlaunch.run.run import Run

_POLL_SECONDS = 0.3
_STATE_SECONDS = 5.0
_CHUNK_BYTES = 1 << 20
_LONGEST_LINE = 16 << 20
_OTHER_LOGS = ("steps", "torchrun", "slurm", "job", "relay")
_RANK = re.compile(r"rank-(\d+)\.log")


@dataclass
class Source:
    """One log file, read in pieces. It is not kept open, because there may be thousands."""

    path: Path
    label: str = ""
    """Prefix of each line; empty if only one file is shown."""
    offset: int = 0
    rest: bytes = field(default=b"", repr=False)

    def lines(self, *, final: bool = False) -> Iterator[str]:
        """Yields the complete lines that came since the last call.

        Args:
            final: whether nothing more will come, so that a last line without a line break counts too.
        """
        try:
            with open_plain(self.path) as file:
                if file.seek(0, 2) < self.offset:  # The file was replaced.
                    self.offset, self.rest = 0, b""
                file.seek(self.offset)
                while piece := file.read(_CHUNK_BYTES):
                    self.offset += len(piece)
                    *whole, self.rest = (self.rest + piece).split(b"\n")
                    yield from (line.decode(errors="replace") for line in whole)
                    if len(self.rest) > _LONGEST_LINE:  # It is shown in parts, so that it does not fill the memory.
                        yield self.rest.decode(errors="replace")
                        self.rest = b""
        except FileNotFoundError:
            return
        except OSError as error:
            raise RequestError(f"{self.path} cannot be read: {in_words(error)}") from error
        if final and self.rest:
            yield self.rest.decode(errors="replace")
            self.rest = b""


class Steps(Source):
    """The journal's log steps, as the text that a terminal shows while a run goes on."""

    def lines(self, *, final: bool = False) -> Iterator[str]:
        """Yields the log steps that came since the last call."""
        try:
            events, self.offset = read_events(self.path, self.offset)
        except OSError as error:
            raise RequestError(f"{self.path} cannot be read: {in_words(error)}") from error
        # Journals of older releases may hold secrets. A line break in a text must not make a further line.
        yield from (printable(without_secrets(line)) for event in events if (line := _described(event)))


def _described(event: Event) -> str:
    """Returns the text for an event; empty if it is not shown."""
    match event:
        case Measured(is_log_step=True):
            return f"step {event.step}  {describe_step(event.values)}"
        case Measured() if "eval/loss" in event.values:
            return f"step {event.step}  {describe_evaluation(event.values)}"
        case Rewound():
            return f"rewind {event.step}  {event.reason}"
        case WorkerFailed():
            return f"failure   {event.message.strip().rpartition(chr(10))[2]}"
        case Ended():
            return f"end {event.status}"
    return ""


def logs(arguments: list[str]) -> int:
    """Runs `ortlaunch logs`.

    Args:
        arguments: the command line after the verb.

    Raises:
        RequestError: no run or several match, the run has no such log, or the pattern is not valid.
    """
    options = _parser().parse_args(arguments)
    folder = find_run(options.run)
    find_sources = _source_finder(folder.path, options)
    is_wanted = _line_filter(options.grep)
    if options.follow:
        _follow(folder, find_sources, is_wanted, options.lines)
        return 0
    found = find_sources()
    if not found:
        raise RequestError(_no_log_message(folder, options))
    printed = sum(_print_lines(source, is_wanted, options.lines, final=True) for source in found)
    if not printed and options.log is None and options.grep is None and options.lines != 0:
        who = "no worker" if options.rank == "all" else f"rank {options.rank}"
        has = "has printed anything" if options.rank == "all" else "has printed nothing"
        say(f"{who} {has}; the log steps: ortlaunch logs {folder.run_id} --log steps", file=sys.stderr)
    return 0


def _follow(
    folder: RunFolder,
    find_sources: Callable[[], list[Source]],
    is_wanted: Callable[[str], bool],
    last_lines: int | None,
) -> None:
    """Prints lines as they come, until the run is over and all was read."""
    row = look(folder, max_age=_STATE_SECONDS).row
    if not find_sources() and not row.is_over:
        say(f"{folder.run_id} is {row.state.value}{f' ({row.reason})' if row.reason else ''}", file=sys.stderr)
    opened: dict[Path, Source] = {}
    looked_at, is_over = -math.inf, False
    while True:
        # The state is read before the logs, so that all lines from before the run's end are printed below.
        if time.monotonic() - looked_at > _STATE_SECONDS:
            row, _, problem = look(folder, max_age=_STATE_SECONDS)
            # A scheduler that could not be asked for once does not show that the run has ended.
            is_over = row.is_over or (row.state is State.UNKNOWN and not problem)
            looked_at = time.monotonic()
        for found in find_sources():
            is_new = found.path not in opened
            source = opened.setdefault(found.path, found)
            _print_lines(source, is_wanted, last_lines if is_new else None, final=is_over)
        sys.stdout.flush()
        if is_over:
            if not opened:
                say(f"{folder.run_id} is {_state_text(row)}; it has no log")
            return
        time.sleep(_POLL_SECONDS)


def _print_lines(source: Source, is_wanted: Callable[[str], bool], last: int | None, *, final: bool) -> int:
    """Prints the wanted lines that came since the last call, only the last `last` of them unless it is None.

    Returns:
        How many there were.
    """
    lines = (line for line in source.lines(final=final) if is_wanted(line))
    printed = 0
    for line in lines if last is None else deque(lines, maxlen=last):
        print(source.label + log_line(line))
        printed += 1
    return printed


def _source_finder(run_dir: Path, options: argparse.Namespace) -> Callable[[], list[Source]]:
    """Returns a function that finds the requested log files. More may come while a run goes on."""
    if options.log is not None:
        return lambda: _other_logs(run_dir, options.log)
    if options.rank == "all":
        return lambda: _all_ranks(run_dir)
    path = Run(run_dir).rank_log(options.rank)
    return lambda: [Source(path)] if path.is_file() else []


def _all_ranks(run_dir: Path) -> list[Source]:
    ranks = sorted(_ranks(run_dir))
    width = len(str(ranks[-1])) if ranks else 1
    return [Source(Run(run_dir).rank_log(rank), f"{rank:>{width}}| ") for rank in ranks]


def _ranks(run_dir: Path) -> list[int]:
    try:
        names = [path.name for path in Run(run_dir).logs.iterdir()]
    except OSError:
        return []
    return [int(match[1]) for name in names if (match := _RANK.fullmatch(name))]


def _other_logs(run_dir: Path, name: str) -> list[Source]:
    """Returns the logs of this name: those of earlier attempts, the oldest first, then the current ones."""
    if name == "steps":
        journal = Run(run_dir).journal_file
        return [Steps(journal)] if journal.is_file() else []
    numbers = sorted(int(path.name) for path in run_dir.glob("attempts/[0-9]*") if path.name.isdecimal())
    earlier = [run_dir / "attempts" / str(number) / f"{name}.log" for number in numbers]
    current = sorted(Run(run_dir).logs.glob(f"{name}*.log"))
    return [Source(path) for path in [*earlier, *current] if path.is_file()]


def _line_filter(pattern: str | None) -> Callable[[str], bool]:
    if pattern is None:
        return lambda line: True
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise RequestError(f"--grep {pattern}: not a regular expression: {error}") from None
    return lambda line: expression.search(line) is not None


def _no_log_message(folder: RunFolder, options: argparse.Namespace) -> str:
    row = look(folder, max_age=_STATE_SECONDS).row
    state = _state_text(row)
    ranks = _ranks(folder.path)
    if options.log is not None:
        existing = ", ".join(name for name in _OTHER_LOGS if _other_logs(folder.path, name)) or "none"
        return f"{folder.run_id} has no log of {options.log} (there are: {existing}); it is {state}"
    if ranks:
        return f"{folder.run_id} has no rank {options.rank}: it has ranks 0 to {max(ranks)}"
    started = next((name for name in ("slurm", "job") if _other_logs(folder.path, name)), None)
    hint = f"; what started it: --log {started}" if started is not None else ""
    return f"{folder.run_id} has no log of a worker yet; it is {state}{hint}"


def _state_text(row: Row) -> str:
    return row.state.value + (f": {row.reason}" if row.reason else "")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortlaunch logs",
        description="Print what a run's workers printed, all attempts in order; without --rank the first worker's.",
    )
    parser.add_argument("run", metavar="RUN", help=HELP)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    parser.add_argument("--rank", type=_rank, default="0", metavar="N|all", help="which worker (default: 0)")
    parser.add_argument("--grep", metavar="PATTERN", help="only lines in which this regular expression is found")
    parser.add_argument("-n", "--lines", type=count, metavar="N", help="begin with the last N lines of each log")
    parser.add_argument(
        "--log",
        choices=_OTHER_LOGS,
        help="another log: the log steps from the journal, torchrun's, the batch script's, or what MLflow did not take",
    )
    return parser


def _rank(text: str) -> str:
    number = whole(text)
    if text != "all" and number is None:
        raise argparse.ArgumentTypeError("must be a number or all")
    return text if number is None else str(number)
