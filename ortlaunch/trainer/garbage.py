"""Python's garbage collection: none while modules are imported, and later at fixed steps."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Makes no collection in the block, and leaves out of later ones all objects that exist at its end.

    It is for imports, whose objects live to the end of the process: every collection would go over them again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def collected_every(steps: int) -> Iterator[Callable[[int], None]]:
    """Replaces automatic garbage collection by collections at fixed steps.

    Automatic collection stops each worker at another step, and the other workers wait for it in the next collective.

    Args:
        steps: steps between two collections; 0 leaves everything to Python.

    Yields:
        A function to call after each step, with the step's number. Its first call, when start-up is over, also excludes
        all objects that exist by then from later collections.
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
