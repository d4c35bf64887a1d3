"""Python's garbage collection at fixed steps."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def collected_every(steps: int) -> Iterator[Callable[[int], None]]:
    """Switches automatic garbage collection off within it.

    Left to itself it strikes each worker at another step, and the others wait for it in the next collective.

    Args:
        steps: steps between two collections; 0 leaves everything to Python.

    Yields:
        What is to be called after each step, with its number counted from 1. At the first, when start-up is over,
        it also sets all objects aside that exist by then, so that later collections need not look at them again.
    """
    if steps == 0:
        yield lambda step: None
        return
    has_begun = False

    def step_done(step: int) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            gc.collect()
            gc.freeze()
        elif step % steps == 0:
            gc.collect()

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield step_done
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
