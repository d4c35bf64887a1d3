"""What a run folder says of its run, as tests ask for it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any


def journal(run_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's journal."""
    path = run_dir / "journal.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Recorded(ABC):
    """A run that has ended."""

    @property
    @abstractmethod
    def run_dir(self) -> Path:
        """The run folder."""

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The journal."""
        return journal(self.run_dir)

    def series(self, name: str) -> dict[int, float]:
        """A metric's values by step."""
        return {step: values[name] for step, values in self._metrics() if name in values}

    @property
    def losses(self) -> dict[int, float]:
        """train/loss by step."""
        return self.series("train/loss")

    @property
    def tags(self) -> dict[str, str]:
        """The journal's tags, the latest value of each."""
        return {
            key: value for event in self.events if event["event"] == "tags" for key, value in event["values"].items()
        }

    @property
    def points(self) -> set[tuple[str, int, float]]:
        """All metric values of the journal as (name, step, value)."""
        return {(name, step, value) for step, values in self._metrics() for name, value in values.items()}

    @property
    def status(self) -> str:
        """How the journal says that the run ended."""
        return next((event["status"] for event in reversed(self.events) if event["event"] == "end"), "unfinished")

    def log(self, rank: int) -> str:
        """A worker's log file."""
        return (self.run_dir / "logs" / f"rank-{rank}.log").read_text()

    def _metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        for event in self.events:
            if event["event"] == "metrics":
                yield event["step"], event["values"]
