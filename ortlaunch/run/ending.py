"""The end of a run, by whoever ends it: in its journal, its claim and its sweep."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.base.text import say
from ortlaunch.run import sweep
from ortlaunch.run.events import Status
from ortlaunch.run.goodput import Goodput, journal_goodput
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.run.state import STATE_TAG

_STATES: dict[Status, str] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
Release = Callable[[tuple[Status, int] | None], None]
"""Releases the claim of a run; it takes the end that the journal could not take."""


@dataclass(frozen=True)
class Ending:
    """What follows from the end of a run."""

    account: Goodput | None
    """Where its wall time went; None for a run without a step."""
    sweep: Path | None
    """The folder of the sweep that is over with it, whose journal can now be sent."""


def end_run(
    run: Run,
    journal: Journal,
    status: Status,
    release: Release | None = None,
    *,
    tags: Mapping[str, str] | None = None,
    is_job: bool = False,
    at: int | None = None,
) -> Ending:
    """Journals the end of a run, releases its claim, and marks the end in its sweep.

    Args:
        run: the run.
        journal: its journal. A patient one keeps its end for the claim where the disk is full.
        status: how it ends.
        release: releases the claim; None leaves that to the caller, who has more to do for the run.
        tags: further tags.
        is_job: it was in a queue, and has a tag of its state.
        at: when it ended, in milliseconds, if that was long ago: how long it trained is then not known.

    Raises:
        OSError: a journal that is not patient cannot be written.
    """
    if all_tags := {**({STATE_TAG: _STATES[status]} if is_job else {}), **(tags or {})}:
        journal.tags(all_tags)
    account = None
    if at is None:
        with suppress(OSError):  # It reads the journal.
            account = journal_goodput(journal)
    journal.end(status, at=at)
    if release is not None:
        release(journal.unwritten_end)
    try:
        return Ending(account, sweep.note_end(run.path, status))
    except OSError as error:
        say(f"ortlaunch: the sweep's folder cannot be written: {error.strerror or error}", file=sys.stderr)
        return Ending(account, None)
