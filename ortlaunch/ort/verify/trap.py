"""A trap of ONNX Runtime: something that a model computes differently there, without an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ortlaunch.config.options import TRAPS
from ortlaunch.config.schema import Allow
from ortlaunch.ort.verify.examination import Examination


@dataclass(frozen=True)
class Finding:
    """A difference between ONNX Runtime's results and PyTorch's."""

    kind: Allow
    what: str
    advice: str

    def refusal(self) -> str:
        """Returns the message that stops a run."""
        return (
            f"{self.what}. {self.advice}, use backend=eager or backend=compile, or accept it with "
            f"backend.allow=[{self.kind.value}] (ortlaunch check with the same configuration says more)"
        )


@dataclass(frozen=True)
class Trap:
    """One trap, and how it is found."""

    name: str
    advice: str
    """What the user can do, as the beginning of a sentence."""
    look: Callable[[Examination], str | None]
    """Says what is wrong, without a full stop; None where nothing is."""

    def finding(self, examination: Examination) -> Finding | None:
        """What it finds; None where the model does not fall into it."""
        what = self.look(examination)
        return None if what is None else Finding(Allow[self.name], what, self.advice)


def trap(name: str, advice: str) -> Callable[[Callable[[Examination], str | None]], Trap]:
    """Registers the function that looks for a trap.

    Args:
        name: that of the module; users write it into ``backend.allow``.
        advice: see `Trap`.
    """

    def register(look: Callable[[Examination], str | None]) -> Trap:
        made = Trap(name, advice, look)
        TRAPS.register(name, made)
        return made

    return register
