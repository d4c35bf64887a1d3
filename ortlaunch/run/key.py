"""The key of a run, ``<date>-<time>-<id>``, and its folder's name, ``<date>-<time>-<name>-<id>``.

The id is ortlaunch's short id. The date and time are those of the first launch.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class RunKey:
    """The two parts of a run's key."""

    when: str
    """``<date>-<time>``, which sorts by time."""
    run_id: str

    def __str__(self) -> str:
        """The key as text."""
        return f"{self.when}-{self.run_id}"

    def folder(self, name: str) -> str:
        """The name of the run's folder.

        Args:
            name: the run's name, in the form that it has in a folder's name.
        """
        return f"{self.when}-{name}-{self.run_id}"

    @staticmethod
    def new() -> RunKey:
        """The key of a new run, which no other run has."""
        return RunKey(time.strftime("%Y%m%d-%H%M%S"), secrets.token_hex(3))

    @staticmethod
    def parsed(text: str) -> RunKey:
        """The key in its text."""
        when, _, run_id = text.rpartition("-")
        return RunKey(when, run_id)

    @staticmethod
    def of_folder(name: str) -> RunKey:
        """The key in the name of a run's folder."""
        parts = name.split("-")
        return RunKey("-".join(parts[:2]), parts[-1])
