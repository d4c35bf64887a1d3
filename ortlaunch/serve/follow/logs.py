"""Parts of a run's logs: pages of them, and searches in them. What workers print is shown as text and nothing else.

The log ``steps`` is the journal, of which each event is a line; its offsets are those of the journal.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ortlaunch.base.secrets import without_secrets
from ortlaunch.base.text import log_line, public_text
from ortlaunch.run.events import Ended, Event, FileKept, Measured, Requeued, Rewound, Started, WorkerFailed
from ortlaunch.run.journal import decoded_lines
from ortlaunch.run.run import Run
from ortlaunch.serve.api.shapes import LogPart, Match
from ortlaunch.serve.follow.beneath import files_beneath, open_beneath

STEPS = "steps"
"""The name of the journal as a log."""
_MOST_FIGURES = 8
PAGE_BYTES = 64 * 1024
MOST_BYTES = 256 * 1024
"""The largest part of a log in one answer."""
BEFORE_BYTES = 16 * 1024
"""So much of what is before a part is read with it. A private key is shorter."""
_LEAST_PIECE = 4096
"""Bytes of a line of which the beginning is shown. In smaller ones a secret would not be recognized."""
_LONGEST_LINE = 4000
_MARGIN = 512
"""Characters that are not shown before the place where a line is cut: a secret that is cut is not recognized."""
_MOST_MATCHES = 200
_SEARCHED_BYTES = 64 << 20
"""A search ends after so many bytes, and says where to go on."""
_BLOCK = 1 << 20
_RANK = re.compile(r"rank-(\d+)\.log")
_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
"""What colours a text or moves a terminal's cursor."""
_LINE_END = re.compile(rb"[\r\n]")
_KEY_EDGE = re.compile(r"-----(BEGIN|END)[A-Z0-9 ]* PRIVATE KEY(?: BLOCK)?-----")
_KEY_BEGIN = "-----BEGIN PRIVATE KEY-----"
_CUT = "\ufffe"
"""Ends a line that was cut, while secrets are looked for. It is no character."""


def log_file(run: Run, rank: str) -> Path | None:
    """Returns the path of a log relative to the run folder; None for what is no name of one.

    Args:
        run: the run.
        rank: a rank, or the name of another log, such as ``torchrun`` or ``steps``.
    """
    if rank == STEPS:
        return run.journal_file.relative_to(run.path)
    if rank.isascii() and rank.isdecimal() and len(rank) < 10:
        return run.rank_log(int(rank)).relative_to(run.path)
    return (run.logs / f"{rank}.log").relative_to(run.path) if _NAME.fullmatch(rank) else None


def logs_of(run: Run) -> tuple[list[int], list[str]]:
    """Returns the ranks that have logs, and the names of the other logs."""
    names = files_beneath(run.path, run.logs.relative_to(run.path))
    ranks = sorted(int(match[1]) for name in names if (match := _RANK.fullmatch(name)))
    others = [name.removesuffix(".log") for name in names if name.endswith(".log") and not _RANK.fullmatch(name)]
    return ranks, [name for name in others if _NAME.fullmatch(name)]


def shown(run: Run, file: Path, data: bytes, before: bytes = b"", *, is_cut: bool = False) -> str:
    """Returns a part of a log as text, by `clean`; of the journal what its events say."""
    if file.name != run.journal_file.name:
        return clean(data, before, is_cut=is_cut)
    return "".join(f"{line}\n" for event in decoded_lines(data) if (line := _line_of(event)))


def _line_of(event: Event) -> str:
    """An event as a line with its time, by the service's clock; empty for one that only describes the run."""
    match event:
        case Started():
            said = "the run begins"
        case Measured():
            figures = ", ".join(f"{name} {value:.6g}" for name, value in list(event.values.items())[:_MOST_FIGURES])
            said = f"step {event.step}  {figures}"
        case Rewound():
            said = f"goes back to step {event.step}"
        case Requeued():
            said = f"queues again: {event.reason}"
        case FileKept():
            said = f"keeps {event.path}"
        case WorkerFailed():
            said = f"rank {event.rank} on {event.host} failed: {event.message.strip().rpartition(chr(10))[2]}"
        case Ended():
            said = f"ends: {event.status.lower()}"
        case _:
            return ""
    try:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.t / 1000))
    except (ValueError, OverflowError, OSError):
        at = "?"
    return public_text(f"{at}  {said}"[:_LONGEST_LINE])


def clean(data: bytes, before: bytes = b"", *, is_cut: bool = False) -> str:
    """Returns a part of a log as text: without secrets, control characters, and what progress bars overwrote.

    What is before a secret tells that it is one. A part that begins inside a line is therefore shown from the next line
    on, and the line before it, or the beginning of a private key, counts too.

    Args:
        data: the part.
        before: the bytes before it, `BEFORE_BYTES` at most.
        is_cut: whether its last line goes on behind it.
    """
    begin = _first_line(before, data)
    if begin == len(data):
        return ""
    *whole, last = _plain(data[begin:]).split("\n")
    if is_cut:
        earlier, is_replaced, _ = last.rpartition("\r")
        last = earlier if is_replaced else last + _CUT
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in (*whole, last)]
    # Lines are cut before secrets are looked for: what is dropped is not shown, and a long line would take long.
    text = "\n".join(line if len(line) <= _LONGEST_LINE + _MARGIN else _cut(line) for line in lines)
    context = _context(before + data[:begin])
    # A secret that goes over the end of the context takes lines of the part along.
    shown = without_secrets(text) if context is None else without_secrets(f"{context}\n{text}").partition("\n")[2]
    return "\n".join(log_line(_shortened(line)) for line in shown.split("\n"))


