"""The report of a proof: rows with what was expected and what was seen, one table per theme, in Markdown."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

LONGEST = 400
"""Characters of a cell; longer ones are cut in the middle."""


class Outcome(Enum):
    """How a row ended."""

    ok = "ok"
    failed = "**failed**"
    not_possible = "not possible here"
    skipped = "skipped"


@dataclass(frozen=True)
class Row:
    """One thing that was looked at."""

    what: str
    expected: str
    seen: str
    outcome: Outcome


@dataclass
class Table:
    """The rows of one theme."""

    title: str
    rows: list[Row] = field(default_factory=list)
    seconds: float | None = None
    """How long it took; None while it is not over."""


@dataclass
class Report:
    """All tables, and the facts that stand above them."""

    title: str
    facts: dict[str, str]
    tables: list[Table] = field(default_factory=list)

    @property
    def counts(self) -> Counter[Outcome]:
        """How many rows ended in each way."""
        return Counter(row.outcome for table in self.tables for row in table.rows)

    @property
    def exit_code(self) -> int:
        """1 if a row failed, else 0."""
        return 1 if self.counts[Outcome.failed] else 0

    @property
    def summary(self) -> str:
        """The counts in words."""
        words = {Outcome.ok: "ok", Outcome.failed: "failed", Outcome.not_possible: "not possible here"}
        words[Outcome.skipped] = "skipped for lack of time"
        return ", ".join(f"{self.counts[outcome]} {word}" for outcome, word in words.items())

    def markdown(self) -> str:
        """The report as a page."""
        lines = [f"# {self.title}", "", *(f"- {name}: {value}" for name, value in self.facts.items())]
        lines.append(f"- rows: {self.summary}")
        if self.counts[Outcome.skipped]:
            lines.append("- for what was skipped: --only and the section's name, with more --minutes")
        lines.append("")
        for table in self.tables:
            took = "not over" if table.seconds is None else f"{table.seconds:.0f} s"
            lines += [f"## {table.title} ({took})", "", "| what | expected | seen | |", "| --- | --- | --- | --- |"]
            for row in table.rows:
                cells = (row.what, row.expected, row.seen, row.outcome.value)
                lines.append(f"| {' | '.join(map(_cell, cells))} |")
            lines.append("")
        return "\n".join(lines)


def _cell(text: str) -> str:
    """A text as one cell: on one line, without what ends a cell, and not endless."""
    flat = re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
    return flat if len(flat) <= LONGEST else f"{flat[: LONGEST // 2]} … {flat[-LONGEST // 2 :]}"
