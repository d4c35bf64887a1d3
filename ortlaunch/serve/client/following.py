"""Follows a run of a service: its log, and its end."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from ortlaunch.base.text import log_line
from ortlaunch.serve.client.connection import Connection

OVER = ("finished", "stopped", "failed", "killed", "cancelled", "refused")
"""The states of a run that does not go on by itself."""
_POLL_SECONDS = 1.0
_PART_BYTES = 256 * 1024


def print_log(service: Connection, run: str, log: str, last: int | None) -> None:
    """Prints a log from its beginning.

    Args:
        service: the service.
        run: the run.
        log: a rank, or the name of another log.
        last: only so many lines at its end; None for all.
    """
    if last is None:
        for _, lines in _parts(service, run, log, 0):
            _show(lines)
        return
    # No more is read of a long log than its last lines need.
    begin, kept, back = 1, deque[str](maxlen=last), _PART_BYTES
    while begin > 0 and len(kept) < last:
        parts = list(_parts(service, run, log, -back))
        begin = parts[0][0]
        kept = deque((line for _, lines in parts for line in lines), maxlen=last)
        back *= 4
    _show(list(kept))


def follow(service: Connection, run: str, log: str) -> None:
    """Prints a log as it grows, until the run is over and all was read. Each line comes once.

    A run that waits in the queue, or loads, has no log yet: this is said once and waited for.

    Args:
        service: the service.
        run: the run.
        log: a rank, or the name of another log.
    """
    offset, has_said = 0, False
    while True:
        # The state is asked for before the log, so that all lines from before the run's end are printed below.
        detail = service.get("runs", run)
        state = detail["row"]["state"]
        is_over = state in OVER
        if not is_over and log not in (*map(str, detail["ranks"]), *detail["logs"]):
            if not has_said:
                print(f"ortlaunch: the run is {state} and has no such log yet: waiting for it", file=sys.stderr)
                has_said = True
            time.sleep(_POLL_SECONDS)
            continue
        while True:
            part = service.get("runs", run, "logs", log, offset=offset, limit=_PART_BYTES)
            _show(_lines(part))
            if part["next"] == offset or not part["more"]:
                offset = part["next"]
                break
            offset = part["next"]
        if is_over:
            _show([part["rest"]] if part["rest"] else [])
            return
        time.sleep(_POLL_SECONDS)


def wait_for_end(service: Connection, run: str, seconds: float) -> dict[str, Any]:
    """Waits until a run is over, and returns its row; after `seconds` the row of one that goes on.

    Args:
        service: the service.
        run: the run.
        seconds: how long to wait.
    """
    deadline = time.monotonic() + seconds
    while True:
        detail: dict[str, Any] = service.get("runs", run)
        row: dict[str, Any] = detail["row"] | {"checkpoints": detail["checkpoints"]}
        if row["state"] in OVER or time.monotonic() >= deadline:
            return row
        time.sleep(_POLL_SECONDS)


def _parts(service: Connection, run: str, log: str, offset: int) -> Iterator[tuple[int, list[str]]]:
    """Yields the lines of a log from a byte on, part by part, each with the byte where it begins."""
    while True:
        part = service.get("runs", run, "logs", log, offset=offset, limit=_PART_BYTES)
        rest = [part["rest"]] if not part["more"] and part["rest"] else []
        yield part["offset"], [*_lines(part), *rest]
        if not part["more"] or part["next"] == offset:
            return
        offset = part["next"]


def _lines(part: dict[str, Any]) -> list[str]:
    text: str = part["text"]
    return text.removesuffix("\n").split("\n") if text else []


def _show(lines: list[str]) -> None:
    for line in lines:
        print(log_line(line))
    sys.stdout.flush()