def read_after(log: BinaryIO, start: int, limit: int) -> tuple[bytes, bytes]:
    """Reads a part of a log.

    Args:
        log: the file.
        start: the byte to begin at.
        limit: bytes at most.

    Returns:
        What is before it, `BEFORE_BYTES` at most, and the part.
    """
    before = min(start, BEFORE_BYTES)
    log.seek(start - before)
    data = log.read(before + limit)
    return data[:before], data[before:]


def _plain(data: bytes) -> str:
    return _ESCAPES.sub("", data.decode("utf-8", "replace"))


def _cut(line: str) -> str:
    return line[: _LONGEST_LINE + _MARGIN] + _CUT


def _shortened(line: str) -> str:
    """A line as it is shown; of one that was cut, not what is directly before the cut."""
    if not line.endswith(_CUT):
        return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"
    return f"{line[: min(_LONGEST_LINE, max(0, len(line) - 1 - _MARGIN))]}…"


def _first_line(before: bytes, data: bytes) -> int:
    """Where the first whole line of a part begins, or the text after a carriage return, which replaces its line."""
    if before[-1:] in b"\r\n":
        return 0
    found = _LINE_END.search(data)
    return len(data) if found is None else found.end()


def _context(before: bytes) -> str | None:
    """The line that decides about what follows; None at the beginning of a log."""
    text = _plain(before)
    edges = _KEY_EDGE.findall(text)
    if edges and edges[-1] == "BEGIN":
        return _KEY_BEGIN
    lines = text.rsplit("\n", 2)
    return lines[-2][-_MARGIN:] if len(lines) > 1 else None


def part(run: Run, file: Path, rank: str, offset: int | None, limit: int) -> LogPart:
    """Returns whole lines of a log.

    Args:
        run: the run.
        file: the log, relative to the run folder.
        rank: its name in the API.
        offset: the byte to begin at, or before it the next line's beginning; a negative one counts from the end. None
            means the last `limit` bytes.
        limit: bytes at most.

    Raises:
        OSError: the log cannot be read.
    """
    with open_beneath(run.path, file) as log:
        size = os.fstat(log.fileno()).st_size
        wanted = size - limit if offset is None else size + offset if offset < 0 else offset
        start = _line_start(log, max(0, min(wanted, size)), limit)
        before, data = read_after(log, start, limit)
    whole = whole_lines(data, is_full=len(data) == limit >= _LEAST_PIECE)
    rest = data[len(whole) :] if start + len(data) >= size else b""
    return {
        "rank": rank,
        "offset": start,
        "next": start + len(whole),
        "size": size,
        "text": shown(run, file, whole, before, is_cut=not whole.endswith(b"\n")),
        "rest": "" if rank == STEPS else clean(rest, (before + whole)[-BEFORE_BYTES:]),
        "matches": None,
        "more": start + len(data) < size,
    }


def whole_lines(data: bytes, *, is_full: bool) -> bytes:
    """Returns the whole lines that data begins with; of a line that is longer than what was read, its part."""
    end = data.rfind(b"\n") + 1
    return data if end == 0 and is_full else data[:end]


def search(run: Run, file: Path, rank: str, offset: int, word: str) -> LogPart:
    """Returns the lines from a byte on that have a word, in capital or small letters.

    Args:
        run: the run.
        file: the log, relative to the run folder.
        rank: its name in the API.
        offset: the byte where a line begins; the rest of a line is not searched.
        word: what is looked for. It is no expression: one could take for ever.

    Raises:
        OSError: the log cannot be read.
    """
    # What an event says does not stand in the journal as it is shown.
    expression = re.compile(rb"[^\n]+" if rank == STEPS else re.escape(word.encode()), re.IGNORECASE)
    as_text = partial(shown, run, file)
    found: list[Match] = []
    with open_beneath(run.path, file) as log:
        size = os.fstat(log.fileno()).st_size
        at = max(0, min(offset, size))
        last = at + _SEARCHED_BYTES
        while at < last and len(found) < _MOST_MATCHES:
            before, data = read_after(log, at, _BLOCK)
            block = whole_lines(data, is_full=len(data) == _BLOCK) or data
            if not block:
                break
            at += _matches(before, block, at, expression, as_text, word.casefold(), found)
    return {
        "rank": rank,
        "offset": offset,
        "next": at,
        "size": size,
        "text": "",
        "rest": "",
        "matches": found,
        "more": at < size,
    }


def _matches(
    before: bytes,
    block: bytes,
    at: int,
    expression: re.Pattern[bytes],
    as_text: Callable[..., str],
    word: str,
    found: list[Match],
) -> int:
    """Adds the lines of a block that match; returns how many bytes were searched."""
    position = _first_line(before, block)
    while (match := expression.search(block, position)) is not None:
        begin = max(position, block.rfind(b"\n", position, match.start()) + 1)
        end = block.find(b"\n", match.end())
        end = len(block) if end < 0 else end
        near = block[max(0, begin - BEFORE_BYTES) : begin]
        line = as_text(block[begin:end], (before + near)[-BEFORE_BYTES:], is_cut=end == len(block) == _BLOCK).rstrip(
            "\n"
        )
        # A search that found what is hidden would tell a secret letter by letter.
        if word in line.casefold():
            found.append({"offset": at + begin, "line": line})
        position = end + 1
        if len(found) >= _MOST_MATCHES or position >= len(block):
            return min(position, len(block))
    return len(block)


def _line_start(log: BinaryIO, at: int, limit: int) -> int:
    """The beginning of the first line at a byte or after it; the byte itself if no line begins soon."""
    if at == 0:
        return 0
    log.seek(at - 1)
    found = log.read(limit + 1).find(b"\n")
    return at if found < 0 else at + found
