"""Parts of a run's logs: pages of them, and searches in them. What workers print is shown as text and nothing else."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

from ortlaunch.base.secrets import without_secrets
from ortlaunch.base.text import log_line
from ortlaunch.run.run import Run
from ortlaunch.serve.api.shapes import LogPart, Match
from ortlaunch.serve.follow.beneath import files_beneath, open_beneath

PAGE_BYTES = 64 * 1024
MOST_BYTES = 256 * 1024
_LEAST_PIECE = 4096
"""Bytes of a line that is shown in pieces. In smaller ones a secret would not be recognized."""
"""The largest part of a log in one answer."""
_LONGEST_LINE = 4000
_MOST_MATCHES = 200
_SEARCHED_BYTES = 64 << 20
"""A search ends after so many bytes, and says where to go on."""
_BLOCK = 1 << 20
_RANK = re.compile(r"rank-(\d+)\.log")
_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
"""What colours a text or moves a terminal's cursor."""


def log_file(run: Run, rank: str) -> Path | None:
    """Returns the path of a log relative to the run folder; None for what is no name of one.

    Args:
        run: the run.
        rank: a rank, or the name of another log, such as ``torchrun``.
    """
    if rank.isascii() and rank.isdecimal() and len(rank) < 10:
        return run.rank_log(int(rank)).relative_to(run.path)
    return (run.logs / f"{rank}.log").relative_to(run.path) if _NAME.fullmatch(rank) else None


def logs_of(run: Run) -> tuple[list[int], list[str]]:
    """Returns the ranks that have logs, and the names of the other logs."""
    names = files_beneath(run.path, run.logs.relative_to(run.path))
    ranks = sorted(int(match[1]) for name in names if (match := _RANK.fullmatch(name)))
    others = [name.removesuffix(".log") for name in names if name.endswith(".log") and not _RANK.fullmatch(name)]
    return ranks, [name for name in others if _NAME.fullmatch(name)]


def clean(data: bytes) -> str:
    """Returns whole lines of a log as text: without secrets, control characters, and what progress bars overwrote."""
    text = _ESCAPES.sub("", data.decode("utf-8", "replace"))
    # Lines are cut before secrets are looked for: what is dropped is not shown, and a long line would take long.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    cut = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…" for line in lines]
    return "\n".join(log_line(line) for line in without_secrets("\n".join(cut)).split("\n"))


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
        log.seek(start)
        data = log.read(limit)
    whole = whole_lines(data, is_full=len(data) == limit >= _LEAST_PIECE)
    rest = data[len(whole) :] if start + len(data) >= size else b""
    return {
        "rank": rank,
        "offset": start,
        "next": start + len(whole),
        "size": size,
        "text": clean(whole),
        "rest": clean(rest),
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
        offset: the byte where a line begins.
        word: what is looked for. It is no expression: one could take for ever.

    Raises:
        OSError: the log cannot be read.
    """
    expression = re.compile(re.escape(word.encode()), re.IGNORECASE)
    found: list[Match] = []
    with open_beneath(run.path, file) as log:
        size = os.fstat(log.fileno()).st_size
        at = max(0, min(offset, size))
        last = at + _SEARCHED_BYTES
        while at < last and len(found) < _MOST_MATCHES:
            log.seek(at)
            data = log.read(_BLOCK)
            block = whole_lines(data, is_full=len(data) == _BLOCK) or data
            if not block:
                break
            at += _matches(block, at, expression, word.casefold(), found)
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


def _matches(block: bytes, at: int, expression: re.Pattern[bytes], word: str, found: list[Match]) -> int:
    """Adds the lines of a block that match; returns how many bytes were searched."""
    position = 0
    while (match := expression.search(block, position)) is not None:
        begin = block.rfind(b"\n", 0, match.start()) + 1
        end = block.find(b"\n", match.end())
        end = len(block) if end < 0 else end
        # A search that found what is hidden would tell a secret letter by letter.
        if word in (line := clean(block[begin:end])).casefold():
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
