"""What became of one drawn model."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Verdict:
    """What became of one drawn model."""

    outcome: str
    """same, refused, needless, wrong, traceback, killed, or invalid: eager PyTorch cannot train it."""
    reason: str = ""
    """In one line."""
    kinds: tuple[str, ...] = ()
    """What the model is made of."""
    source: str = ""
    is_random: bool = False
    """Whether two passes over a batch differ; then only errors are judged."""

    @property
    def is_bad(self) -> bool:
        """Whether ortlaunch must be mended."""
        return self.outcome in ("wrong", "traceback", "killed")

    def about(self, kinds: list[str], source: str, is_random: bool) -> Verdict:
        """The same verdict with the model that it is about."""
        return replace(self, kinds=tuple(kinds), source=source, is_random=is_random)
